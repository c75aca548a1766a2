"""Tests of adapters: their gradients, the merged weights, and the settings that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from tiny_adapters import ATTENTION, CONFIG, LORA, MIXTURE, random_adapters

from rljax.policy import lora
from rljax.policy.config import PolicyConfig
from rljax.policy.lora import LoraConfig, MergedPolicy, TrainedParams, declared_adapters, merge_adapters
from rljax.policy.model import abstract_params, cast_params, init_params
from rljax.policy.score import packed_logprobs
from rljax.sharding import MeshConfig, make_mesh


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_merged_weights_are_those_by_hand_rounded_once(dtype):
    """By hand each layer is a matrix product of its own in float64."""
    base, adapters = cast_params(init_params(CONFIG, 0), dtype), random_adapters()
    targets, given = TrainedParams(CONFIG, LORA).targets(base), flatten_dict(adapters)
    merged = flatten_dict(merge_adapters(targets, adapters, CONFIG, LORA, dtype))
    assert merged.keys() == lora.find_targets(CONFIG, LORA).keys()
    for path, weight in merged.items():
        a, b = (np.asarray(given[*path, name], np.float64) for name in "ab")
        products = a.reshape(len(a), -1, LORA.rank) @ b.reshape(len(b), LORA.rank, -1)
        expected = np.asarray(flatten_dict(base)[path], np.float64) + 1.5 * products.reshape(weight.shape)
        # A sum in 16 bits would be off by a unit in the last place in a quarter of the elements.
        differing = np.asarray(weight) != expected.astype(np.float32).astype(dtype)
        assert weight.dtype == dtype
        assert np.mean(differing) < 1e-3


def test_a_merged_policy_shares_what_it_does_not_change():
    """Without a change it is the base bit for bit. Leaves without an adapter are not copied."""
    params, mesh = cast_params(init_params(CONFIG, 0), jnp.bfloat16), make_mesh(MeshConfig(1, 1))
    merged, adapters = MergedPolicy(CONFIG, LORA, mesh, params, jnp.bfloat16), random_adapters()
    jax.tree.map(np.testing.assert_array_equal, merged(lora.init_adapters(CONFIG, LORA, 7)), params)
    first = merged(adapters)
    assert first["embed"] is params["embed"]
    assert merged(adapters) is first
    assert merged(random_adapters()) is not first
    as_masters = MergedPolicy(CONFIG, LORA, mesh, params, jnp.bfloat16, as_float32=True)(adapters)
    assert {leaf.dtype for leaf in jax.tree.leaves(as_masters)} == {jnp.dtype("float32")}
    jax.tree.map(lambda wide, narrow: np.testing.assert_array_equal(wide, narrow.astype("float32")), as_masters, first)


def test_fresh_adapters_are_those_of_peft():
    adapters = flatten_dict(lora.init_adapters(CONFIG, LORA, 0))
    again, other = (flatten_dict(lora.init_adapters(CONFIG, LORA, seed)) for seed in (0, 1))
    for path, leaf in adapters.items():
        bound, largest = 1 / np.sqrt(np.prod(leaf.shape[1:-1])), np.abs(leaf).max()
        assert largest == 0 if path[-1] == "b" else 0.9 * bound < largest <= bound
        np.testing.assert_array_equal(leaf, again[path])
        assert path[-1] == "b" or not np.array_equal(leaf, other[path])
    pairs = [np.ravel(leaf) for path, leaf in adapters.items() if path[-1] == "a"]
    assert len({float(one[0]) for one in pairs}) == len(pairs)  # no two layers share their numbers


def loss(weights):
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, 24, (2, 9)))
    scores = packed_logprobs(weights, CONFIG, tokens, jnp.ones_like(tokens), jnp.tile(jnp.arange(9), (2, 1)))
    return -jnp.mean(scores.logprobs)


@pytest.mark.slow
@jax.default_matmul_precision("highest")
def test_gradients_of_adapters_equal_autodiff():
    params, adapters = init_params(CONFIG, 0), random_adapters()
    base = TrainedParams(CONFIG, LORA).targets(params)

    def of_adapters(adapters):
        return loss(lora.with_targets(params, merge_adapters(base, adapters, CONFIG, LORA, jnp.float32)))

    merged = jax.jit(lambda a: merge_adapters(base, a, CONFIG, LORA, jnp.float32))(adapters)
    of_weights = jax.jit(jax.grad(lambda part: loss(lora.with_targets(params, part))))(merged)
    found = jax.jit(lambda a, g: lora.adapter_gradients(a, g, CONFIG, LORA))(adapters, of_weights)
    expected = jax.jit(jax.grad(of_adapters))(adapters)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(theirs).max() > 1e-4
        np.testing.assert_allclose(ours, theirs, atol=1e-6 * float(np.abs(theirs).max()) + 1e-8, rtol=1e-4)


def test_experts_of_a_mixture_refuse_adapters():
    assert len(declared_adapters(MIXTURE, LoraConfig(rank=2, targets=ATTENTION))) == 8
    with pytest.raises(ValueError, match=r"^lora.targets: a qwen3_moe policy has no gate_proj that may"):
        declared_adapters(MIXTURE, LoraConfig(rank=2))
    # A bias of the same layer is not a target.
    qwen2 = PolicyConfig(24, 32, 64, 2, 4, 4, 8, family="qwen2")
    assert "query_bias" in abstract_params(qwen2)["layers"]["attention"]
    found = declared_adapters(qwen2, LoraConfig(rank=2, targets=("q_proj",)))
    assert {path[-2] for path in found} == {"query"}


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"rank": -1}, "rank must not be negative"),
        ({"rank": 4, "alpha": float("nan")}, "alpha must be positive"),
        ({"rank": 4, "targets": ()}, "targets must be different layers"),
        ({"rank": 4, "targets": ("q_proj", "q_proj")}, "targets must be different layers"),
        ({"rank": 4, "targets": ("embed_tokens",)}, "targets must be among q_proj, .*, got 'embed_tokens'"),
        ({"rank": 4, "dropout": 0.1}, "dropout must be 0"),
        ({"adapter": "somewhere"}, "needs its rank"),
    ],
)
def test_settings_that_are_no_adapters_are_refused(settings, part):
    with pytest.raises(ValueError, match=part):
        LoraConfig(**settings)
