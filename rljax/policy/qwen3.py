"""Dense Qwen3, declared once with flax.nnx and split once into a plain pytree of arrays.

Each parameter is described in one place, by ``_param(rngs, shape, logical axes, initializer)``; abstract shapes,
shardings and initial values all derive from it. The pytree (``nnx.to_pure_dict``) is what the optimizer, checkpoints
and engines hold; blocks are stacked on a leading layers axis and the forward scans over it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from rljax.policy.attention import PackedAttention, packed_attention
from rljax.policy.attention_blocks import LSE_NAME, OUT_NAME
from rljax.policy.config import PolicyConfig
from rljax.policy.linear import PRODUCT, linear
from rljax.sharding import constrain, named_sharding

Params = dict[str, Any]
Remat = Literal["none", "dots", "blocks", "offload"]
# What the backward pass finds of a block, besides its input, and does not recompute.
_BLOCK_INPUT = "block_input"
_SAVED: dict[str, Any] = {
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT, OUT_NAME, LSE_NAME),
    "blocks": None,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_BLOCK_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
# (carry, layer index, q, k, v) -> (attention output, carry); the carry is a cache, or ().
AttentionFn = Callable[[Any, Array, Array, Array, Array], tuple[Array, Any]]


def _param(rngs: nnx.Rngs, shape: tuple[int, ...], logical: tuple[str, ...], init: jax.nn.initializers.Initializer):  # type: ignore[no-untyped-def]
    return nnx.Param(init(rngs.params(), shape, jnp.float32), logical=logical)


def _largest(x: Float[Array, "b t f"]) -> Float[Array, "b f"]:
    """Over the tokens only: a maximum over what the mesh splits would be a collective in every block."""
    return jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis=1)).astype(jnp.float32)


def rms_norm(x: Float[Array, "b *t d"], scale: Float[Array, "*b d"], eps: float) -> Float[Array, "b *t d"]:
    """Root-mean-square normalisation over the last axis, computed in float32; shape and dtype of ``x``.

    ``scale`` is [d], or [b, d] with one for each row.
    """
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    of_tokens = jnp.expand_dims(scale.astype(jnp.float32), range(scale.ndim - 1, x.ndim - 1))
    return (normed * of_tokens).astype(x.dtype)


class RMSNorm(nnx.Module):
    """``rms_norm`` with its scale."""

    def __init__(self, size: int, eps: float, rngs: nnx.Rngs):
        self.eps = eps
        self.scale = _param(rngs, (size,), ("norm",), jax.nn.initializers.ones)

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """Same shape and dtype as ``x``."""
        return rms_norm(x, self.scale[...], self.eps)


def rotary_tables(
    positions: Int[Array, "b t"], head_dim: int, theta: float
) -> tuple[Float[Array, "b t k"], Float[Array, "b t k"]]:
    """Float32 cosines and sines of the rotary embedding, the half-split form of transformers."""
    # In float32 as transformers has them: a last bit of a frequency is a position's worth of angle at long range.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = jnp.asarray(np.float32(1.0) / np.float32(theta) ** exponents)
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None]
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(x: Float[Array, "b t h k"], tables: tuple[Array, Array]) -> Float[Array, "b t h k"]:
    """Rotates heads in float32 and returns the dtype of ``x``."""
    cos, sin = (table[:, :, None, :] for table in tables)
    x32 = x.astype(jnp.float32)
    first, second = jnp.split(x32, 2, axis=-1)
    return (x32 * cos + jnp.concatenate([-second, first], axis=-1) * sin).astype(x.dtype)


class Attention(nnx.Module):
    """Projections of grouped-query attention with per-head q and k norms."""

    def __init__(self, c: PolicyConfig, rngs: nnx.Rngs):
        normal = jax.nn.initializers.normal(c.initializer_range)
        d, h, g, k = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
        self.query = _param(rngs, (d, h, k), ("embed", "heads", "head_dim"), normal)
        self.key = _param(rngs, (d, g, k), ("embed", "kv_heads", "head_dim"), normal)
        self.value = _param(rngs, (d, g, k), ("embed", "kv_heads", "head_dim"), normal)
        self.output = _param(rngs, (h, k, d), ("heads", "head_dim", "embed"), normal)
        self.query_norm = RMSNorm(k, c.rms_norm_eps, rngs)
        self.key_norm = RMSNorm(k, c.rms_norm_eps, rngs)

    def __call__(self, x: Array, rotary: tuple[Array, Array], attention_fn: Callable[..., Any]) -> tuple[Array, Any]:
        """``x`` [b, t, d] -> ([b, t, d], the carry of ``attention_fn``)."""
        specs = ("btd,dhk->bthk", "btd,dgk->btgk", "btd,dgk->btgk")
        q, k, v = linear(specs, x, (self.query[...], self.key[...], self.value[...]))
        q = constrain(q, "rows", "tokens", "act_heads", "head_dim")
        q = apply_rotary(self.query_norm(q), rotary)
        k = apply_rotary(self.key_norm(k), rotary)
        mixed, carry = attention_fn(q, k, v)
        return linear(("bthk,hkd->btd",), mixed, (self.output[...],))[0], carry


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, c: PolicyConfig, rngs: nnx.Rngs):
        normal = jax.nn.initializers.normal(c.initializer_range)
        self.gate = _param(rngs, (c.hidden_size, c.intermediate_size), ("embed", "mlp"), normal)
        self.up = _param(rngs, (c.hidden_size, c.intermediate_size), ("embed", "mlp"), normal)
        self.down = _param(rngs, (c.intermediate_size, c.hidden_size), ("mlp", "embed"), normal)

    def __call__(self, x: Float[Array, "b t d"]) -> tuple[Float[Array, "b t d"], Float[Array, "b f"]]:
        """``x`` -> (the same shape and dtype, the largest absolute values of the product inside, over tokens)."""
        gate, up = linear(("btd,df->btf",) * 2, x, (self.gate[...], self.up[...]))
        product = jax.nn.silu(gate) * constrain(up, "rows", "tokens", "act_mlp")
        return linear(("btf,fd->btd",), product, (self.down[...],))[0], _largest(product)


class Block(nnx.Module):
    """One pre-norm transformer block."""

    def __init__(self, c: PolicyConfig, rngs: nnx.Rngs):
        self.attention = Attention(c, rngs)
        self.mlp = MLP(c, rngs)
        self.attention_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, rngs)
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, rngs)

    def __call__(
        self, x: Array, rotary: tuple[Array, Array], attention_fn: Callable[..., Any]
    ) -> tuple[Array, Any, tuple[Array, Array]]:
        """``x`` [b, t, d] -> ([b, t, d], the carry of ``attention_fn``, largest absolute values [b, f] and [b, d])."""
        mixed, carry = self.attention(self.attention_norm(x), rotary, attention_fn)
        x = x + mixed
        fed, inside = self.mlp(self.mlp_norm(x))
        x = constrain(x + fed, "rows", "tokens", "act_embed")
        return x, carry, (inside, _largest(x))


class Qwen3(nnx.Module):
    """The declaration of all parameters; ``layers`` is a stack of blocks on a leading axis."""

    def __init__(self, c: PolicyConfig, rngs: nnx.Rngs):
        normal = jax.nn.initializers.normal(c.initializer_range)
        self.embed = _param(rngs, (c.vocab_size, c.hidden_size), ("vocab", "embed"), normal)
        stack = nnx.vmap(lambda r: Block(c, r), in_axes=0, axis_size=c.num_layers)
        self.layers = stack(rngs.split(c.num_layers))
        self.final_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, rngs)
        if not c.tie_word_embeddings:
            self.lm_head = _param(rngs, (c.vocab_size, c.hidden_size), ("vocab", "embed"), normal)


@functools.lru_cache(maxsize=32)
def _declaration(config: PolicyConfig) -> tuple[Any, Params, Params]:
    """(graphdef of a block, abstract parameters, logical axes), the last two with the pytree's structure."""
    model = nnx.eval_shape(lambda: Qwen3(config, nnx.Rngs(0)))
    state = nnx.state(model, nnx.Param)
    logical = {
        path: (("layers",) if path[0] == "layers" else ()) + variable.get_metadata()["logical"]
        for path, variable in nnx.to_flat_state(state)
    }
    block = nnx.eval_shape(lambda: Block(config, nnx.Rngs(0)))
    return nnx.split(block)[0], nnx.to_pure_dict(state), traverse_util.unflatten_dict(logical)


def abstract_params(config: PolicyConfig) -> Params:
    """The pytree with a float32 ``jax.ShapeDtypeStruct`` at each leaf; nothing is allocated."""
    return _declaration(config)[1]


def logical_axes(config: PolicyConfig) -> Params:
    """The pytree with a tuple of logical axis names at each leaf (one per dimension)."""
    return _declaration(config)[2]


def gathered_axes(config: PolicyConfig) -> Params:
    """``logical_axes`` of weights that are gathered over the mesh axis that splits the model's width."""
    paths = traverse_util.flatten_dict(logical_axes(config))
    gathered = {path: tuple(None if axis == "embed" else axis for axis in axes) for path, axes in paths.items()}
    return traverse_util.unflatten_dict(gathered)


def param_shardings(config: PolicyConfig, mesh: jax.sharding.Mesh) -> Params:
    """The pytree with a NamedSharding at each leaf."""
    return jax.tree.map(
        lambda leaf, axes: named_sharding(mesh, axes, leaf.shape), abstract_params(config), logical_axes(config)
    )


def init_params(config: PolicyConfig, seed: int) -> Params:
    """Fresh float32 parameters; the same seed gives the same bits."""
    return nnx.to_pure_dict(nnx.state(Qwen3(config, nnx.Rngs(seed)), nnx.Param))


def cast_params(params: Params, dtype: Any) -> Params:
    """Every parameter in ``dtype``: what an engine of that dtype computes with."""
    return jax.tree.map(lambda p: p.astype(dtype), params)


def lm_head_table(params: Params) -> Float[Array, "v d"]:
    """The output table: the embedding itself when tied."""
    return params["lm_head"] if "lm_head" in params else params["embed"]


@jax.custom_vjp
def _rows(table: Array, tokens: Array) -> Array:
    """Each device looks up its part of the width and of the vocabulary for the tokens of all: no table is gathered."""
    table, tokens = constrain(table, "vocab", "embed"), constrain(tokens, None, None)
    return constrain(constrain(table[tokens], None, None, "embed"), "rows", "tokens", "act_embed")


def _rows_fwd(table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    # An empty slice carries the table's width and dtype to the backward pass.
    return _rows(table, tokens), (tokens, table[:, :0])


def _rows_bwd(saved: tuple[Array, Array], d_rows: Array) -> tuple[Array, None]:
    tokens, empty = saved
    tokens, d_rows = constrain(tokens, None, None), constrain(d_rows, None, None, "embed")
    zeros = constrain(jnp.zeros((empty.shape[0], d_rows.shape[-1]), jnp.float32), "vocab", "embed")
    d_table = zeros.at[tokens].add(d_rows.astype(jnp.float32))
    return constrain(d_table, "vocab", "embed").astype(empty.dtype), None


_rows.defvjp(_rows_fwd, _rows_bwd)


def embed_tokens(params: Params, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    """Rows of the table in its dtype; their gradient is summed in float32."""
    return _rows(params["embed"], tokens)


def run_blocks(
    params: Params,
    config: PolicyConfig,
    x: Float[Array, "b t d"],
    positions: Int[Array, "b t"],
    attention_fn: AttentionFn,
    carry: Any = (),
    *,
    remat: Remat = "none",
) -> tuple[Float[Array, "b t d"], Any, Float[Array, ""]]:
    """Scans the blocks over ``x`` and applies the final norm.

    Args:
      params: the pytree, in the compute dtype.
      config: its shape.
      x: embedded tokens.
      positions: rotary position of each token inside its own segment.
      attention_fn: attention of one layer's heads; gets and returns ``carry``.
      carry: threaded through the blocks.
      remat: what the backward pass finds of a block, and what it recomputes.

    Returns:
      Hidden states in the dtype of ``x``, the carry, and the largest absolute value among the residual stream and the
      MLPs' products: in float16 these overflow first, at 65,504.
    """
    graphdef = _declaration(config)[0]
    rotary = rotary_tables(positions, config.head_dim, config.rope_theta)

    def body(state: tuple[Array, Any], layer: tuple[Any, Array]) -> tuple[tuple[Array, Any], tuple[Array, Array]]:
        x, carry = checkpoint_name(state[0], _BLOCK_INPUT), state[1]
        block = nnx.merge(graphdef, layer[0])
        x, carry, largest = block(x, rotary, functools.partial(attention_fn, carry, layer[1]))
        return (x, carry), largest

    if remat != "none":
        body = jax.checkpoint(body, prevent_cse=False, policy=_SAVED[remat])
    x = constrain(x, "rows", "tokens", "act_embed")
    (x, carry), largest = jax.lax.scan(body, (x, carry), (params["layers"], jnp.arange(config.num_layers)))
    hidden = rms_norm(x, params["final_norm"]["scale"], config.rms_norm_eps)
    return hidden, carry, functools.reduce(jnp.maximum, map(jnp.max, largest))


def _scales_of_rows(layers: Params, rows: int) -> Params:
    """The blocks with a float32 copy of each norm's scale [layers, b, d] for every row.

    The rows' gradients of the scales are then added up once, after the last block, and not in every block.
    """

    def copied(path: tuple[Any, ...], leaf: Array) -> Array:
        if path[-1].key != "scale":
            return leaf
        copies = jnp.broadcast_to(leaf.astype(jnp.float32)[:, None], (leaf.shape[0], rows, leaf.shape[1]))
        return constrain(copies, "layers", "rows", "norm")

    return jax.tree_util.tree_map_with_path(copied, layers)


def hidden_states(
    params: Params,
    config: PolicyConfig,
    tokens: Int[Array, "b t"],
    segment_ids: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    *,
    remat: Remat = "none",
    attention: PackedAttention = packed_attention,
) -> tuple[Float[Array, "b t d"], Float[Array, ""]]:
    """Hidden states of packed rows, ready for the LM head, and the largest activation (see ``run_blocks``).

    Attention, by the implementation given, stays inside each segment.
    """

    def attention_fn(carry: Any, layer: Array, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        del layer
        return attention(q, k, v, segment_ids), carry

    x = embed_tokens(params, tokens)
    params = params | {"layers": _scales_of_rows(params["layers"], tokens.shape[0])}
    hidden, _, largest = run_blocks(params, config, x, positions, attention_fn, remat=remat)
    return hidden, largest
