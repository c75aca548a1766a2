"""Whole runs of several turns, of our own and of another program: dumps are recounted, and runs go on."""

import json

import numpy as np
import pytest
from external_rows import make_row, write_file
from process_runs import FLOAT32
from toy_runs import comparable, complete, completed, outcome, printed, tiny

from rljax import evaluate
from rljax.compare.report import compare_columns
from rljax.record.rows import run_dumps
from rljax.record.token_dumps import read_dump

pytestmark = pytest.mark.slow

STEPS = 4
# Two or three turns fit. The toy problems' answers ask for more. Sampling is cut.
TURNS = [
    *("--rollout.environment", "counting_environments:Doubling", "--rollout.episode.max-turns", "3"),
    *("--rollout.max-response-tokens", "20", "--rollout.dump-every", "2", "--rollout.refill", "true"),
    *("--rollout.top-k", "5", "--rollout.top-p", "0.9"),
]


@pytest.fixture(scope="module")
def whole(toy_base, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    completed(tiny(toy_base, run_dir, STEPS, *FLOAT32, *TURNS))
    return run_dir


@pytest.mark.harness  # run/test_prefixes.py and rollout/test_turns.py have turns in runs and their log-probabilities
def test_rows_and_dumps_tell_the_turns(whole):
    rows = comparable(whole)
    for row in rows:
        assert row["mismatch/logprob_abs_diff_max"] < 1e-4  # in float32 a wrong mask or place would show
        assert 1 < row["turns/mean"] <= row["turns/max"] == 3
        counts = [row[f"turns/turn_{name}/token_count"] for name in ("1", "2", "3_to_4")]
        assert sum(counts) == row["mismatch/token_count"]
        assert row["turns/limited"] > 0
        assert row["reward/errors"] == 0
        assert row["mismatch/k3_kl"] < 1e-8
        assert 0 < row["policy/entropy"] < np.log(5)
    second = read_dump(run_dumps(whole)[0])
    row, sampled, others = rows[1], 0, 0
    for mask, turns, rollout, trainer in zip(
        second.response_mask, second.values["turn"], second.logprobs["rollout"], second.logprobs["trainer"], strict=True
    ):
        np.testing.assert_array_equal(mask, turns > 0)
        assert np.isfinite(rollout[mask]).all()
        assert np.isnan(rollout[~mask]).all()
        np.testing.assert_allclose(rollout[mask], trainer[mask], atol=1e-4)
        of_turns = turns[turns > 0]
        assert of_turns[0] == 1
        assert set(np.diff(of_turns)) <= {0, 1}
        sampled, others = sampled + mask.sum(), others + (turns == 0).sum()
    assert sampled == row["mismatch/token_count"]
    pairs = zip(second.values["entropy"], second.response_mask, strict=True)
    entropy = np.concatenate([values[mask] for values, mask in pairs]).mean(dtype=np.float64)
    assert row["policy/entropy"] == pytest.approx(entropy, rel=1e-5)
    assert second.sampling["top_k"] == 5
    pairs = zip(second.columns["top_ids"], second.response_mask, strict=True)
    assert any((ids[mask] < 0).any() for ids, mask in pairs)
    (pair,) = compare_columns(second).pairs
    assert pair.verdict.status == "pass", pair.verdict
    assert row["turns/environment_fraction"] == pytest.approx(others / (others + sampled))


@pytest.mark.harness
def test_a_resumed_run_of_turns_has_the_same_rows(whole, toy_base, tmp_path):
    run_dir = tmp_path / "run"
    for steps in (2, STEPS):
        completed(tiny(toy_base, run_dir, steps, *FLOAT32, *TURNS))
    assert comparable(run_dir) == comparable(whole)


def test_a_policy_is_evaluated_with_an_environment(toy_base, tmp_path):
    rows, out = tmp_path / "rows.jsonl", tmp_path / "responses.jsonl"
    rows.write_text("".join(f'{{"prompt": "{i}+1=", "answer": "3"}}\n' for i in range(4)))
    of_rows = ["--path", toy_base, "--dataset", rows, "--max-response-tokens", "20", "--environment"]
    words = [*of_rows, "counting_environments:Doubling", "--episode.max-turns", "2", "--out", out]
    result = json.loads(printed(evaluate.main, words))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    # This environment rewards the characters of all turns.
    assert [line["reward"] for line in lines] == [len(line["response"]) for line in lines]
    assert result["accuracy"] == pytest.approx(sum(line["reward"] for line in lines) / len(lines))
    assert result["reward_errors"] == 0
    rows.write_text('{"prompt": "1+1=", "opening": "1+1+1+1="}\n')
    opened = printed(evaluate.main, [*of_rows, "counting_environments:Opening"])
    assert json.loads(opened)["reward_errors"] == 0
    status, _, err = outcome(evaluate.main, [*words, "--reward", "addition"])
    assert status == 2
    assert "environment and reward both score the responses: give one" in err


def test_a_wrong_file_of_another_program_ends_a_run(toy_base, tmp_path):
    """The step before it is saved, and the corrected file is used. A reward names each trajectory."""
    place, run_dir = tmp_path / "rows", tmp_path / "run"
    place.mkdir()
    turns = {"mask": [True, False, True], "logprobs": [-1.0, None, -2.0]}  # the second token is a tool's
    rows = [make_row(f"g{i // 4}", i, tokens=(3 + i % 4, 4, 14), **turns) for i in range(16)]
    stale = ("--rollout.max-staleness", "20", "--diagnosis.behaviour-responses", "0")
    words = tiny(toy_base, run_dir, 2, "--rollout.trajectories", str(place), *stale, "--rollout.transcript-every", "1")
    write_file(place / "0.jsonl", rows[:8])
    write_file(place / "1.jsonl", [{**rows[8], "logprobs": [-1.0]}])
    code, output = complete(words, is_sound=False)
    assert code == 2, output
    assert "step 1 is saved; the same command goes on from there" in output
    assert "1.jsonl: row 1: logprobs has 1 entries, expected 3, one for each of" in output.splitlines()[-1]
    write_file(place / "1.jsonl", rows[8:])
    completed(words, is_sound=False)
    kept = [path.read_text().splitlines() for path in sorted((run_dir / "rollouts").glob("step_*.jsonl"))]
    assert [[json.loads(line)["reward"] for line in step] for step in kept] == [[*range(8)], [*range(8, 16)]]
    trained = comparable(run_dir)
    assert [row["rollout/staleness"] for row in trained] == [0, 1]
    assert all((row["mismatch/token_count"], row["turns/max"]) == (16, 2) for row in trained)
