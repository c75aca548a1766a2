"""Tests of float16 with dynamic loss scaling: planted overflows, rescued underflow, and the measured activations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from records import train_sequence
from tiny_step import fresh_state
from tiny_step import make_step as make_any_step

from rljax.algorithms.losses import LossConfig
from rljax.policy.config import PolicyConfig
from rljax.policy.model import embed_tokens, init_params
from rljax.policy.score import packed_logprobs
from rljax.trainer.packing import pack
from rljax.trainer.state import OptimizerConfig, make_optimizer

pytestmark = pytest.mark.slow

CONFIG = PolicyConfig(24, 32, 64, 1, 4, 2, 8, tie_word_embeddings=True, initializer_range=0.2)
QWEN2 = dataclasses.replace(CONFIG, family="qwen2")
OF_EXPERTS = {"family": "qwen3_moe", "num_experts": 8, "experts_per_token": 2, "expert_size": 32}
MIXTURE = dataclasses.replace(CONFIG, **OF_EXPERTS, normalize_gates=True)
FAMILIES = [CONFIG, *(pytest.param(config, marks=pytest.mark.harness) for config in (QWEN2, MIXTURE))]
COUNT = 4


def batch(advantage=1.0, seed=0):
    rng = np.random.default_rng(seed)
    texts = [(rng.integers(0, 24, 3), rng.integers(0, 24, 9)) for _ in range(COUNT)]
    sequences = [train_sequence(*text, np.full(9, -3.0), advantage * (-1.0) ** i) for i, text in enumerate(texts)]
    return pack(sequences, row_tokens=12, rows_per_micro_batch=2, micro_batches=2)


make_step = functools.partial(
    make_any_step, config=CONFIG, loss=LossConfig(kind="policy_gradient"), count=COUNT, limit=9, shape=(2, 2, 12)
)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda config: config.family)
def trained(request):
    """Returns eight steps in float16. Advantages that no scale can hold plant overflows at steps 2, 3 and 6."""
    tx = make_optimizer(OptimizerConfig(learning_rate=1e-2))
    how = {"config": request.param, "dtype": "float16"}
    step, state, rows = make_step(tx, **how), fresh_state(tx, **how), []
    for t in range(1, 9):
        state, metrics, _ = step(state, batch(1e9 if t in (2, 3, 6) else 1.0, seed=t), 1e-2 / t, True)
        rows.append((jax.device_get(metrics), jax.device_get(state.params)))
    return rows


def test_overflows_are_skipped_counted_and_halve_the_scale(trained):
    """A skipped step sets its rate, too. No value that is not finite reaches the weights."""
    skipped = [0, 1, 2, 2, 2, 3, 3, 3]
    for t, ((metrics, params), so_far) in enumerate(zip(trained, skipped, strict=True), 1):
        assert metrics["precision/loss_scale"] == 2.0 ** (15 - so_far)
        assert metrics["precision/overflows"] == metrics["optimizer/skipped_updates"] == so_far
        assert metrics["schedule/learning_rate"] == np.float32(1e-2 / t)
        assert np.isfinite(metrics["optimizer/grad_norm"]) == (t not in (2, 3, 6))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
        before = jax.tree.leaves(trained[max(t - 2, 0)][1])
        moved = any((a != b).any() for a, b in zip(before, jax.tree.leaves(params), strict=True))
        assert moved == (t not in (1, 2, 3, 6))


def gradient_with(dtype, scale, advantage, config=CONFIG):
    """Returns the gradient and its norm."""
    state = fresh_state(config=config, dtype=dtype)
    state = state._replace(loss_scale=state.loss_scale._replace(scale=jnp.float32(scale)))
    state, metrics, _ = make_step(dtype=dtype, config=config)(state, batch(advantage), 1.0, True)
    return jax.device_get(state.opt_state.inner_state.trace), float(metrics["optimizer/grad_norm"])


def gap(found, expected):
    return float(optax.tree.norm(jax.tree.map(lambda a, b: a - b, found, expected)))


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.family)
def test_gradients_below_the_float16_range_survive_by_scaling(config):
    """Advantages of 1e-8 give gradients near 1e-9, below float16's smallest number, 6e-8."""
    exact, norm = gradient_with("float32", 1.0, 1e-8, config)
    assert 0 < norm < 1e-7
    assert gap(gradient_with("float16", 2.0**24, 1e-8, config)[0], exact) / norm < 2e-2
    lost, lost_norm = gradient_with("float16", 1.0, 1e-8, config)
    zeros = sum(int((leaf == 0).sum()) for leaf in jax.tree.leaves(lost))
    assert zeros > 0.9 * sum(leaf.size for leaf in jax.tree.leaves(lost))
    assert lost_norm < 0.5 * norm


def test_unscaled_gradients_do_not_depend_on_the_scale():
    exact, norm = gradient_with("float32", 1.0, 1.0)
    for scale in (2.0**6, 2.0**12):
        assert gap(gradient_with("float16", scale, 1.0)[0], exact) / norm < 5e-3


@pytest.mark.harness
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_float32_head_scores_with_the_published_table(dtype):
    """The bits of a master that 16 bits cannot hold change nothing in the step's scores and gradients."""
    step = make_step(dtype=dtype, head="float32")
    published = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(jnp.float32), init_params(CONFIG, 0))
    # It is a quarter of the distance between two neighbours in that dtype, which rounds away.
    quarter, found = 2.0 ** -(jnp.finfo(dtype).nmant + 2), []
    masters = jax.tree.map(lambda x: x + jnp.exp2(jnp.floor(jnp.log2(jnp.abs(x) + 1e-30))) * quarter, published)
    for params in (masters, published):
        state = fresh_state(config=CONFIG, params=jax.tree.map(jnp.copy, params), dtype=dtype)
        state, _, values = step(state, batch(), 1.0, True)
        found.append(jax.device_get((values.logprobs, state.opt_state.inner_state.trace)))
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (masters, published)), strict=True))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert np.abs(found[0][1]["embed"]).max() > 0


@functools.partial(jax.jit, static_argnames="config")
def stats_of(params, config):
    token = jnp.array([[7]])
    return packed_logprobs(params, config, token, jnp.ones_like(token), jnp.zeros_like(token)).stats


def mlp_input_by_hand(params):
    """Returns the residual stream of a lone token after attention, the normed input of the MLP, and the MLP."""
    layer = jax.tree.map(lambda leaf: np.float64(leaf)[0], params["layers"])

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2) + CONFIG.rms_norm_eps) * scale

    x = np.float64(embed_tokens(params, jnp.array([[7]])))[0, 0]
    value = np.einsum("d,dgk->gk", norm(x, layer["attention_norm"]["scale"]), layer["attention"]["value"])
    x = x + np.einsum("hk,hkd->d", np.repeat(value, 2, axis=0), layer["attention"]["output"])
    return x, norm(x, layer["mlp_norm"]["scale"]), layer["mlp"]


def test_activation_max_covers_the_residual_stream_and_mlps():
    params = init_params(CONFIG, 3)
    params["embed"] = params["embed"] * 40.0
    x, inner, mlp = mlp_input_by_hand(params)
    product = np.asarray(jax.nn.silu(inner @ mlp["gate"])) * (inner @ mlp["up"])
    expected = max(np.abs(each).max() for each in (product, x + product @ mlp["down"]))
    assert float(stats_of(params, CONFIG).activation_max) == pytest.approx(expected, rel=1e-5)


def test_activation_max_holds_what_is_inside_the_experts():
    """The products inside the SwiGLU of each chosen expert are worked out by hand."""
    params = init_params(MIXTURE, 3)
    params["layers"]["mlp"]["up"] = params["layers"]["mlp"]["up"] * 300.0
    stats, (_, inner, mlp) = stats_of(params, MIXTURE), mlp_input_by_hand(params)
    chosen = np.argsort(inner @ mlp["router"])[-2:]
    products = [np.asarray(jax.nn.silu(inner @ mlp["gate"][e])) * (inner @ mlp["up"][e]) for e in chosen]
    assert sorted(stats.router.choices[0, 0, 0].tolist()) == sorted(chosen.tolist())
    assert float(stats.activation_max) == pytest.approx(max(np.abs(p).max() for p in products), rel=1e-4)
