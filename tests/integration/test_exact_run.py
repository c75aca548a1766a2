"""Whole runs with the exact engine: the mismatch is exactly 0 at every step, and only what is injected shows."""

import jax.numpy as jnp
import numpy as np
import pytest
from toy_runs import command, comparable, completed

from rljax.compare.importers import read_tokens
from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.policy.model import logical_axes
from rljax.policy.score import make_scorer
from rljax.rollout.injected import add_noise

pytestmark = pytest.mark.slow

STEPS = 4
TEMPERATURE = 0.9
VOCAB = 16
SMALL = [
    *("--rollout.engine", "exact", "--data.batch-size", "4", "--rollout.group-size", "4"),
    # A token of a response costs a whole forward and backward, so responses are short. A reward for short responses is
    # used.
    *("--rollout.max-response-tokens", "12", "--data.reward", "parity_reward:reward"),
    *("--packing.rows-per-micro-batch", "8", "--packing.row-tokens", "20"),
    *("--run.steps", str(STEPS), "--eval.every", "0", "--checkpoint.every", "0"),
    *("--optimizer.learning-rate", "3e-4", "--rollout.temperature", str(TEMPERATURE)),
]
ZERO = {
    *("kl", "k3_kl", "slope_per_1k", "chi2_token", "chi2_seq", "prob_abs_diff_mean", "prob_abs_diff_max"),
    *("log_ppl_diff", "log_ppl_diff_max", "log_ppl_diff_min", "log_ppl_abs_diff", "log_ppl_abs_diff_sum"),
    *(f"logprob_abs_diff_{name}" for name in ("mean", "p99", "p999", "max")),
}


def run(base, run_dir, dtype, *options):
    completed(command(base, run_dir, *SMALL, "--rollout.dtype", dtype, "--precision.compute-dtype", dtype, *options))
    return comparable(run_dir)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(dtype, marks=pytest.mark.harness) for dtype in ("float16", "float32"))]
)
def test_the_mismatch_is_exactly_zero_at_every_step(dtype, toy_base, tmp_path):
    rows = run(toy_base, tmp_path / "run", dtype, "--run.steps", "2")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        names = {k.removeprefix("mismatch/"): v for k, v in row.items() if k.startswith("mismatch/")}
        assert {name: names[name] for name in ZERO} == dict.fromkeys(ZERO, 0.0)
        assert names["ppl_ratio"] == 1.0
        assert names["token_count"] > 60
        assert row["is/token_ratio_max"] == row["is/token_ratio_min"] == 1.0
        assert row["precision/loss_scale"] == (2.0**15 if dtype == "float16" else 1.0)
        assert row["precision/overflows"] == 0
        # The sequences form two lots of eight. Without guesses, each lot takes as many runs as its longest response has
        # tokens.
        assert 2 <= row["rollout/executable_runs"] <= 6 < row["response_length/max"]
    # The policy moved between the steps. Otherwise the test would show nothing.
    assert rows[-1]["optimizer/skipped_updates"] <= 1
    assert all(row["optimizer/grad_norm"] > 0 for row in rows if row["reward/groups_with_signal"])


def noise_bounds(logprobs, size):
    """Returns bounds on the mean |difference| of log-probabilities from noise on the logits, and its standard error.

    Every logit gets its own noise s g_j of standard deviation s. To first order it moves the log-probability of token k
    by s (g_k - sum_j p_j g_j). This is a Gaussian of variance s^2 ((1 - p_k)^2 + sum_{j != k} p_j^2). The sum over the
    v - 1 other tokens is smallest if all are alike, (1 - p_k)^2 / (v - 1), and largest for one alone, (1 - p_k)^2. The
    mean of |x| of a Gaussian is sqrt(2 / pi) of its deviation. The deviation of |x| is sqrt(1 - 2 / pi) of it.

    Args:
      logprobs: The trainer's log-probabilities of the sampled tokens, float64 [n].
      size: The standard deviation s, after the temperature.
    """
    others = size * -np.expm1(logprobs)
    low, high = np.sqrt(2 / np.pi * (1 + 1 / (VOCAB - 1))) * others.mean(), np.sqrt(2 / np.pi * 2) * others.mean()
    return low, high, np.sqrt((1 - 2 / np.pi) * 2 * np.square(others).sum()) / len(others)


def tokens_of(run_dir, step):
    """Returns the dump of a step, and the log-probabilities of its response tokens by column."""
    dump = read_tokens(run_dir / f"rollouts/step_{step:06d}.parquet")
    columns = {
        name: np.concatenate([v[m] for v, m in zip(vectors, dump.response_mask, strict=True)]).astype(np.float64)
        for name, vectors in dump.logprobs.items()
    }
    return dump, columns


@pytest.mark.harness  # rollout/test_inject.py
def test_what_is_injected_is_measured_and_its_versions_are_told(toy_base, tmp_path):
    """In float32 the processor's rounding (1e-6) is nothing beside the injected mismatch."""
    options = ["--rollout.inject.weight-noise", "0.01", "--rollout.inject.logit-noise", "0.02"]
    options += ["--rollout.inject.staleness", "2", "--rollout.dump-every", "1"]
    rows = run(toy_base, tmp_path / "run", "float32", *options)
    for row in rows:
        # Other weights move a log-probability by some a, and the noise moves it by a symmetric b. The mean of |a + b|
        # is the mean of max(|a|, |b|), so it is at least the mean of |b|.
        _, columns = tokens_of(tmp_path / "run", row["step"])
        measured = np.abs(columns["trainer"] - columns["rollout"]).mean()
        low, _, error = noise_bounds(columns["trainer"], 0.02 / TEMPERATURE)
        assert row["mismatch/logprob_abs_diff_mean"] == pytest.approx(measured, rel=1e-4)
        assert measured > low - 4 * error
    # Nothing is stale at step 1. The noise on the weights is known, so the rest is the noise on the logits.
    dump, columns = tokens_of(tmp_path / "run", 1)
    config = read_config(toy_base)
    noisy = add_noise(load_params(toy_base, config), logical_axes(config), *map(jnp.asarray, (0.01, 0, 0)))
    scored = make_scorer(config, jnp.float32, temperature=TEMPERATURE)(noisy, dump.token_ids)
    expected = np.concatenate([v[m] for v, m in zip(scored, dump.response_mask, strict=True)])
    low, high, error = noise_bounds(columns["trainer"], 0.02 / TEMPERATURE)
    assert low - 4 * error < np.abs(expected - columns["rollout"]).mean() < high + 4 * error
    assert np.abs(columns["trainer"] - columns["rollout"]).mean() > high + 4 * error
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 2, 2]
    assert [row["rollout/policy_version"] for row in rows] == [0, 0, 0, 1]
    for row, behind in zip(rows, [0, 1, 2, 2], strict=True):
        buckets = {key.split("/")[1] for key in row if key.startswith("mismatch_staleness/")}
        assert buckets == {str(behind)}


@pytest.mark.harness
def test_evaluation_goes_through_the_same_engine(toy_base, tmp_path):
    options = ["--run.steps", "1", "--eval.at-start", "true", "--eval.max-response-tokens", "6"]
    (row,) = run(toy_base, tmp_path / "run", "float32", *options)
    (other,) = run(toy_base, tmp_path / "jax", "float32", *options, "--rollout.engine", "jax")
    # Responses are greedy in float32, before any update. So the embedded engine has the same responses, but for ties in
    # at most one of 200.
    accuracy, length = "eval/toy/accuracy_at_start", "eval/toy/response_length_at_start"
    assert row[accuracy] == pytest.approx(other[accuracy], abs=1 / 200)
    assert row[length] == pytest.approx(other[length], abs=5 / 200)
    assert 2.0 < row[length] < 6.0
    assert row["mismatch/logprob_abs_diff_max"] == 0.0
    # The engine's own figures count the rollouts alone.
    assert row["rollout/executable_runs"] <= 2 * row["response_length/max"]
