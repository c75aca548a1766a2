"""The word of a run is the diagnosis of its last rows, and is said when it changes."""

import gzip
import json
from pathlib import Path

import pytest

from rljax.diagnose.evidence import Declared
from rljax.run.watch import CAUSE, CONFIDENCE, EVERY, Word

LOGS = Path(__file__).parents[1] / "data/planted_logs"


def rows_of(name):
    with gzip.open(LOGS / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def test_a_word_is_recorded_every_so_many_steps_and_said_once(capsys):
    rows = rows_of("eight_bits")[:EVERY]
    word = Word(Declared("bfloat16", "bfloat16", "fp8_e5m2"))
    said = [word(row) for row in rows]
    assert said[:-1] == [{}] * (EVERY - 1)
    assert said[-1] == {CAUSE: "eight_bits", CONFIDENCE: "sure"}
    assert f"diagnosis: step {EVERY}: eight_bits (sure): " in capsys.readouterr().err
    for step in range(EVERY + 1, 2 * EVERY + 1):
        last = word({**rows[step % EVERY], "step": step})
    assert last[CAUSE] == "eight_bits"
    assert "diagnosis" not in capsys.readouterr().err


def test_a_resumed_run_says_nothing_twice(capsys):
    rows = rows_of("eight_bits")
    recorded = [{**row, "step": i + 1} for i, row in enumerate((rows * 2)[: 2 * EVERY])]
    recorded[EVERY - 1] |= {CAUSE: "eight_bits"}
    word = Word(Declared("bfloat16", "bfloat16", "fp8_e5m2"))
    word.read(recorded[:-1])
    assert word(recorded[-1])[CAUSE] == "eight_bits"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("tries", [1, 2])
def test_a_row_that_was_not_written_counts_once(tries):
    word, rows = Word(Declared()), rows_of("healthy")[:EVERY]
    for row in rows:
        found = [word(row) for _ in range(tries)]
    assert found == [{CAUSE: "healthy", CONFIDENCE: ""}] * tries


def test_without_a_mismatch_it_is_never_healthy(capsys):
    word = Word(Declared())
    last = [word({"step": step, "reward/mean": 0.5}) for step in range(1, EVERY + 1)][-1]
    assert last[CAUSE] == "cannot_tell"
    assert "cannot_tell" in capsys.readouterr().err
