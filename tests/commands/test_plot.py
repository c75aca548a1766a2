"""The program that plots runs: the papers' figures, the message for a missing metric, and a caller's mistakes."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
from pathlib import Path

import pytest
from records import record_row, small_dump, write_record

from rljax.commands.plot import ALL_PANELS, FIGURES, figures_table, main, plot_figure
from rljax.errors import run_cli
from rljax.record.figure import read_runs
from rljax.record.token_dumps import write_dump

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("error")


def write_run(directory, rows, *, dump=True):
    write_record(directory, rows)
    if dump:
        write_dump(directory / "rollouts" / "step_000004.parquet", small_dump())
    return directory


@pytest.fixture
def runs(tmp_path):
    """Returns a run that collapses at step 26, and a run whose rate is halved every 14 steps."""
    rewards = [0.5] * 20 + [0.0] * 20
    collapsed = [record_row(step) | {"reward/mean": reward} for step, reward in enumerate(rewards, 1)]
    scheduled = [record_row(step, 2.0, period=14) for step in range(1, 41)]
    return [write_run(tmp_path / "one", collapsed), write_run(tmp_path / "two", scheduled)]


@pytest.mark.parametrize("name", FIGURES)
def test_each_panel_has_the_curves_of_both_runs(name, runs):
    paper, read = FIGURES[name], read_runs(runs)
    figure = plot_figure(name, read, 0.9)
    panels = [panel for row in paper.panels for panel in row]
    assert len(figure.axes) == len(panels)
    for panel, axis in zip(panels, figure.axes, strict=True):
        colors = [line.get_color() for line in axis.lines if len(line.get_xdata()) > 2 or panel == "ratio_by_length"]
        assert {run.color for run in read} <= set(colors)
        needed = ALL_PANELS[panel].needs
        if "*" not in needed:
            assert (
                next(line.get_ydata()[0] for line in axis.lines if line.get_color() == read[1].color)
                == (read[1].rows[0][needed])
            )
        else:
            assert not axis.texts


def dotted(figure):
    return [
        [line.get_xdata()[0] for line in axis.lines if line.get_linestyle() == ":" and len(line.get_xdata()) == 2]
        for axis in figure.axes
    ]


def test_the_dotted_lines_are_the_captions(runs):
    """Figures 1 and 3 mark the collapse, figures 7 and 8 the first decay of the rate, and others nothing."""
    found = {name: dotted(plot_figure(name, read_runs(runs), 0.9)) for name in FIGURES}
    assert {name: lines for name, lines in found.items() if any(lines)} == {
        "1": [[26], [26]],
        "3": [[26]],
        "7": [[14]] * 5,
        "8": [[14]] * 5,
    }


@pytest.mark.parametrize("name", FIGURES)
def test_what_a_run_lacks_is_named_with_the_run(name, runs, tmp_path):
    """One run lacks one of the figure's metrics at a time; the message must name this metric and no other."""
    for pattern in set(FIGURES[name].needs):
        rows = [{k: v for k, v in record_row(s).items() if not fnmatch.fnmatch(k, pattern)} for s in range(1, 6)]
        poor = write_run(tmp_path / f"poor{pattern.replace('/', '_')}", rows, dump="parquet" not in pattern)
        with pytest.raises(ValueError, match="needs") as caught:
            plot_figure(name, read_runs([*runs, poor]), 0.9)
        assert str(caught.value) == f"figure {name} needs {pattern}, which is not in {poor}"


def test_a_metric_that_is_never_a_number_is_lacking(tmp_path):
    run = write_run(tmp_path / "run", [record_row(step) | {"mismatch/log_ppl_abs_diff": None} for step in (1, 2)])
    with pytest.raises(ValueError, match=r"figure 1 needs mismatch/log_ppl_abs_diff, which is not in .*run$"):
        plot_figure("1", read_runs([run]), 0.9)


def test_the_page_has_the_programs_table():
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.+) \|$", (ROOT / "docs/plots.md").read_text(encoding="utf-8"), re.M)
    assert [name for name, _ in rows] == list(FIGURES)
    for name, rest in rows:
        title, arms, metrics, _ = rest.split(" | ")
        assert title == FIGURES[name].title
        assert arms == ", ".join(f"`{run}`" for run in FIGURES[name].runs)
        assert metrics == ", ".join(f"`{needed}`" for needed in FIGURES[name].needs)


def test_the_table_names_arms_of_the_page_and_fits_a_terminal():
    page = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
    arms = set(re.findall(r"^\| `((?:qwen3|deepseek)_[^`]+)` \|", page, re.MULTILINE))
    assert {run for paper in FIGURES.values() for run in paper.runs} <= arms
    table = figures_table()
    assert all(f"{name}: {paper.title}" in table for name, paper in FIGURES.items())
    assert max(map(len, table.splitlines())) <= 100


def plot(*arguments, cwd):
    command = [sys.executable, "-m", "rljax.cli", "plot", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_the_program_plots_into_the_run_or_here(runs, tmp_path):
    done = plot(*runs, "--figure", "9", "--labels", "a,b", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "figure_9.png\n"), done.stderr
    assert (tmp_path / "figure_9.png").exists()


def test_one_run_is_plotted_into_itself_and_several_here(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments, out in (([runs[0]], runs[0] / "report.png"), ([*runs, "--smooth", "0.5"], Path("report.png"))):
        assert run_cli(main, [str(argument) for argument in arguments]) == 0
        assert capsys.readouterr().out == f"{out}\n"
        assert out.exists()


def test_the_help_lists_the_figures(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert figures_table() in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere/metrics.jsonl: No such file or directory"),
        (["empty"], "empty/metrics.jsonl: no rows to plot"),
        (["damaged"], "damaged/metrics.jsonl:1: not a row"),
        ([], "expected at least one run directory"),
        (["one", "--smooth", "2"], "smooth must be in the range [0, 1), got 2.0"),
        (["one", "--smooth", "x"], "--smooth: expected FLOAT, got x"),
        (["one", "--out", "one/metrics.jsonl/x.png"], "one/metrics.jsonl"),
        (["one", "empty-row", "--figure", "1"], "figure 1 needs mismatch/log_ppl_abs_diff, which is not in empty-row"),
        (["one", "--figure", "14"], "--figure: expected one of 1, 2, 3, 6, 7,"),
        (["one", "two", "--labels", "a"], "expected 2 labels, one per run, got 1"),
    ],
)
def test_the_programs_mistakes_take_one_line(runs, tmp_path, arguments, message, monkeypatch, capsys):
    write_record(tmp_path / "empty", [])
    write_record(tmp_path / "empty-row", [{"step": 1}])
    (write_record(tmp_path / "damaged", []) / "metrics.jsonl").write_text("rubbish\n{}\n")
    monkeypatch.chdir(tmp_path)
    assert run_cli(main, arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
