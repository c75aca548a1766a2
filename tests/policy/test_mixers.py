"""A family of two kinds of blocks, each with a mixer of its own: a running sum with a state, and attention.

The whole family is in this file. Everything else must follow from its mixer, its ``Family`` and its operations' names.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rljax.compare.layers.jax_tracer import JaxForm, JaxTracer
from rljax.compare.layers.operations import IN_BLOCK, logprobs
from rljax.policy.config import PolicyConfig
from rljax.policy.families import FAMILIES, BlockKind, Family, read_config
from rljax.policy.hf import hf_tensors, load_params, save_params
from rljax.policy.layers import MLP, linear, param
from rljax.policy.lora import LoraConfig, declared_adapters
from rljax.policy.mixers import Attention, Block, StateArray
from rljax.policy.model import abstract_params, hidden_states, init_params
from rljax.policy.score import make_scorer, segment_ends
from rljax.policy.taps import tap
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.types import SamplingParams
from rljax.sharding import MeshConfig, make_mesh

CONFIG = PolicyConfig(24, 32, 64, 4, 4, 2, 8, family="toy", initializer_range=0.25)
WIDTH = 6


class RunningSum(nnx.Module):
    """Sums of a token's own value and the one before it, s = 0.9 s + v + v', in float32."""

    state_heads = 1

    def __init__(self, c, rngs):
        normal = jax.nn.initializers.normal(c.initializer_range)
        self.value = param(rngs, (c.hidden_size, WIDTH), ("embed", "norm"), normal, "sum.in_proj.weight", 1)
        self.output = param(rngs, (WIDTH, c.hidden_size), ("norm", "embed"), normal, "sum.out_proj.weight", 1)

    def state_spec(self, rows, places, dtype, cache_dtype):
        axes = ("rows", "norm")
        return StateArray((rows, WIDTH), jnp.float32, axes), StateArray((rows, WIDTH), dtype, axes)

    def __call__(self, x, where, state):
        zeros = jnp.zeros((len(x), WIDTH))
        total, last = (zeros, zeros.astype(x.dtype)) if state is None else state.read()
        value = tap("sum_input", linear(("btd,df->btf",), x, (self.value[...],))[0])
        value, starts = jnp.where(where.valid[..., None], value, 0), where.positions == 0
        before = jnp.where(starts[..., None], 0, jnp.concatenate([last[:, None], value[:, :-1]], axis=1))

        def step(total, token):
            values, starts = token
            total = jnp.where(starts[:, None], 0, 0.9 * total) + values
            return total, total

        tokens = (jnp.moveaxis((value + before).astype(jnp.float32), 1, 0), starts.T)
        total, sums = jax.lax.scan(step, total, tokens)
        sums = tap("sum", jnp.moveaxis(sums, 0, 1).astype(x.dtype))
        out = tap("attention_output", linear(("btf,fd->btd",), sums, (self.output[...],))[0])
        return out, None if state is None else state.write((total, value[:, -1]))


PATTERN = (
    BlockKind(lambda c, rngs: Block(c, rngs, RunningSum(c, rngs), MLP(c, rngs)), "running_sum"),
    BlockKind(lambda c, rngs: Block(c, rngs, Attention(c, rngs, norms=True), MLP(c, rngs))),
)
TOY = Family(model_type="toy", architecture="ToyForCausalLM", pattern=PATTERN, fixed={})


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", TOY)


@pytest.fixture
def params():
    return init_params(CONFIG, 0)


def test_the_forward_is_a_loop_over_periods():
    def products(num_layers):
        config, ones = dataclasses.replace(CONFIG, num_layers=num_layers), jnp.ones((1, 5), jnp.int32)
        forward = jax.jit(lambda params: hidden_states(params, config, ones, segment_ends(ones), ones)[0])
        return forward.lower(abstract_params(config)).as_text().count("dot_general")

    assert products(4) == products(8)


@pytest.mark.parametrize("decode_tokens", [pytest.param(0, marks=pytest.mark.harness), 40])
def test_decoding_with_a_cache_is_the_whole_forward(params, decode_tokens):
    """With 40 tokens in the cache, slots are used again, also for prompts that are padded on the left."""
    score = make_scorer(CONFIG, jnp.float32)
    engine = JaxEngine(CONFIG, jnp.float32, 6, mesh=make_mesh(MeshConfig(1, 1)), decode_tokens=decode_tokens)
    engine.publish(params, 1)
    prompts = [np.asarray(p, np.int32) for p in ([1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [2, 2])]
    responses = list(engine.generate(prompts, 3, SamplingParams(9, 1.0, (0, 1)), seed=3))
    assert len(responses) == 12
    scored = score(params, [*(r.ids for r in responses), *prompts])
    for response, whole in zip(responses, scored[:12], strict=True):
        np.testing.assert_allclose(response["rollout_logprobs"], whole[-len(response.response) :], atol=1e-5)
    for found, whole in zip(engine.score_prefill(prompts), scored[12:], strict=True):
        np.testing.assert_allclose(found, whole[1:], atol=1e-5)


def test_files_have_the_numbers_of_the_blocks(params, tmp_path):
    tensors = dict(hf_tensors(params, CONFIG, jnp.float32))
    second = params["layers"]["0"]["attention"]["value"][1]
    np.testing.assert_array_equal(tensors["model.layers.2.sum.in_proj.weight"], second.T)
    assert [i for i in range(4) if f"model.layers.{i}.self_attn.q_proj.weight" in tensors] == [1, 3]
    save_params(tmp_path, params, CONFIG)
    assert read_config(tmp_path) == CONFIG
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path, CONFIG), params)
    adapters = declared_adapters(CONFIG, LoraConfig(rank=2, targets=("q_proj",)))
    names = adapters["layers", "1", "attention", "query", "a"].stored.names((2, 32, 2)).tolist()
    assert names == [f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight" for i in (1, 3)]


def test_the_operations_of_each_block_are_compared(params, tmp_path, monkeypatch):
    save_params(tmp_path, params, CONFIG)
    tracer, tokens = JaxTracer(tmp_path, JaxForm("float32"), "jax:float32"), np.arange(7, dtype=np.int32)
    with pytest.raises(KeyError, match="IN_BLOCK must name the taps sum, sum_input"):
        tracer.run(tokens, {})
    monkeypatch.setitem(IN_BLOCK, "sum_input", "projection before the sum")
    monkeypatch.setitem(IN_BLOCK, "sum", "running sum")
    values = tracer.run(tokens, {})
    assert {"2/sum_input", "2/sum", "3/query", "3/query_norm"} <= set(values)
    assert not {"2/query", "1/sum"} & set(values)
    (expected,) = make_scorer(CONFIG, jnp.float32)(params, [tokens])
    np.testing.assert_allclose(logprobs(values["logits"], tokens), expected[1:], atol=1e-5)
    changed = tracer.run(tokens, {"2/attention_output": 2 * values["2/attention_output"]})
    np.testing.assert_array_equal(changed["1/residual"], values["1/residual"])
    assert np.abs(changed["2/residual"] - values["2/residual"]).max() > 0.01
