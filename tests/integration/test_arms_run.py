"""Arms of the comparison as whole runs: rows show what sets each arm apart, and each arm writes its files."""

import json
from unittest import mock

import numpy as np
import pytest
from toy_runs import command, comparable, complete, completed, tiny

from rljax.compare.report import compare_columns
from rljax.record.token_dumps import read_dump

pytestmark = pytest.mark.slow

SMALL = [
    *("--data.batch-size", "8", "--rollout.group-size", "4", "--packing.rows-per-micro-batch", "2", "--run.steps", "3"),
    *("--eval.every", "0", "--optimizer.learning-rate", "3e-4", "--packing.share-prefixes", "false"),
]


CAP = 1.1  # Noise of 5% in the engine's weights moves some tokens' ratios above it, on any processor.


def rows_of(base, run_dir, *options):
    with mock.patch("rljax.run.step.REFERENCE_STEPS", 1):
        output = completed(command(base, run_dir, *SMALL, *options))
    rows = comparable(run_dir)
    assert len(rows) == 3
    assert all("nonfinite_keys" not in row for row in rows), output
    return rows


@pytest.fixture(scope="module")
def several(toy_base, tmp_path_factory):
    """Runs GRPO with two mini-batches, two epochs, a KL penalty and VeXact's remedy for noisy weights."""
    run_dir = tmp_path_factory.mktemp("several") / "run"
    options = [
        *("--loss.mini-batches", "2", "--loss.epochs", "2", "--advantage.estimator", "grpo"),
        *("--loss.kl", "k3", "--loss.kl-coefficient", "0.01", "--correction.level", "token"),
        *("--correction.threshold", str(CAP), "--correction.reject-k3", "1e-3"),
        *("--rollout.inject.weight-noise", "0.05"),
        *("--rollout.dump-every", "2", "--rollout.transcript-every", "3"),
        *("--optimizer.learning-rate", "1e-4"),
    ]
    return run_dir, rows_of(toy_base, run_dir, *options)


@pytest.mark.harness  # trainer/test_update.py has mini-batches, epochs and a reference
def test_several_updates_a_batch_with_a_reference_and_a_remedy(several):
    """The transcript has the responses of a row, and the dump has what the row was measured from."""
    run_dir, rows = several
    lines = [json.loads(line) for line in (run_dir / "rollouts" / "step_000003.jsonl").read_text().splitlines()]
    assert len(lines) == 32
    assert np.mean([line["reward"] for line in lines]) == pytest.approx(rows[2]["reward/mean"])
    assert all("+" in line["prompt"] for line in lines)
    assert np.mean([line["response_length"] for line in lines]) == pytest.approx(rows[2]["response_length/mean"])
    total = sum(line["logprob_abs_diff_mean"] * line["response_length"] for line in lines)
    tokens = sum(line["response_length"] for line in lines)
    assert total / tokens == pytest.approx(rows[2]["mismatch/logprob_abs_diff_mean"], rel=1e-5)
    # The row has the mean of the largest weights of both mini-batches, which is the cap if both have such a token.
    assert np.float32(CAP) in [row["correction/weight_max"] for row in rows]
    for row in rows:
        # The first mini-batch of a run moves the policy away from the reference.
        assert row["policy/reference_kl"] > 0
        assert row["correction/weight_max"] <= np.float32(CAP)
        assert 0.0 < row["correction/rejected_sequence_fraction"] < 1.0
        assert row["optimizer/grad_norm"] > 0
        assert row["mismatch_sign/log_ratio_skew"] != 0.0
        assert row["mismatch_staleness/0/token_count"] == row["mismatch/token_count"]
        assert row["precision/activation_max"] > 1.0
    assert "mismatch/sum_rise" not in rows[0]
    assert rows[2]["mismatch/sum_rise"] == pytest.approx(
        rows[2]["mismatch/log_ppl_abs_diff_sum"] - rows[0]["mismatch/log_ppl_abs_diff_sum"], rel=1e-4
    )
    dump = read_dump(run_dir / "rollouts" / "step_000002.parquet")
    (pair,) = compare_columns(dump).pairs
    assert len(dump.token_ids) == 32
    for name in ("k3_kl", "logprob_abs_diff_mean", "log_ppl_abs_diff"):
        assert rows[1][f"mismatch/{name}"] == pytest.approx(pair.metrics[name], rel=1e-3), name
    source = dump.sources["trainer"]
    assert (source.dtype, source.temperature) == ("bfloat16", 1.0)
    assert dump.sources["rollout"].weights_hash == f"{source.weights_hash}, weight_noise 0.05"
    assert dump.sampling["inject"] == {"weight_noise": 0.05}


def test_a_guard_stops_saved_with_a_status_of_its_own(toy_base, tmp_path):
    rule = "mismatch/logprob_abs_diff_mean > 1e-9 for 2"
    code, output = complete(tiny(toy_base, tmp_path / "run", 3, "--checkpoint.every", "0", "--guard.stop", rule))
    assert code == 3, output
    assert f"({rule}); stopped, saved" in output
    assert len(comparable(tmp_path / "run")) == 2
    assert (tmp_path / "run" / "checkpoints" / "2").is_dir()


def test_settings_that_make_no_sense_are_one_line(toy_base, tmp_path):
    presets = ["--correction.preset", "token_tis"]
    for options, message in (
        (["--loss.mini-batches", "3"], "data.batch_size = 8 does not divide into loss.mini_batches = 3"),
        (["--publish.store", "http"], "publish.store = http is for servers: rollout.engine must be vllm or sglang"),
        (["--publish.store", "nowhere"], "store must be shared, directory, http or a URL, got 'nowhere'"),
        (["--loss.old-logprobs", "rollout", *presets], "loss.old_logprobs = rollout puts the mismatch into the ratio"),
        (["--loss.router-balance", "0.01"], "loss.router_balance is for a mixture of experts"),
        (["--correction.part", "numerics", *presets], "correction.part = numerics is for rollouts that may be stale"),
    ):
        code, output = complete(command(toy_base, tmp_path / "run", *SMALL, *options))
        assert code == 2
        assert message in output
        assert len(output.strip().splitlines()) == 1
        assert not (tmp_path / "run").exists()
