"""Whole runs with the exact engine: the mismatch is exactly 0 at every step. Evaluations go through it, too."""

import pytest
from toy_runs import command, comparable, completed

pytestmark = pytest.mark.slow

SMALL = [
    *("--rollout.engine", "exact", "--data.batch-size", "4", "--rollout.group-size", "4"),
    # A token of a response costs a whole forward and backward, so responses are short, and such ones are rewarded.
    *("--rollout.max-response-tokens", "12", "--data.reward", "parity_reward:reward"),
    *("--packing.rows-per-micro-batch", "8", "--packing.row-tokens", "20"),
    *("--run.steps", "2", "--eval.every", "0", "--checkpoint.every", "0"),
    *("--optimizer.learning-rate", "3e-4", "--rollout.temperature", "0.9"),
]
ZERO = {
    *("kl", "k3_kl", "slope_per_1k", "chi2_token", "chi2_seq", "prob_abs_diff_mean", "prob_abs_diff_max"),
    *("log_ppl_diff", "log_ppl_diff_max", "log_ppl_diff_min", "log_ppl_abs_diff", "log_ppl_abs_diff_sum"),
    *(f"logprob_abs_diff_{name}" for name in ("mean", "p99", "p999", "max")),
}


def run(base, run_dir, dtype, *options):
    completed(command(base, run_dir, *SMALL, "--rollout.dtype", dtype, "--precision.compute-dtype", dtype, *options))
    return comparable(run_dir)


def test_the_mismatch_is_exactly_zero_at_every_step(toy_base, tmp_path):
    rows = run(toy_base, tmp_path / "run", "bfloat16")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        names = {k.removeprefix("mismatch/"): v for k, v in row.items() if k.startswith("mismatch/")}
        assert {name: names[name] for name in ZERO} == dict.fromkeys(ZERO, 0.0)
        assert names["ppl_ratio"] == 1.0
        assert names["token_count"] > 60
        assert row["is/token_ratio_max"] == row["is/token_ratio_min"] == 1.0
        # Without guesses, each of the two lots of eight takes as many runs as its longest response has tokens.
        assert 2 <= row["rollout/executable_runs"] <= 6 < row["response_length/max"]
    # The policy moved between the steps. Otherwise the test would show nothing.
    assert rows[-1]["optimizer/skipped_updates"] <= 1
    assert all(row["optimizer/grad_norm"] > 0 for row in rows if row["reward/groups_with_signal"])


@pytest.mark.harness
def test_refilled_groups_in_float16_have_no_mismatch_either(toy_base, tmp_path):
    refill = ("--rollout.refill", "true", "--rollout.group-size", "2", "--packing.rows-per-micro-batch", "2")
    evaluated = ("--eval.at-start", "true", "--eval.max-response-tokens", "6")
    rows = run(toy_base, tmp_path / "run", "float16", *refill, *evaluated)
    assert 2.0 < rows[0]["eval/toy/response_length_at_start"] < 6.0
    assert all(row["rollout/refilled_groups"] for row in rows)
    assert {(row["precision/loss_scale"], row["precision/overflows"]) for row in rows} == {(2.0**15, 0)}
    assert {row["mismatch/logprob_abs_diff_max"] for row in rows} == {0.0}
