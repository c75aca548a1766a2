"""``examples/publish_from_tunix.py`` publishes arrays with tunix's names and layouts to a real vLLM server."""

import contextlib

import jax
import numpy as np
import pytest
from opened_clients import call, opened, probes
from publish_from_tunix import Publisher, hf_tensors
from vllm_checks import adamw_step, sabotaged

from rljax.rollout.servers.requests import Request
from rljax.rollout.types import SamplingParams

pytestmark = pytest.mark.vllm
KERNELS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}


def tunix_arrays(params):
    """Returns our weights as tunix holds them. Both trainers have the same layouts, under other names."""
    arrays = {"embedder.input_embedding": params["embed"], "final_norm.w": params["final_norm"]["scale"]}
    if "lm_head" in params:
        arrays["lm_head.w"] = params["lm_head"].T
    for i in range(2):
        ours, layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]), f"layers.{i}"
        arrays |= {f"{layer}.attn.{theirs}.w": ours["attention"][name] for name, theirs in KERNELS.items()}
        arrays |= {f"{layer}.attn.{n[0]}_norm.w": ours["attention"][n]["scale"] for n in ("query_norm", "key_norm")}
        arrays |= {f"{layer}.mlp.{name}_proj.kernel": ours["mlp"][name] for name in ("gate", "up", "down")}
        arrays[f"{layer}.input_layernorm.w"] = ours["attention_norm"]["scale"]
        arrays[f"{layer}.post_attention_layernorm.w"] = ours["mlp_norm"]["scale"]
    return arrays


def gap(served, params, prompts):
    """Returns the mean of abs(server - trainer) over sampled tokens."""
    with opened(served.url) as fleet:
        found = probes(fleet, [Request(prompt, SamplingParams(8)) for prompt in prompts])
    pairs = zip(prompts, found, strict=True)
    scored = served.score(params, [np.concatenate([prompt, one.response]) for prompt, one in pairs])
    ours = np.concatenate([scores[-8:] for scores in scored])
    return np.abs(ours - np.concatenate([one["rollout_logprobs"] for one in found])).mean()


@pytest.mark.parametrize("tied", [True, False])
def test_the_tensors_are_those_of_our_own_export(make_model, tied):
    model = make_model(tied)
    expected = dict(model.tensors("bfloat16")(model.params))
    found = dict(hf_tensors(tunix_arrays(model.params), np.dtype("bfloat16")))
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.router\.kernel: expected a parameter of a dense Qwen3"):
        dict(hf_tensors({"layers.0.mlp.router.kernel": np.zeros((2, 2))}, np.dtype("float32")))


@pytest.mark.harness
def test_the_server_samples_from_what_was_published(bfloat16, prompts):
    def tensors(params):
        return hf_tensors(tunix_arrays(params), np.dtype("bfloat16"))

    publisher = Publisher(bfloat16.url)
    with contextlib.closing(publisher.files):
        params = bfloat16.model.moved(3)
        count, whole = publisher.publish(tensors(params))
        assert count == 24
        assert gap(bfloat16, params, prompts) < 0.05 < gap(bfloat16, bfloat16.model.params, prompts)
        params = adamw_step(params, seed=4)
        assert publisher.publish(tensors(params))[1] < whole / 4
        refused = pytest.raises(RuntimeError, match=r"other bits|not loaded")
        with sabotaged(bfloat16, "load", "skip", "model.layers.1.mlp.down_proj.weight"), refused:
            publisher.publish(tensors(adamw_step(params, seed=5)))
        assert call(bfloat16.url, "GET", "/is_paused")["is_paused"]
        publisher.publish(tensors(params))
        assert gap(bfloat16, params, prompts) < 0.05
