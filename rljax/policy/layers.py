"""The parts of a block: parameters with their description, norms, rotary embeddings, attention, SwiGLU.

Each parameter is described in one place, by ``param(rngs, shape, logical axes, initializer, name in the file)``;
abstract shapes, shardings, initial values and the layout of checkpoints all derive from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from rljax.policy.config import PolicyConfig
from rljax.policy.grouped import IN_BLOCKS, Grouped
from rljax.policy.linear import linear
from rljax.sharding import axis_size, constrain


class Stored(NamedTuple):
    """Where a parameter is in a Hugging Face checkpoint.

    Attributes:
      name: of the tensor, in a block without ``model.layers.{}.``; a further ``{}`` stands for each leading axis of the
        parameter whose parts are tensors of their own.
      inputs: axes of the parameter, after those, that are the tensor's second axis: a linear layer is [in, out] here
        and [out, in] in the file, which has heads and head_dim as one axis. 0: all its axes are one in the file. None:
        it is stored as it is.
    """

    name: str
    inputs: int | None = None

    @property
    def stacked(self) -> int:
        """Leading axes of the parameter whose parts are tensors of their own."""
        return self.name.count("{}")


def param(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    logical: tuple[str, ...],
    init: jax.nn.initializers.Initializer,
    name: str,
    inputs: int | None = None,
) -> nnx.Param[Array]:
    """A float32 parameter with its logical axes, and ``name`` and ``inputs`` of ``Stored``."""
    return nnx.Param(init(rngs.params(), shape, jnp.float32), logical=logical, stored=Stored(name, inputs))


class Routing(NamedTuple):
    """What is given to the router and experts of a block.

    Attributes:
      valid: tokens that count; None: all.
      choices: experts that each token must go to, -1 where its router is free; None: everywhere.
      grouped: the experts' products.
    """

    valid: Bool[Array, "b t"] | None = None
    choices: Int[Array, "b t k"] | None = None
    grouped: Grouped = IN_BLOCKS


class Routed(NamedTuple):
    """What a router did in one block; sums over the valid tokens of each row.

    Attributes:
      choices: experts that each token went to.
      tokens: that are valid.
      load: tokens that went to each of the e experts.
      probability: of each expert, before the choice; differentiable.
      entropy: of the router's distribution (nats).
      given: choices that were not free.
      differing: of them, those that the router itself would not have made.
    """

    choices: Int[Array, "b t k"]
    tokens: Int[Array, " b"]
    load: Int[Array, "b e"]
    probability: Float[Array, "b e"]
    entropy: Float[Array, " b"]
    given: Int[Array, " b"]
    differing: Int[Array, " b"]


class Activations(NamedTuple):
    """What is seen of a block's forward.

    Attributes:
      inside: the largest absolute values inside the block, over s parts of the tokens of each row.
      outside: likewise of what the block leaves.
      router: of a block with experts, else None.
    """

    inside: Float[Array, "b s f"]
    outside: Float[Array, "b s d"]
    router: Routed | None


def largest(x: Float[Array, "b t f"]) -> Float[Array, "b s f"]:
    """Over each device's tokens only: a maximum over what the mesh splits would be a collective in every block."""
    rows, tokens, features = x.shape
    parts = math.gcd(tokens, axis_size("split_tokens"))
    each = jnp.abs(x).reshape(rows, parts, tokens // parts, features)
    return jax.lax.stop_gradient(jnp.max(each, axis=2)).astype(jnp.float32)


def split_tokens(x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    """``x`` between the products of a block, where each token is computed alone: split by tokens over ``tp``."""
    return constrain(x, "rows", "split_tokens", "act_embed")


def all_tokens(x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    """``x`` before products whose weights are split over ``tp``: each device has all tokens of its rows."""
    # What travels is ``x`` as it is here, and not a wider array from which it is rounded.
    return constrain(split_tokens(x), "rows", "tokens", "act_embed")


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

    def __init__(self, size: int, eps: float, rngs: nnx.Rngs, name: str):
        self.eps = eps
        self.scale = param(rngs, (size,), ("norm",), jax.nn.initializers.ones, name)

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
    """Projections of grouped-query attention, with norms of each head's query and key, or with biases, or neither."""

    def __init__(self, c: PolicyConfig, rngs: nnx.Rngs, *, norms: bool = False, bias: bool = False):
        normal = jax.nn.initializers.normal(c.initializer_range)
        d, h, g, k = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
        of_query, of_key = ("heads", "head_dim"), ("kv_heads", "head_dim")
        self.query = param(rngs, (d, h, k), ("embed", *of_query), normal, "self_attn.q_proj.weight", 1)
        self.key = param(rngs, (d, g, k), ("embed", *of_key), normal, "self_attn.k_proj.weight", 1)
        self.value = param(rngs, (d, g, k), ("embed", *of_key), normal, "self_attn.v_proj.weight", 1)
        self.output = param(rngs, (h, k, d), (*of_query, "embed"), normal, "self_attn.o_proj.weight", 2)
        self.bias, self.norms = bias, norms
        if bias:
            zeros = jax.nn.initializers.zeros
            self.query_bias = param(rngs, (h, k), of_query, zeros, "self_attn.q_proj.bias", 0)
            self.key_bias = param(rngs, (g, k), of_key, zeros, "self_attn.k_proj.bias", 0)
            self.value_bias = param(rngs, (g, k), of_key, zeros, "self_attn.v_proj.bias", 0)
        if norms:
            self.query_norm = RMSNorm(k, c.rms_norm_eps, rngs, "self_attn.q_norm.weight")
            self.key_norm = RMSNorm(k, c.rms_norm_eps, rngs, "self_attn.k_norm.weight")

    def __call__(self, x: Array, rotary: tuple[Array, Array], attention_fn: Callable[..., Any]) -> tuple[Array, Any]:
        """``x`` [b, t, d] -> ([b, t, d], the carry of ``attention_fn``)."""
        specs = ("btd,dhk->bthk", "btd,dgk->btgk", "btd,dgk->btgk")
        biases = (self.query_bias[...], self.key_bias[...], self.value_bias[...]) if self.bias else ()
        q, k, v = linear(specs, x, (self.query[...], self.key[...], self.value[...]), biases)
        q = constrain(q, "rows", "tokens", "act_heads", "head_dim")
        if self.norms:
            q, k = self.query_norm(q), self.key_norm(k)
        mixed, carry = attention_fn(apply_rotary(q, rotary), apply_rotary(k, rotary), v)
        return linear(("bthk,hkd->btd",), mixed, (self.output[...],))[0], carry


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, c: PolicyConfig, rngs: nnx.Rngs):
        normal = jax.nn.initializers.normal(c.initializer_range)
        d, f = c.hidden_size, c.intermediate_size
        self.gate = param(rngs, (d, f), ("embed", "mlp"), normal, "mlp.gate_proj.weight", 1)
        self.up = param(rngs, (d, f), ("embed", "mlp"), normal, "mlp.up_proj.weight", 1)
        self.down = param(rngs, (f, d), ("mlp", "embed"), normal, "mlp.down_proj.weight", 1)

    def __call__(self, x: Float[Array, "b t d"], routing: Routing | None) -> tuple[Array, Array, None]:
        """``x`` -> (the same shape and dtype, the largest absolute values inside [b, s, f], no routing)."""
        del routing
        gate, up = linear(("btd,df->btf",) * 2, x, (self.gate[...], self.up[...]))
        product = jax.nn.silu(gate) * constrain(up, "rows", "tokens", "act_mlp")
        return linear(("btf,fd->btd",), product, (self.down[...],))[0], largest(product), None


class Block(nnx.Module):
    """One pre-norm transformer block."""

    def __init__(self, c: PolicyConfig, rngs: nnx.Rngs, attention: Attention, mlp: Any):
        self.attention, self.mlp = attention, mlp
        self.attention_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, rngs, "input_layernorm.weight")
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, rngs, "post_attention_layernorm.weight")

    def __call__(
        self, x: Array, rotary: tuple[Array, Array], attention_fn: Callable[..., Any], routing: Routing | None
    ) -> tuple[Array, Any, Activations]:
        """``x`` [b, t, d] -> ([b, t, d], the carry of ``attention_fn``, what is seen of the forward).

        ``routing`` is for an MLP with experts.
        """
        mixed, carry = self.attention(all_tokens(self.attention_norm(x)), rotary, attention_fn)
        x = x + split_tokens(mixed)
        fed, inside, router = self.mlp(all_tokens(self.mlp_norm(x)), routing)
        x = split_tokens(x + split_tokens(fed))
        return x, carry, Activations(inside, largest(x), router)
