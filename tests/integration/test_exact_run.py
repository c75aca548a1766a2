"""Whole runs with the exact engine: mismatch exactly 0 at every step, and what is injected is all there is."""

import pytest
from toy_runs import command, comparable, complete

STEPS = 6
SMALL = [
    *("--rollout.engine", "exact", "--data.batch-size", "6", "--rollout.group-size", "4"),
    *("--packing.rows-per-micro-batch", "8", "--packing.row-tokens", "44"),
    *("--run.steps", str(STEPS), "--eval.every", "0", "--checkpoint.every", "0"),
    *("--optimizer.learning-rate", "3e-4", "--rollout.temperature", "0.9"),
]
ZERO = {
    *("kl", "k3_kl", "slope_per_1k", "chi2_token", "chi2_seq", "prob_abs_diff_mean", "prob_abs_diff_max"),
    *("log_ppl_diff", "log_ppl_diff_max", "log_ppl_diff_min", "log_ppl_abs_diff", "log_ppl_abs_diff_sum"),
    *(f"logprob_abs_diff_{name}" for name in ("mean", "p99", "p999", "max")),
}


def run(base, run_dir, dtype, *options):
    code, output = complete(
        command(base, run_dir, *SMALL, "--rollout.dtype", dtype, "--precision.compute-dtype", dtype, *options)
    )
    assert code == 0, output
    return comparable(run_dir)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_mismatch_is_exactly_zero_at_every_step(dtype, toy_base, tmp_path):
    rows = run(toy_base, tmp_path / "run", dtype)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        names = {k.removeprefix("mismatch/"): v for k, v in row.items() if k.startswith("mismatch/")}
        assert {name: names[name] for name in ZERO} == dict.fromkeys(ZERO, 0.0)
        assert names["ppl_ratio"] == 1.0
        assert names["token_count"] > 100
        assert row["is/token_ratio_max"] == row["is/token_ratio_min"] == 1.0
        assert row["precision/loss_scale"] == (2.0**15 if dtype == "float16" else 1.0)
        assert row["precision/overflows"] == 0
        # Three lots of eight sequences, each as long as its longest.
        assert 3 * row["response_length/mean"] <= row["rollout/executable_runs"] <= 3 * row["response_length/max"]
    # The policy moved in between: else nothing was shown.
    assert rows[-1]["optimizer/skipped_updates"] <= 1
    assert all(row["optimizer/grad_norm"] > 0 for row in rows if row["reward/groups_with_signal"])


def test_what_is_injected_is_measured_and_its_versions_are_told(toy_base, tmp_path):
    options = ["--rollout.inject.weight-noise", "0.01", "--rollout.inject.logit-noise", "0.02"]
    rows = run(toy_base, tmp_path / "run", "bfloat16", *options, "--rollout.inject.staleness", "2")
    assert all(0.01 < row["mismatch/logprob_abs_diff_mean"] < 0.3 for row in rows)
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 2, 2, 2, 2]
    assert [row["rollout/policy_version"] for row in rows] == [0, 0, 0, 1, 2, 3]
    for row, behind in zip(rows, [0, 1, 2, 2, 2, 2], strict=True):
        buckets = {key.split("/")[1] for key in row if key.startswith("mismatch_staleness/")}
        assert buckets == {str(behind)}


def test_evaluation_goes_through_the_same_engine(toy_base, tmp_path):
    options = ["--run.steps", "1", "--eval.every", "1", "--eval.max-response-tokens", "6"]
    (row,) = run(toy_base, tmp_path / "run", "float32", *options)
    # Greedy in float32: the embedded engine says the same to all but ties, at most one of the 200 problems.
    (other,) = run(toy_base, tmp_path / "jax", "float32", *options, "--rollout.engine", "jax")
    assert row["eval/toy/accuracy"] == pytest.approx(other["eval/toy/accuracy"], abs=1 / 200)
    assert row["eval/toy/response_length"] == pytest.approx(other["eval/toy/response_length"], abs=5 / 200)
    assert 2.0 < row["eval/toy/response_length"] < 6.0
    assert row["mismatch/logprob_abs_diff_max"] == 0.0
    # Its runs are not those of the rollouts.
    assert row["rollout/executable_runs"] <= 3 * row["response_length/max"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rollout.dtype", "float16"], "rollout.dtype = float16 must be precision.compute_dtype = bfloat16"),
        (["--loss.mini-batches", "2"], "loss.mini_batches and loss.epochs must be 1"),
    ],
)
def test_what_makes_no_sense_with_it_is_one_line(options, message, toy_base, tmp_path):
    code, output = complete(command(toy_base, tmp_path / "run", *SMALL, *options))
    assert code == 2
    assert message in output
    assert len(output.strip().splitlines()) == 1
