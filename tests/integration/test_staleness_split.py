"""Stale rollouts in whole runs: numerics and drift are told apart, and both are recovered if injected on purpose."""

import numpy as np
import pytest
from process_runs import FLOAT32
from toy_runs import comparable, completed, tiny

pytestmark = pytest.mark.slow

STEPS = 6
# Responses are long enough to earn something, and all of them are told apart.
SIZE = ("--rollout.max-response-tokens", "40", "--data.batch-size", "4", "--diagnosis.behaviour-responses", "16")


def run(base, run_dir, *options, rate="3e-3", steps=STEPS):
    size = ("--optimizer.learning-rate", rate)
    completed(tiny(base, run_dir, steps, *FLOAT32, *SIZE, *size, *options))
    return comparable(run_dir)


def weighs(part):
    return "--rollout.max-staleness", "1", "--correction.preset", "token_tis", "--correction.part", part


@pytest.fixture(scope="module")
def ahead(toy_base, tmp_path_factory):
    """Returns the rows of a run that samples each batch during the update before it, and weighs the drift alone."""
    return run(toy_base, tmp_path_factory.mktemp("ahead") / "run", *weighs("drift"))


def test_sampled_ahead_in_float32_all_mismatch_is_drift(ahead):
    rows = ahead
    assert [row["rollout/staleness"] for row in rows] == [0, *[1] * (STEPS - 1)]
    assert not any(key.startswith(("mismatch_numerics/", "mismatch_drift/")) for key in rows[0])
    for row in rows[1:]:
        assert row["mismatch_numerics/token_count"] == row["mismatch/token_count"]
        assert row["mismatch_numerics/logprob_abs_diff_mean"] < 1e-6
        assert row["mismatch_drift/kl"] + row["mismatch_numerics/kl"] == pytest.approx(row["mismatch/kl"], abs=1e-6)
        assert row["mismatch_drift/1/k3_kl"] == row["mismatch_drift/k3_kl"]
    # The policy moved. Otherwise the test would show nothing.
    moved = [row["mismatch_drift/logprob_abs_diff_mean"] for row in rows[1:]]
    assert np.mean(moved) > 1e-3


@pytest.mark.harness
def test_injected_noise_and_staleness_are_recovered(toy_base, tmp_path):
    noise = ("--rollout.inject.weight-noise", "0.05")
    stale = ("--rollout.inject.staleness", "2")
    still = run(toy_base, tmp_path / "still", *noise, *stale, rate="1e-12")
    # The rate is so small that the noise acts on this policy as it does on the one that stands still.
    drift = run(toy_base, tmp_path / "drift", *stale, rate="3e-4")
    both = run(toy_base, tmp_path / "both", *stale, *noise, rate="3e-4")

    def mean(rows, part, name="logprob_abs_diff_mean"):
        return np.mean([row[f"mismatch_{part}/{name}"] for row in rows[2:]])

    # Weights that do not move do not drift, and the noise makes all of their mismatch.
    assert all(row["mismatch_drift/logprob_abs_diff_max"] < 1e-6 for row in still[2:])
    assert mean(still, "numerics") > 1e-3
    assert mean(drift, "numerics") < 1e-6 < 3e-4 < mean(drift, "drift")
    # Each part alone has the same size as in the run with both, as far as runs with other samples can agree.
    assert mean(both, "numerics") == pytest.approx(mean(still, "numerics"), rel=0.18)
    assert mean(both, "drift") == pytest.approx(mean(drift, "drift"), rel=0.25)
    for row in both[2:]:
        assert row["mismatch_drift/kl"] + row["mismatch_numerics/kl"] == pytest.approx(row["mismatch/kl"], abs=1e-6)


def largest_weights(rows):
    """Returns the largest weight of each step whose tokens are in the loss. Numerics are only rounding in float32."""
    for row in rows[1:]:
        assert row["mismatch_numerics/token_count"] == row["mismatch/token_count"]
        assert row["is_numerics/token_ratio_max"] == pytest.approx(1.0, abs=1e-4)
    return [row["correction/weight_max"] for row in rows[1:] if row["reward/groups_with_signal"] > 0]


def test_weights_of_drift_are_more_than_rounding(ahead):
    assert max(largest_weights(ahead)) > 1.01


@pytest.mark.harness
def test_weights_of_numerics_know_nothing_of_the_drift(toy_base, tmp_path):
    largest = largest_weights(run(toy_base, tmp_path / "run", *weighs("numerics")))
    assert largest
    assert largest == pytest.approx([1.0] * len(largest), abs=1e-4)


def test_a_run_sampled_ahead_and_resumed_goes_on(ahead, toy_base, tmp_path):
    first = run(toy_base, tmp_path / "run", *weighs("drift"), steps=2)
    rows = run(toy_base, tmp_path / "run", *weighs("drift"))
    assert rows[:2] == first == ahead[:2]
    # The batch after the checkpoint is sampled again, by the newest version.
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 0, 1, 1, 1]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
