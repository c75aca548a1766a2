"""Whole runs of a tiny hybrid of delta nets and attention: rows, resume, adapters, and no gap with one executable."""

import json

import numpy as np
import pytest
from hybrids import tiny_hybrid
from toy_runs import TOY_BASE, command, comparable, completed, printed, resumed_rows, tiny

from rljax.commands.export import main as export_main
from rljax.policy.families import config_from_hf, config_to_hf, read_config
from rljax.policy.hf import SINGLE_NAME, load_params, open_tensors, save_params
from rljax.policy.model import init_params

pytestmark = pytest.mark.slow
SIZE = ("--data.reward", "parity_reward:reward", "--optimizer.learning-rate", "1e-3")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Returns the folder of a fresh hybrid with the toy's tokenizer."""
    path = tmp_path_factory.mktemp("hybrid")
    toy = json.loads((TOY_BASE / "config.json").read_text())
    special = {name: toy[name] for name in ("vocab_size", "eos_token_id", "pad_token_id", "max_position_embeddings")}
    config = config_from_hf(config_to_hf(tiny_hybrid(), "float32") | special)
    save_params(path, init_params(config, 0), config, side_files_from=TOY_BASE)
    return path


def test_a_resumed_run_has_the_rows_of_an_uninterrupted_one(base, tmp_path, caplog):
    """Rows stay apart although the run would share prefixes. The engine uses its two slots again."""
    options = (*SIZE, "--packing.share-prefixes", "true", "--rollout.decode-tokens", "80", "--precision.remat", "true")
    options = (*options, "--rollout.dtype", "float32", "--precision.compute-dtype", "float32")
    rows = resumed_rows(base, tmp_path, *options)
    why = "the state of a qwen3_5_text policy passes from each token to the next one in its row"
    assert f"packing.share_prefixes: off, each sequence has its own copy of its prompt: {why}" in caplog.text
    for row in rows:
        assert row["optimizer/skipped_updates"] == 0
        assert row["optimizer/grad_norm"] > 0
        assert 0 < row["mismatch/logprob_abs_diff_max"] < 2e-5
    printed(export_main, [tmp_path / "whole", tmp_path / "out", "--dtype", "bfloat16"])
    tensors = open_tensors(tmp_path / "out" / SINGLE_NAME)
    wide = {name for name, tensor in tensors.items() if tensor.get_dtype() == "F32"}
    assert wide == {f"model.layers.{i}.linear_attn.{name}" for i in range(3) for name in ("A_log", "norm.weight")}
    before = load_params(base, read_config(base))["layers"]["0"]["attention"]["log_decay_scale"]
    after = load_params(tmp_path / "out", read_config(base))["layers"]["0"]["attention"]["log_decay_scale"]
    assert 0 < np.abs(np.asarray(after) - before).max() < 0.01  # a difference that 16 bits would lose


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.harness)])
def test_with_one_executable_the_mismatch_is_exactly_zero(dtype, base, tmp_path):
    sizes = ("--rollout.engine", "exact", "--data.batch-size", "2", "--rollout.group-size", "4", "--run.steps", "2")
    rows = ("--rollout.max-response-tokens", "12", "--packing.rows-per-micro-batch", "8", "--packing.row-tokens", "20")
    dtypes = ("--rollout.dtype", dtype, "--precision.compute-dtype", dtype)
    completed(command(base, tmp_path, *SIZE, *sizes, *rows, *dtypes, "--eval.every", "0", "--checkpoint.every", "0"))
    for row in comparable(tmp_path):
        assert row["mismatch/logprob_abs_diff_max"] == row["mismatch/k3_kl"] == 0.0


def test_adapters_of_delta_nets_are_trained(base, tmp_path):
    targets = ("--lora.targets", "in_proj_qkv", "in_proj_z", "out_proj", "q_proj")
    completed(tiny(base, tmp_path, 2, *SIZE, "--lora.rank", "2", *targets))
    assert all(row["optimizer/grad_norm"] > 0 for row in comparable(tmp_path))
