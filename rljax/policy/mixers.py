"""Mixers, through which a token of a block sees other tokens, and attention, which is one of them.

A mixer is a module ``(x, where, state) -> (y, state)``. ``where`` says which tokens see each other, so one mixer serves
packed rows and decoding. ``state_spec`` describes the state, so decoding needs to know no mixer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from rljax.policy.config import PolicyConfig
from rljax.policy.layers import BlockStats, RMSNorm, Routing, all_tokens, largest, linear, param, split_tokens
from rljax.policy.taps import tap
from rljax.sharding import constrain


class StateArray(NamedTuple):
    """The description of one array of the state that decoding keeps for a mixer.

    If "tokens" is the second axis, the array is a ring with an entry for each token. Otherwise it is the state after
    the last token.
    """

    shape: tuple[int, ...]  # the shape for a batch of rows, which are the first axis
    dtype: Any
    axes: tuple[str, ...]  # the logical axis of each dimension


class BlockState(NamedTuple):
    """The state of one block in decoding, among the states of the same block in all periods."""

    arrays: tuple[Array, ...]  # the arrays of ``Mixer.state_spec`` with a leading axis over the periods
    period: Array  # the index of the block's period

    def read(self) -> tuple[Array, ...]:
        """Returns the block's own arrays."""
        return tuple(jax.lax.dynamic_index_in_dim(x, self.period, 0, keepdims=False) for x in self.arrays)

    def write(self, new: Iterable[Array], at: Array | int = 0) -> BlockState:
        """Returns the state with ``new``, of equal dtypes, in the block's own arrays from index ``at`` of axis 1 on."""
        starts = (self.period, 0, at)
        arrays = (
            jax.lax.dynamic_update_slice(old, each[None], (*starts, *[0] * (old.ndim - 3)))
            for old, each in zip(self.arrays, new, strict=True)
        )
        return self._replace(arrays=tuple(arrays))


Mixed = tuple[Float[Array, "b t d"], BlockState | None]
"""The output of a mixer, and its state after the last token."""


class Where(NamedTuple):
    """The tokens of a forward: the position of each token, and which tokens see each other."""

    rotate: Callable[[Array], Array]  # the rotary embedding of queries or keys [b, t, h, k]
    # A function (q, k, v, state) -> (output, state): softmax attention of each token to itself and to the tokens before
    # it in its sequence. It writes keys and values into the state, if there is one.
    attend: Callable[[Array, Array, Array, BlockState | None], Mixed]
    positions: Int[Array, "b t"]  # the number of tokens that each token sees before it; 0 on padding
    valid: Bool[Array, "b t"]  # the tokens that are not padding
    parts: int = 1  # the number of devices that share a row (``context.fold``)


class Mixer(Protocol):
    """The contract of mixers. The state is None for packed rows, in which sequences start and end."""

    # The number of heads whose state passes from each token to the next one in its row; 0 if there is no such state.
    # Rows cannot be trees then. Devices that share a row each take some of these heads, for all its tokens.
    state_heads: int

    def state_spec(self, rows: int, places: int, dtype: Any, cache_dtype: Any) -> tuple[StateArray, ...]:
        """Describes the arrays that decoding keeps for ``rows`` rows of ``places`` tokens. They are zeros at first.

        ``dtype`` is the dtype of the computation, and ``cache_dtype`` the dtype of cached keys and values.
        """

    def __call__(self, x: Float[Array, "b t d"], where: Where, state: BlockState | None) -> Mixed:
        """Returns the mixer's output for ``x``, in the dtype of ``x``, and its state after the tokens."""


class Attention(nnx.Module):
    """Grouped-query attention, optionally with biases, with norms of each head's query and key, or with a gate.

    A gate is a sigmoid that multiplies the output of each head. Its weights follow the weights of the head's query.
    """

    state_heads = 0

    def __init__(
        self,
        c: PolicyConfig,
        rngs: nnx.Rngs,
        *,
        norms: bool = False,
        bias: bool = False,
        output_bias: bool = False,
        gated: bool = False,
        norm: Callable[..., RMSNorm] = RMSNorm,
    ):
        normal = jax.nn.initializers.normal(c.initializer_range)
        d, h, g, k = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
        of_query, of_key = ("heads", "head_dim"), ("kv_heads", "head_dim")
        self.query = param(rngs, (d, h, k * (1 + gated)), ("embed", *of_query), normal, "self_attn.q_proj.weight", 1)
        self.key = param(rngs, (d, g, k), ("embed", *of_key), normal, "self_attn.k_proj.weight", 1)
        self.value = param(rngs, (d, g, k), ("embed", *of_key), normal, "self_attn.v_proj.weight", 1)
        self.output = param(rngs, (h, k, d), (*of_query, "embed"), normal, "self_attn.o_proj.weight", 2)
        self.bias, self.biased_output, self.norms, self.gated = bias, output_bias, norms, gated
        if bias:
            zeros = jax.nn.initializers.zeros
            self.query_bias = param(rngs, (h, k), of_query, zeros, "self_attn.q_proj.bias", 0)
            self.key_bias = param(rngs, (g, k), of_key, zeros, "self_attn.k_proj.bias", 0)
            self.value_bias = param(rngs, (g, k), of_key, zeros, "self_attn.v_proj.bias", 0)
        if output_bias:
            self.output_bias = param(rngs, (d,), ("embed",), jax.nn.initializers.zeros, "self_attn.o_proj.bias")
        if norms:
            self.query_norm = norm(k, c.rms_norm_eps, rngs, "self_attn.q_norm.weight")
            self.key_norm = norm(k, c.rms_norm_eps, rngs, "self_attn.k_norm.weight")

    def state_spec(self, rows: int, places: int, dtype: Any, cache_dtype: Any) -> tuple[StateArray, ...]:
        """Describes the rings of keys and of values (``Mixer.state_spec``)."""
        del dtype
        shape = (rows, places, *self.key.shape[-2:])
        return (StateArray(shape, cache_dtype, ("rows", "tokens", "kv_heads", "head_dim")),) * 2

    def __call__(self, x: Float[Array, "b t d"], where: Where, state: BlockState | None) -> Mixed:
        """Computes attention of ``x`` (``Mixer.__call__``)."""
        specs = ("btd,dhk->bthk", "btd,dgk->btgk", "btd,dgk->btgk")
        biases = (self.query_bias[...], self.key_bias[...], self.value_bias[...]) if self.bias else ()
        q, k, v = linear(specs, x, (self.query[...], self.key[...], self.value[...]), biases)
        q, k, v = tap("query", q), tap("key", k), tap("value", v)
        q = constrain(q, "rows", "tokens", "act_heads", "head_dim")
        q, *gates = jnp.split(q, 2, axis=-1) if self.gated else (q,)
        if self.norms:
            q, k = tap("query_norm", self.query_norm(q)), tap("key_norm", self.key_norm(k))
        q, k = tap("query_rope", where.rotate(q)), tap("key_rope", where.rotate(k))
        mixed, state = where.attend(q, k, v, state)
        mixed = tap("attention", mixed)
        for gate in gates:
            gate = jax.nn.sigmoid(gate.astype(jnp.float32)).astype(mixed.dtype)
            mixed = tap("gated_attention", mixed * gate)
        bias = (self.output_bias[...],) if self.biased_output else ()
        return tap("attention_output", linear(("bthk,hkd->btd",), mixed, (self.output[...],), bias)[0]), state


class Block(nnx.Module):
    """One pre-norm transformer block. Whatever its mixer is, its parameters have the path ``attention``."""

    def __init__(self, c: PolicyConfig, rngs: nnx.Rngs, mixer: Mixer, mlp: Any, norm: Callable[..., RMSNorm] = RMSNorm):
        self.attention, self.mlp = mixer, mlp
        self.attention_norm = norm(c.hidden_size, c.rms_norm_eps, rngs, "input_layernorm.weight")
        self.mlp_norm = norm(c.hidden_size, c.rms_norm_eps, rngs, "post_attention_layernorm.weight")

    def __call__(
        self, x: Array, where: Where, state: BlockState | None, routing: Routing | None
    ) -> tuple[Array, BlockState | None, BlockStats]:
        """Returns the output for ``x`` [b, t, d], the state of the mixer, and measurements of the forward."""
        normed = tap("attention_norm", all_tokens(self.attention_norm(x)))
        mixed, state = self.attention(normed, where, state)
        x = tap("attention_residual", x + split_tokens(mixed))
        fed, inside, router = self.mlp(tap("mlp_norm", all_tokens(self.mlp_norm(x))), routing)
        x = tap("residual", split_tokens(x + split_tokens(tap("mlp", fed))))
        return x, state, BlockStats(inside, largest(x), router)
