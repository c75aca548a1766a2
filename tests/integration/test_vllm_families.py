"""Policies other than dense Qwen3 in a real vLLM server: published weights are proven, used, and trained."""

import dataclasses
import json
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_runs import comparable, complete_beside, tiny
from transformers_models import repeat_head
from vllm_checks import OTHER_BITS, OUT_OF_BAND, sabotaged

from rljax.commands import check_server
from rljax.compare.layers.differences import compare_layers
from rljax.compare.layers.findings import judge_layers
from rljax.compare.layers.operations import operations
from rljax.compare.layers.tracers import open_tracer
from rljax.data.toy import build_tokenizer
from rljax.errors import VerificationError
from rljax.policy.families import config_to_hf
from rljax.policy.hf import SINGLE_NAME, save_params
from rljax.policy.model import init_params
from rljax.rollout.types import SamplingParams
from tests.integration.conftest import HYBRID, SHAPES, Model, Served, accepted, failed

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.harness]
# The bounds are mean absolute differences of log-probabilities, in nats.
BOUNDS = {"qwen3_moe": {"bfloat16": 0.06, "float32": 1e-5}, "qwen2": {"bfloat16": 0.03, "float32": 1e-5}}
BOUNDS["llama"] = BOUNDS["qwen2"]
BOUNDS[HYBRID] = {"bfloat16": 0.04}
PROMPT = 140  # tokens; a seeded prompt above 128 ends the engine of a hybrid on a CPU that computes it in pieces


SERVED = [("qwen3_moe", "bfloat16"), ("qwen3_moe", "float32"), ("qwen2", "float32"), ("llama", "bfloat16")]


@pytest.fixture(scope="module", params=[*SERVED, (HYBRID, "bfloat16")], ids="-".join)
def served(request, start_server, tmp_path_factory):
    family, dtype = request.param
    config, path = SHAPES[family], tmp_path_factory.mktemp(family)
    save_params(path, init_params(config, 7), config, jnp.dtype(dtype))
    if dtype == "bfloat16" and config.tie_word_embeddings:
        repeat_head(path)
    build_tokenizer().save(path)  # for rljax accept
    model = Model(path, config, init_params(config, 0), json.loads(json.dumps(config_to_hf(config, dtype))))
    # Biases and norms get other values than those of a fresh policy.
    model = dataclasses.replace(model, params=model.moved(1, 1.0))
    with start_server(model, dtype) as server:
        yield Served(server, model, dtype)


def test_a_clean_pair_is_accepted(served, tmp_path, monkeypatch):
    """It is the first test, because the server still has the weights of its files."""
    monkeypatch.setattr(check_server, "QUIET_S", 0.5)
    steps = "20" if served.model.config.family == "qwen2" else "2"
    status, checks, page = accepted(served, tmp_path / "out", "--steps", steps)
    assert (status, failed(checks)) == (0, []), page
    assert checks["training"]["says"].startswith(f"{steps} steps, ")


def test_what_is_published_is_proven_and_sampled_from(served):
    checksums = served.model.checksums(served.dtype)(served.model.params)
    with closing(served.engine()) as engine:
        assert engine.publish(served.model.params, 0)["publish/verified_tensors"] == len(checksums)
        prompts = [np.random.default_rng(i).integers(2, 256, PROMPT).astype(np.int32) for i in range(16)]
        responses = list(engine.generate(prompts, 1, SamplingParams(48), seed=0))
    differences = served.gaps(served.model.params, responses)
    assert len(differences) > 500
    assert differences.mean() < BOUNDS[served.model.config.family][served.dtype]


FAULTS = {
    "qwen3_moe": ["mlp.experts.5.down_proj.weight", "mlp.experts.0.up_proj.weight", "mlp.gate.weight"],
    "qwen2": ["self_attn.k_proj.bias", "mlp.gate_proj.weight"],
    "llama": ["self_attn.o_proj.bias", "mlp.up_proj.bias"],
    HYBRID: ["linear_attn.A_log", "linear_attn.conv1d.weight", "linear_attn.in_proj_z.weight"],
}


def test_a_tensor_that_is_not_loaded_is_named(served):
    """Single tensors are left out, such as an expert, a router or a bias. The same step loaded soundly passes."""
    with served.published() as engine:
        for version, name in enumerate(FAULTS[served.model.config.family]):
            left_out = sabotaged(served, "load", "skip", f"model.layers.1.{name}")
            with left_out, pytest.raises(VerificationError, match=rf"{OTHER_BITS}: .*model\.layers\.1\.{name}"):
                engine.publish(served.model.moved(version), 2 * version + 1)
            engine.publish(served.model.moved(version), 2 * version + 2)


@pytest.mark.parametrize("served", [("qwen3_moe", "bfloat16")], ids="-".join, indirect=True)
def test_experts_that_are_not_packed_are_caught_by_their_use(served):
    """A plain reload in vLLM on a CPU has this fault: every bit is there, but the kernel reads another layout."""
    with served.published() as engine:
        with sabotaged(served, "repack", "on"), pytest.raises(VerificationError, match=OUT_OF_BAND):
            engine.publish(served.model.moved(20), 1)
        engine.publish(served.model.moved(20), 2)


DELTAS = ("--optimizer.learning-rate", "1e-6", "--rollout.max-staleness", "1", "--publish.store", "http")
ADAPTERS = ("--lora.rank", "2", "--lora.targets", "in_proj_qkv", "in_proj_z", "out_proj", "q_proj")


@pytest.mark.parametrize("how", [DELTAS, (*ADAPTERS, "--optimizer.learning-rate", "1e-3")], ids=["deltas", "adapters"])
@pytest.mark.parametrize("served", [(HYBRID, "bfloat16")], ids="-".join, indirect=True)
def test_a_run_of_a_hybrid_publishes_each_step(served, how, tmp_path):
    """The rate of deltas changes a few of the 16-bit weights in a step, and their run is interrupted."""
    base, are_deltas = served.model.path, how == DELTAS
    options = ("--data.reward", "parity_reward:reward", "--rollout.engine", "vllm", "--rollout.urls", served.url, *how)
    for steps in (2, 4) if are_deltas else (3,):
        status, output = complete_beside(served.server, tiny(base, tmp_path, steps, *options))
        assert status == 0, output
    rows = comparable(tmp_path)
    assert [row["rollout/staleness"] for row in rows] == ([0, 1, 0, 1] if are_deltas else [0, 0, 0])
    for row in rows:
        assert row["publish/verified_tensors"] == len(served.model.checksums("bfloat16")(served.model.params))
        numerics = "mismatch_numerics" if row["rollout/staleness"] else "mismatch"
        assert 0 < row[f"{numerics}/logprob_abs_diff_mean"] < BOUNDS[HYBRID]["bfloat16"]
        assert row["optimizer/grad_norm"] > 0
        if are_deltas:
            assert 0 < row["publish/changed_fraction"] < 0.1
            assert row["publish/pulled_bytes"] < (base / SINGLE_NAME).stat().st_size / 10
    assert are_deltas or all(row["publish/changed_fraction"] > 0.02 for row in rows[1:])


def changed_in_layer_1(params):
    """Returns the parameters with larger weights of an MLP, or in a hybrid with a reversed convolution."""
    layers = params["layers"]
    if "1" in layers:
        mixer = layers["1"]["attention"]
        changed = {"1": layers["1"] | {"attention": mixer | {"kernel": mixer["kernel"][..., ::-1]}}}
    else:
        changed = {"mlp": jax.tree.map(lambda leaf: leaf.at[1].set(1.05 * leaf[1]), layers["mlp"])}
    return params | {"layers": layers | changed}


def test_its_operations_are_a_references(served, tmp_path):
    """Another layer of the reference is named. A server's delta net shows its convolution only with the rule."""
    config, params = served.model.config, served.model.params
    with served.published():
        pass
    tokens, found = np.random.default_rng(0).integers(2, 250, 60).astype(np.int32), {}
    for name, weights in {"sound": params, "other": changed_in_layer_1(params)}.items():
        save_params(tmp_path / name, weights, config, jnp.dtype(served.dtype))
        spec = f"hf:{served.dtype},attention=eager"
        with open_tracer(spec, tmp_path / name) as reference, open_tracer(f"vllm:{served.url}", None) as tested:
            comparison = compare_layers(reference, tested, tokens, effects=0)
        found[name] = judge_layers(comparison)
    assert found["sound"].sentence == "rounding, evenly"
    names = [op.name for op in operations(config) if op.kind != "convolution"]
    assert [each.operation.name for each in comparison.differences] == names
    places = [finding.place for finding in found["other"].findings]
    assert places
    assert all(place.startswith("layer 1") for place in places)
    assert config.family != HYBRID or places == ["layer 1, delta rule"]
