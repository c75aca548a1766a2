"""Whole runs on adapters: they learn, resume, export and start from PEFT's layout. The exact engine has no mismatch."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from tiny_adapters import random_adapters
from toy_runs import ROOT, comparable, complete, completed, kill_at, printed, refused, tiny

from rljax import evaluate
from rljax.commands.export import main as export_main
from rljax.policy.families import read_config
from rljax.policy.hf import load_params, save_params
from rljax.policy.lora import LoraConfig, TrainedParams, merge_adapters, with_targets
from rljax.policy.model import cast_params
from rljax.policy.peft import ADAPTER_CONFIG, load_adapters, save_adapters

pytestmark = pytest.mark.slow

LORA = LoraConfig(rank=4, alpha=6.0)
STEPS = 6
DENSE = ("--data.reward", "parity_reward:reward", "--optimizer.learning-rate", "1e-2")
OPTIONS = ("--lora.rank", "4", "--lora.alpha", "6", *DENSE)


def words(base, run_dir, *options, steps=STEPS):
    return tiny(base, run_dir, steps, *OPTIONS, *options)


@pytest.fixture(scope="module")
def whole(toy_base, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("lora") / "run"
    completed(words(toy_base, run_dir))
    return run_dir


def export(run_dir, out, *options):
    printed(export_main, [run_dir, out, *options])


@pytest.mark.harness
def test_killed_and_resumed_the_rows_are_the_same_bit_for_bit(whole, toy_base, tmp_path):
    kill_at(words(toy_base, tmp_path / "run"), tmp_path / "run", 3, PYTHONPATH=f"{ROOT}:{ROOT}/tests/support")
    completed(words(toy_base, tmp_path / "run"))
    assert comparable(tmp_path / "run") == comparable(whole)
    assert comparable(whole)[-1]["optimizer/skipped_updates"] < STEPS


def test_other_adapters_or_another_base_are_refused_in_one_line(whole, toy_base, tmp_path):
    policy, before = read_config(toy_base), comparable(whole)
    params = load_params(toy_base, policy)
    params["final_norm"]["scale"] = params["final_norm"]["scale"].at[0].multiply(1.01)
    save_params(tmp_path / "other", params, policy, side_files_from=toy_base)
    completed(tiny(toy_base, tmp_path / "run", 2))
    for run_dir, extra, message in (
        (whole, ["--lora.rank", "8"], "lora.rank (4 there, 8 now)"),
        (whole, ["--lora.targets", "q_proj"], "lora.targets"),
        (whole, ["--model.path", tmp_path / "other"], "the frozen model under the adapters has other weights than"),
        (tmp_path / "run", [], "lora.rank (0 there, 4 now)"),
    ):
        code, output = complete(words(toy_base, run_dir, *extra, steps=8))
        assert code == 2
        assert message in output
        assert output.strip().splitlines()[-1].startswith("error: ")
    assert comparable(whole) == before
    said = refused(export_main, [tmp_path / "run", tmp_path / "x", "--adapter"])
    assert said == f"error: {tmp_path}/run trained all weights: it has no adapters\n"


def test_exports_are_the_merged_policy_and_its_adapters(whole, toy_base, tmp_path):
    export(whole, tmp_path / "hf", "--dtype", "bfloat16")
    export(whole, tmp_path / "adapter", "--adapter")
    policy = read_config(toy_base)
    adapters = load_adapters(tmp_path / "adapter", policy, LORA)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(adapters))
    base = load_params(toy_base, policy, dtype=jnp.bfloat16)
    targets = TrainedParams(policy, LORA).targets(base)
    merged = merge_adapters(targets, adapters, policy, LORA, jnp.bfloat16)
    expected = flatten_dict(cast_params(with_targets(base, merged), jnp.float32))
    changed = 0
    for path, leaf in flatten_dict(load_params(tmp_path / "hf", policy)).items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected[path]))
        changed += not np.array_equal(leaf, np.asarray(flatten_dict(base)[path], np.float32))
    assert changed == 7
    assert (tmp_path / "hf/tokenizer.json").exists()
    assert json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_text())["r"] == 4


def test_a_checkpoint_is_evaluated_as_the_merged_policy(whole, toy_base, tmp_path):
    """The run is on a machine where its model is in another directory."""
    export(whole, tmp_path / "hf")
    run_dir = shutil.copytree(whole, tmp_path / "run")
    (run_dir / "config.yaml").write_text((whole / "config.yaml").read_text().replace(str(toy_base), "nowhere"))
    told = []
    for words in (["--path", run_dir, "--model", toy_base], ["--path", tmp_path / "hf"]):
        out = printed(evaluate.main, [*words, "--max-response-tokens", "12"])
        told.append({k: v for k, v in json.loads(out).items() if k not in ("path", "step")})
    assert told[0] == told[1]
    said = refused(evaluate.main, ["--path", run_dir])
    assert said.startswith(f"error: the model of {run_dir} (rljax evaluate and rljax export take another by --model):")
    said = refused(evaluate.main, ["--path", run_dir, "--model", tmp_path / "hf"])
    assert said.startswith(f"error: {tmp_path}/hf is not the model under the adapters of {run_dir}: it has other")


def test_a_run_starts_from_adapters_of_peft_s_layout(whole, toy_base, tmp_path):
    export(whole, tmp_path / "adapter", "--adapter")
    slow = ("--lora.adapter", str(tmp_path / "adapter"), "--optimizer.learning-rate", "1e-9")
    completed(words(toy_base, tmp_path / "run", *slow, steps=2))
    export(tmp_path / "run", tmp_path / "again", "--adapter")
    policy = read_config(toy_base)
    first, second = (flatten_dict(load_adapters(tmp_path / name, policy, LORA)) for name in ("adapter", "again"))
    for path, leaf in first.items():
        np.testing.assert_allclose(leaf, second[path], atol=1e-8, rtol=0)

    code, output = complete(words(toy_base, tmp_path / "other", *slow, "--lora.rank", "2", steps=2))
    line = f"error: {tmp_path}/adapter/adapter_config.json: r = 4, but lora.rank = 2"
    assert (code, output.strip().splitlines()[-1]) == (2, line)


@pytest.mark.harness
@pytest.mark.parametrize(("dtype", "start_from"), [("bfloat16", True), ("float16", False)])
def test_with_the_exact_engine_the_mismatch_is_zero(dtype, start_from, toy_base, tmp_path):
    policy = read_config(toy_base)
    save_adapters(tmp_path / "adapter", random_adapters(policy, LORA, 0.02), policy, LORA, toy_base)
    options = ("--lora.adapter", str(tmp_path / "adapter")) if start_from else ()
    exact = ("--rollout.engine", "exact", "--rollout.dtype", dtype, "--precision.compute-dtype", dtype)
    kl = ("--loss.kl", "k3", "--loss.kl-coefficient", "0.1", "--packing.row-tokens", "20")
    completed(words(toy_base, tmp_path / "run", *options, *exact, *kl, steps=3))
    rows = comparable(tmp_path / "run")
    assert [row["mismatch/logprob_abs_diff_max"] for row in rows] == [0.0, 0.0, 0.0]
    assert rows[0]["policy/reference_kl"] == 0.0
    assert rows[1]["policy/reference_kl"] > 0.0
