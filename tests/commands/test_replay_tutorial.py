"""The commands of docs/tutorials/schedule.md that lead from a log to a decision run unchanged on real logs."""

import csv
import re
import shlex
from pathlib import Path

import pytest
from study_rows import read_table
from toy_runs import outcome

from rljax import cli

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs/tutorials/schedule.md").read_text(encoding="utf-8").partition("## 4.")[2]
COMMANDS, *PRINTED = (block.strip().splitlines() for block in re.findall(r"```\w*\n(.*?)```", SECTION, re.DOTALL))
LOGS = {"my_run": ("constant", 4), "other_seed": ("constant", 5), "lower_rate": ("constant_tenth", 4)}
COLUMNS = {
    "step": "step",
    "response_length/mean": "response_length/mean",
    "response_length/clip_ratio": "response_length/truncated_fraction",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Returns a directory with the lengths of three runs as CSV, with two decimals as a dashboard exports them."""
    place, runs = tmp_path_factory.mktemp("logs"), read_table(ROOT / "benchmarks/study_slow.parquet")
    for name, run in LOGS.items():
        with (place / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for row in runs[run]:
                writer.writerow([row["step"], *(f"{row[key]:.2f}" for key in list(COLUMNS.values())[1:])])
    return place


@pytest.mark.parametrize("number", range(3))
def test_a_command_prints_what_the_page_shows(number, directory, monkeypatch):
    monkeypatch.chdir(directory)
    program, *words = shlex.split(COMMANDS[number])
    assert (program, len(COMMANDS), len(PRINTED)) == ("rljax", 3, 3)
    status, out, err = outcome(cli.main, words)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert [line for line in PRINTED[number] if line not in lines] == []
    assert number != 1 or (directory / "my_run.png").is_file()


def test_the_page_names_the_accuracies_of_the_runs():
    runs = read_table(ROOT / "benchmarks/study_slow.parquet")
    final = {name: sum(row["reward/mean"] for row in runs[run][-10:]) / 10 for name, run in LOGS.items()}
    assert f"accuracy of {final['lower_rate']:.2f}, and `my_run` at {final['my_run']:.2f}" in SECTION
