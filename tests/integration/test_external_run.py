"""A whole run on another program's trajectories ends in the middle and is started again."""

import json

import pytest
from external_rows import make_row, write_file
from toy_runs import complete, completed, tiny

from rljax.record.rows import read_rows

pytestmark = pytest.mark.slow

SIZE = 4  # trajectories of a group, as in ``tiny``; a step has two groups
STALE = ("--rollout.max-staleness", "20", "--diagnosis.behaviour-responses", "0", "--rollout.transcript-every", "1")


def groups(first, count):
    """Returns the rows of ``count`` groups from ``first`` on.

    The reward names each trajectory, and the second token is a tool's.
    """
    turns = {"mask": [True, False, True], "logprobs": [-1.0, None, -2.0]}
    return [
        make_row(f"g{g}", SIZE * g + i, tokens=(3 + i, 4, 14), **turns)
        for g in range(first, first + count)
        for i in range(SIZE)
    ]


def trained(run_dir):
    """Returns the rewards of each step's trajectories, from the transcripts that the run kept."""
    steps = sorted((run_dir / "rollouts").glob("step_*.jsonl"))
    return [[json.loads(line)["reward"] for line in path.read_text().splitlines()] for path in steps]


def test_a_wrong_file_ends_a_run_in_one_line(toy_base, tmp_path):
    """The step before the wrong file is saved, and the corrected file is used."""
    place, run_dir = tmp_path / "rows", tmp_path / "run"
    place.mkdir()
    words = tiny(toy_base, run_dir, 2, "--rollout.trajectories", str(place), *STALE)
    write_file(place / "0.jsonl", groups(0, 2))
    write_file(place / "1.jsonl", [{**groups(2, 1)[0], "logprobs": [-1.0]}])
    code, output = complete(words, is_sound=False)
    assert code == 2, output
    assert "step 1 is saved; the same command goes on from there" in output
    assert "error: " in output.splitlines()[-1]
    assert "1.jsonl: row 1: logprobs has 1 entries, expected 3, one for each of token_ids" in output.splitlines()[-1]
    write_file(place / "1.jsonl", groups(2, 2))
    completed(words, is_sound=False)
    assert trained(run_dir) == [list(range(8)), list(range(8, 16))]
    rows = read_rows(run_dir / "metrics.jsonl")
    assert [row["rollout/staleness"] for row in rows] == [0, 1]
    for row in rows:
        assert (row["mismatch/token_count"], row["response_length/mean"], row["turns/max"]) == (2 * SIZE * 2, 2, 2)
