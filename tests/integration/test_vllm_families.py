"""Policies other than dense Qwen3 in a real vLLM server: published weights are proven, used, and trained."""

import functools
import json
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
from rljax.policy.hf import save_params
from rljax.policy.model import init_params
from rljax.rollout.types import SamplingParams
from tests.integration.conftest import HYBRID, SHAPES, Model, Served, accepted, failed

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.harness]
# The bounds are mean absolute differences of log-probabilities, in nats.
BOUNDS = {"qwen3_moe": {"bfloat16": 0.06, "float32": 1e-5}, "qwen2": {"bfloat16": 0.03, "float32": 1e-5}}
BOUNDS["llama"] = BOUNDS["qwen2"]
BOUNDS[HYBRID] = {"bfloat16": 0.04}
PROMPT = 140  # tokens; a seeded prompt above 128 ends the engine of a hybrid on a CPU that computes it in pieces


@functools.cache
def parameters(family):
    params = init_params(SHAPES[family], 0)
    keys = jax.random.split(jax.random.key(1), len(jax.tree.leaves(params)))
    leaves, tree = jax.tree.flatten(params)
    # Biases and norms get other values than those of a fresh policy.
    moved = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, moved)


SERVED = [("qwen3_moe", "bfloat16"), ("qwen3_moe", "float32"), ("qwen2", "float32"), ("llama", "bfloat16")]


@pytest.fixture(scope="module", params=[*SERVED, (HYBRID, "bfloat16")], ids="-".join)
def served(request, start_server, tmp_path_factory):
    family, dtype = request.param
    config, params = SHAPES[family], parameters(family)
    path = tmp_path_factory.mktemp(family)
    save_params(path, init_params(config, 7), config, jnp.dtype(dtype))
    if dtype == "bfloat16" and config.tie_word_embeddings:
        repeat_head(path)
    build_tokenizer().save(path)  # for rljax accept
    model = Model(path, config, params, json.loads(json.dumps(config_to_hf(config, dtype))))
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
    "qwen3_moe": [
        "model.layers.1.mlp.experts.5.down_proj.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.1.mlp.gate.weight",
    ],
    "qwen2": ["model.layers.1.self_attn.k_proj.bias", "model.layers.0.mlp.gate_proj.weight"],
    "llama": ["model.layers.1.self_attn.o_proj.bias", "model.layers.0.mlp.up_proj.bias"],
    HYBRID: [f"model.layers.1.linear_attn.{name}" for name in ("A_log", "conv1d.weight", "in_proj_z.weight")],
}


def test_a_tensor_that_is_not_loaded_is_named(served):
    """Single tensors are left out, such as an expert, a router or a bias. The same step loaded soundly passes."""
    with served.published() as engine:
        for version, name in enumerate(FAULTS[served.model.config.family]):
            said = f"{OTHER_BITS}: .*{name}"
            with sabotaged(served, "load", "skip", name), pytest.raises(VerificationError, match=said):
                engine.publish(served.model.moved(version), 2 * version + 1)
            engine.publish(served.model.moved(version), 2 * version + 2)


@pytest.mark.parametrize("served", [("qwen3_moe", "bfloat16")], ids="-".join, indirect=True)
def test_experts_that_are_not_packed_are_caught_by_their_use(served):
    """A plain reload in vLLM on a CPU has this fault: every bit is there, but the kernel reads another layout."""
    with served.published() as engine:
        with sabotaged(served, "repack", "on"), pytest.raises(VerificationError, match=OUT_OF_BAND):
            engine.publish(served.model.moved(20), 1)
        engine.publish(served.model.moved(20), 2)


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
