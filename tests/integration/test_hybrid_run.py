"""Whole runs of tiny hybrids of delta nets and attention, with the engines of this process."""

import numpy as np
import pytest
from hybrids import hybrid_base
from process_runs import FLOAT32
from toy_runs import command, comparable, completed, printed, resumed_rows, tiny

from rljax import train
from rljax.commands.export import main as export_main
from rljax.policy.families import read_config
from rljax.policy.hf import SINGLE_NAME, load_params, open_tensors
from rljax.rollout.servers.vllm.server import VllmConfig

pytestmark = pytest.mark.slow
SIZE = ("--data.reward", "parity_reward:reward", "--optimizer.learning-rate", "1e-3")
AHEAD = ("--rollout.max-staleness", "1")
TURNS = ("--rollout.environment", "counting_environments:Doubling", "--rollout.episode.max-turns", "3")
TURNS = (*TURNS, "--rollout.max-response-tokens", "20")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return hybrid_base(tmp_path_factory.mktemp("hybrid"))


@pytest.mark.harness
def test_a_resumed_run_has_the_rows_of_an_uninterrupted_one(base, tmp_path, caplog):
    """Rows stay apart although the run would share prefixes. The engine uses its two slots again."""
    options = (*SIZE, *FLOAT32, "--packing.share-prefixes", "true", "--rollout.decode-tokens", "80")
    rows = resumed_rows(base, tmp_path, *options, "--precision.remat", "true")
    why = "the state of a qwen3_5_text policy passes from each token to the next one in its row"
    assert f"packing.share_prefixes: off, each sequence has its own copy of its prompt: {why}" in caplog.text
    for row in rows:
        assert row["optimizer/skipped_updates"] == 0
        assert row["optimizer/grad_norm"] > 0
        assert 0 < row["mismatch/logprob_abs_diff_max"] < 5e-5
    printed(export_main, [tmp_path / "whole", tmp_path / "out", "--dtype", "bfloat16"])
    tensors = open_tensors(tmp_path / "out" / SINGLE_NAME)
    wide = {name for name, tensor in tensors.items() if tensor.get_dtype() == "F32"}
    assert wide == {f"model.layers.{i}.linear_attn.{name}" for i in range(3) for name in ("A_log", "norm.weight")}
    before = load_params(base, read_config(base))["layers"]["0"]["attention"]["log_decay_scale"]
    after = load_params(tmp_path / "out", read_config(base))["layers"]["0"]["attention"]["log_decay_scale"]
    assert 0 < np.abs(np.asarray(after) - before).max() < 0.01  # a difference that 16 bits would lose


@pytest.mark.harness
def test_the_numerics_of_turns_ahead_in_float32_are_rounding(base, tmp_path):
    completed(tiny(base, tmp_path, 4, *FLOAT32, *TURNS, *AHEAD, "--optimizer.learning-rate", "1e-3"))
    rows = comparable(tmp_path)
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 1]
    for row in rows:
        numerics = "mismatch_numerics" if row["rollout/staleness"] else "mismatch"
        assert 0 < row[f"{numerics}/logprob_abs_diff_max"] < 5e-5
        assert row["turns/max"] > 1
        assert row.get("mismatch_drift/logprob_abs_diff_max", 1.0) > 1e-4


@pytest.mark.harness  # test_exact_run.py has a run of a dense policy
def test_with_one_executable_the_mismatch_is_exactly_zero(base, tmp_path):
    sizes = ("--rollout.engine", "exact", "--data.batch-size", "2", "--rollout.group-size", "4", "--run.steps", "2")
    rows = ("--rollout.max-response-tokens", "12", "--packing.rows-per-micro-batch", "8", "--packing.row-tokens", "20")
    completed(command(base, tmp_path, *SIZE, *sizes, *rows, "--eval.every", "0", "--checkpoint.every", "0"))
    for row in comparable(tmp_path):
        assert row["mismatch/logprob_abs_diff_max"] == row["mismatch/k3_kl"] == 0.0


def test_a_dry_run_counts_its_parameters_and_states(base, tmp_path):
    """A delta net has 4,624 parameters, the attention 4,112, and the MLP and norms of a block 6,208.

    Each of 8 responses has three states of 4 x 8 x 8 floats, the last 3 inputs of 64 channels in 16 bits, and 20 keys
    and values of 2 heads of 8 in 16 bits.
    """
    words = tiny(base, tmp_path / "run", 2, *SIZE, "--lora.rank", "2", "--lora.targets", "in_proj_z", "q_proj")
    lines = dict(line.split("  ", 1) for line in printed(train.main, [*words, "--dry-run"]).splitlines()[1:])
    assert lines["prefixes"].strip() == "not shared"
    assert lines["parameters"].strip() == f"{3 * 4624 + 4112 + 4 * 6208 + 2 * 16 * 32 + 32:,}"
    assert lines["lora"].strip().startswith(f"{3 * 2 * (32 + 32) + 2 * (32 + 64):,} parameters are trained")
    assert 8 * (3 * (4 * 8 * 8 * 4 + 3 * 64 * 2) + 2 * 20 * 2 * 8 * 2) == 43 * 1024
    assert "cache of 160 tokens takes 43.00 KiB of each device" in lines["decoding"]


def test_a_server_on_a_cpu_caches_no_prefixes(base):
    """vLLM cannot cache the states of delta nets there."""
    command = VllmConfig(str(base)).command
    assert "--no-enable-prefix-caching" in command(1, gpu=False)
    assert "--enable-prefix-caching" in command(1, gpu=True)
