"""The gated delta net, a mixer with a state of fixed size: the linear attention of Qwen3.5.

The rule is from *Gated Delta Networks* (arXiv 2412.06464), and so is its form in chunks. Operations and roundings are
those of transformers 5.24 (``models/qwen3_5/modeling_qwen3_5.py``). Each value head has a state S [k, v], float32. A
token with query q, key k, value v, logarithm g of the decay and rate beta computes:

    S <- exp(g) S;    S <- S + k (beta (v - k' S))';    y = q' S

All of them come from the token's hidden state x. The product with ``qkv`` passes through a short convolution and SiLU,
and gives q, k and v. Then q and k get the lengths 1 / sqrt(k) and 1. With ``rate``, ``step``, A_log and dt_bias:

    beta = sigmoid(rate' x);    g = -exp(A_log) softplus(step' x + dt_bias)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from rljax.policy.config import PolicyConfig
from rljax.policy.context import exchange_back, gather_tokens, whole_tokens
from rljax.policy.layers import RMSNorm, linear, param
from rljax.policy.mixers import BlockState, Mixed, StateArray, Where
from rljax.policy.taps import is_recording, tap
from rljax.sharding import axis_size, constrain, on_each_device

CHUNK = 64
"""The number of tokens in a chunk."""
NOT_DECAYED = ("log_decay_scale", "step_bias")
"""The parameters without weight decay, as in the library fla. Decay would pull A to 1: such a head forgets at once."""
_SLOWEST, _FASTEST = 1e-4, 1e-2  # the range of a new head's A: it remembers hundreds of tokens or more
_EXACT = jax.lax.Precision.HIGHEST
DeltaState = Float[Array, "b h k v"]


class DeltaTokens(NamedTuple):
    """The inputs of the delta rule for the tokens of rows, float32."""

    q: Float[Array, "b t h k"]
    k: Float[Array, "b t h k"]
    v: Float[Array, "b t h v"]
    log_decay: Float[Array, "b t h"]  # g, at most 0
    rate: Float[Array, "b t h"]  # beta, from 0 to 1
    starts: Bool[Array, "b t"]  # whether the token is the first of its sequence, which forgets the state


def recurrent(tokens: DeltaTokens, state: DeltaState) -> tuple[Float[Array, "b t h v"], DeltaState]:
    """Computes the delta rule token by token. Returns the outputs and the state after the last token, float32."""

    def step(state: Array, token: DeltaTokens) -> tuple[Array, Array]:
        kept = jnp.where(token.starts[:, None], 0.0, jnp.exp(token.log_decay))
        state = state * kept[..., None, None]
        error = token.v - jnp.einsum("bhkv,bhk->bhv", state, token.k, precision=_EXACT)
        state = state + token.k[..., None] * (token.rate[..., None] * error)[:, :, None, :]
        return state, jnp.einsum("bhkv,bhk->bhv", state, token.q, precision=_EXACT)

    state, y = jax.lax.scan(step, state, DeltaTokens(*(jnp.moveaxis(x, 1, 0) for x in tokens)))
    return jnp.moveaxis(y, 0, 1), state


def chunked(tokens: DeltaTokens, state: DeltaState, chunk: int = CHUNK) -> tuple[Float[Array, "b t h v"], DeltaState]:
    """Computes what ``recurrent`` computes, with a triangular inverse and a few products for each chunk of tokens.

    D[i, j] is the decay from token j to token i, and 0 if j is later or in another sequence. d is the decay from the
    state before the chunk to each token. e is the decay from each token to the last one of the chunk:

        (I + strictly_lower(beta K K' * D)) [U | W] = beta [V | d K]
        N = U - W S;    Y = (d Q) S + (Q K' * D) N;    S <- d_last S + (e K)' N
    """
    b, t = tokens.starts.shape
    n = -(-t // chunk)

    def split(x: Array) -> Array:  # [b, t, ...] to [b, n, chunk, ...]
        return jnp.pad(x, ((0, 0), (0, n * chunk - t), *[(0, 0)] * (x.ndim - 2))).reshape(b, n, chunk, *x.shape[2:])

    *of_heads, starts = (split(x) for x in tokens)
    q, k, v, log_decay, rate = (jnp.moveaxis(x, 3, 2) for x in of_heads)  # [b, n, h, chunk, ...]
    # The number of starts so far. Tokens with equal numbers share a sequence; 0 is the sequence of the state.
    sequence = jnp.cumsum(starts, axis=-1)[:, :, None]
    total = jnp.cumsum(log_decay, axis=-1)
    earlier = jnp.tril(jnp.ones((1, 1, 1, chunk, chunk), bool))
    together = (sequence[..., :, None] == sequence[..., None, :]) & earlier
    # Pairs of other sequences do not enter exp, which could overflow, and whose gradient would be NaN.
    between = jnp.where(together, total[..., :, None] - total[..., None, :], 0.0)
    decays = jnp.where(together, jnp.exp(between), 0.0)
    from_state = jnp.where(sequence == 0, jnp.exp(total), 0.0)[..., None]
    of_keys = jnp.einsum("bnhik,bnhjk->bnhij", k, k, precision=_EXACT) * decays * rate[..., None]
    right = jnp.concatenate([v, from_state * k], axis=-1) * rate[..., None]
    solved = jnp.einsum("bnhij,bnhjk->bnhik", unit_lower_inverse(of_keys), right, precision=_EXACT)
    of_values, of_state = jnp.split(solved, [v.shape[-1]], axis=-1)
    of_queries = jnp.einsum("bnhik,bnhjk->bnhij", q, k, precision=_EXACT) * decays

    def step(state: Array, one: tuple[Array, ...]) -> tuple[Array, Array]:
        of_values, of_state, of_queries, reading, writing, kept = one
        new = of_values - jnp.einsum("bhck,bhkv->bhcv", of_state, state, precision=_EXACT)
        y = jnp.einsum("bhck,bhkv->bhcv", reading, state, precision=_EXACT)
        y = y + jnp.einsum("bhij,bhjv->bhiv", of_queries, new, precision=_EXACT)
        return state * kept[..., None] + jnp.einsum("bhck,bhcv->bhkv", writing, new, precision=_EXACT), y

    writing = decays[..., -1, :, None] * k
    chunks = (of_values, of_state, of_queries, from_state * q, writing, from_state[..., -1, :])
    state, y = jax.lax.scan(step, state, tuple(jnp.moveaxis(x, 1, 0) for x in chunks))
    y = jnp.moveaxis(y, (0, 3), (1, 2))  # [n, b, h, chunk, v] to [b, n, chunk, h, v]
    return y.reshape(b, n * chunk, *y.shape[3:])[:, :t], state


def unit_lower_inverse(below: Float[Array, "*b c c"]) -> Float[Array, "*b c c"]:
    """Returns the inverse of I plus the part of ``below`` under its diagonal. The size c is a power of two.

    The inverses of two blocks on the diagonal give the inverse of the block of both. XLA's triangular solve would wait
    for ever on a CPU with few cores: two solves at once occupy all threads, and wait for further ones.
    """
    *batch, size, _ = below.shape
    inverse = jnp.ones((*batch, size, 1, 1), below.dtype)
    while (width := inverse.shape[-1]) < size:
        pairs = below.reshape(*batch, size // (2 * width), 2 * width, size // (2 * width), 2 * width)
        blocks = jnp.moveaxis(jnp.diagonal(pairs, axis1=-4, axis2=-2), -1, -3)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = jnp.matmul(second, jnp.matmul(blocks[..., width:, :width], first, precision=_EXACT), precision=_EXACT)
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([above, jnp.concatenate([-corner, second], axis=-1)], axis=-2)
    return inverse[..., 0, :, :]


def causal_convolution(
    x: Float[Array, "b t+w-1 f"], kernel: Float[Array, "f w"], positions: Int[Array, "b t"]
) -> Float[Array, "b t f"]:
    """Computes a depthwise convolution that sees only a token's own sequence, in float32.

    Args:
      x: The inputs of the tokens, after the inputs of the w - 1 tokens before them.
      kernel: The weights of a token's last w inputs. The last weight belongs to the token itself.
      positions: The number of tokens before each token in its sequence.
    """
    width, t = kernel.shape[1], positions.shape[1]
    wide, kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)[None, None]
    taps = (
        jnp.where((positions >= back)[..., None], wide[:, width - 1 - back :][:, :t], 0.0) * kernel[..., -1 - back]
        for back in range(width)
    )
    return sum(taps, jnp.zeros((), jnp.float32))


def _new_decay(key: Array, shape: Any, dtype: Any = jnp.float32, out_sharding: Any = None) -> Array:
    """Returns the logarithms of the A of new heads, uniform in the range of slow heads."""
    del out_sharding
    return jax.random.uniform(key, shape, dtype, math.log(_SLOWEST), math.log(_FASTEST))


class DeltaNet(nnx.Module):
    """A gated delta net behind a short convolution. Every key head serves consecutive value heads.

    If the mesh axis ``tp`` divides the number of key heads, its devices split them, each with its value heads. Devices
    that share rows exchange tokens for heads (``rljax.policy.context``), and compute whole rows.
    """

    def __init__(self, c: PolicyConfig, rngs: nnx.Rngs):
        normal = jax.nn.initializers.normal(c.initializer_range)
        d, heads, width = c.hidden_size, c.delta_value_heads, c.conv_width
        self.heads, self.key_heads = (heads, c.delta_value_dim), (c.delta_key_heads, c.delta_key_dim)
        self.state_heads = c.delta_key_heads
        keys, values = math.prod(self.key_heads), math.prod(self.heads)
        mixed, out = 2 * keys + values, ("embed", "heads")
        taps = jax.nn.initializers.normal(width**-0.5)
        # The vectors have the endings of names whose gradients are added up once for all blocks (``hidden_states``).
        self.qkv = param(rngs, (d, mixed), out, normal, "linear_attn.in_proj_qkv.weight", 1)
        self.gate = param(rngs, (d, values), out, normal, "linear_attn.in_proj_z.weight", 1)
        self.rate = param(rngs, (d, heads), out, normal, "linear_attn.in_proj_b.weight", 1)
        self.step = param(rngs, (d, heads), out, normal, "linear_attn.in_proj_a.weight", 1)
        self.kernel = param(rngs, (mixed, 1, width), ("head_dim",) * 3, taps, "linear_attn.conv1d.weight")
        self.log_decay_scale = param(rngs, (heads,), ("head_dim",), _new_decay, "linear_attn.A_log", wide=True)
        self.step_bias = param(rngs, (heads,), ("head_dim",), jax.nn.initializers.ones, "linear_attn.dt_bias")
        self.norm = RMSNorm(c.delta_value_dim, c.rms_norm_eps, rngs, "linear_attn.norm.weight", wide=True)
        self.output = param(rngs, (values, d), ("heads", "embed"), normal, "linear_attn.out_proj.weight", 1)

    def state_spec(self, rows: int, places: int, dtype: Any, cache_dtype: Any) -> tuple[StateArray, ...]:
        """Describes the state of the rule and the last inputs of the convolution (``Mixer.state_spec``)."""
        del places, cache_dtype
        shape = (rows, self.heads[0], self.key_heads[1], self.heads[1])
        mixed, _, width = self.kernel.shape
        return (
            StateArray(shape, jnp.float32, ("rows", "heads", "head_dim", "head_dim")),
            StateArray((rows, width - 1, mixed), dtype, ("rows", "head_dim", "heads")),
        )

    def __call__(self, x: Float[Array, "b t d"], where: Where, state: BlockState | None) -> Mixed:
        """Computes the delta net of ``x`` (``Mixer.__call__``)."""
        b, t, _ = x.shape
        split = axis_size("heads") if self.state_heads % axis_size("heads") == 0 else 1
        ways = split * where.parts
        x = jnp.where(where.valid[..., None], x, 0)
        weights = (self._by_device(self.qkv[...], 1, ways), self.gate[...], self.rate[...], self.step[...])
        qkv, gate, rate, step = linear(("btd,df->btf",) * 4, x, weights)
        qkv = self._tapped("delta_qkv", constrain(qkv, "rows", "tokens", "act_heads" if split > 1 else None), ways)
        gate, rate, step = tap("delta_gate", gate), tap("delta_rate", rate), tap("delta_step", step)
        kernel = self._by_device(self.kernel[...][:, 0].astype(jnp.float32), 0, ways)
        tokens = (qkv, *self._decays(rate, step), where.positions, kernel)
        if where.parts > 1:
            y = self._of_shared_rows(*tokens, where.parts)
        else:
            y, after = self._of_heads(*tokens, None if state is None else state.read(), split)
            state = None if state is None else state.write(after)
        y = self.norm(y)
        gate = jax.nn.silu(gate.astype(jnp.float32)).reshape(y.shape)
        y = tap("gated_norm", (y.astype(jnp.float32) * gate).astype(x.dtype)).reshape(b, t, -1)
        return tap("attention_output", linear(("btf,fd->btd",), y, (self.output[...],))[0]), state

    def _by_device(self, x: Array, axis: int, ways: int) -> Array:
        """Reorders the channels on an axis: queries, keys and values of the heads of each of ``ways`` devices.

        In a file, the channels are the queries of all heads, then their keys, then their values. Each array keeps the
        order of the heads.
        """
        if ways == 1:
            return x
        ends = [math.prod(self.key_heads), 2 * math.prod(self.key_heads)]
        whole, by_heads = ([name if i == axis else ... for i in range(x.ndim)] for name in (None, "heads"))
        parts = jnp.split(constrain(x, *whole), ends, axis)
        parts = [each.reshape(*x.shape[:axis], ways, -1, *x.shape[axis + 1 :]) for each in parts]
        return constrain(jnp.concatenate(parts, axis + 1).reshape(x.shape), *by_heads)

    def _apart(self, x: Float[Array, "b t f"], ways: int) -> list[Array]:
        """Splits channels in the order of ``_by_device`` into queries, keys and values [b, t, ways, n]."""
        of_devices = x.reshape(*x.shape[:2], ways, -1)
        keys = of_devices.shape[-1] * math.prod(self.key_heads) // self.kernel.shape[0]
        return jnp.split(of_devices, [keys, 2 * keys], axis=-1)

    def _tapped(self, name: str, x: Float[Array, "b t f"], ways: int) -> Float[Array, "b t f"]:
        """Records channels in the order of ``_by_device`` as ``tap`` does, but in the order of a file."""
        if ways == 1 or not is_recording():
            return tap(name, x)
        in_order = jnp.concatenate([each.reshape(*x.shape[:2], -1) for each in self._apart(x, ways)], axis=2)
        return self._by_device(tap(name, in_order), 2, ways)

    def _decays(self, rate: Float[Array, "b t h"], step: Float[Array, "b t h"]) -> tuple[Array, Array]:
        """Returns ``DeltaTokens.log_decay`` and ``DeltaTokens.rate`` of tokens with these products."""
        # A vector is [h], or [b, h] with one for each row.
        vectors = (x[...].astype(jnp.float32) for x in (self.log_decay_scale, self.step_bias))
        log_scale, bias = (jnp.expand_dims(x, range(x.ndim - 1, 2)) for x in vectors)
        log_decay = -jnp.exp(log_scale) * jax.nn.softplus(step.astype(jnp.float32) + bias)
        return log_decay, jax.nn.sigmoid(rate.astype(jnp.float32)).astype(rate.dtype).astype(jnp.float32)

    def _of_heads(
        self,
        qkv: Float[Array, "b t f"],
        log_decay: Float[Array, "b t h"],
        rate: Float[Array, "b t h"],
        positions: Int[Array, "b t"],
        kernel: Float[Array, "f w"],
        before: tuple[Array, ...] | None,
        ways: int = 1,
    ) -> tuple[Float[Array, "b t h v"], tuple[Array, ...]]:
        """Computes the convolution and the rule of h heads: the output, and the state after the tokens.

        The channels are in the order of ``_by_device`` for ``ways`` devices. ``before`` is the state before the tokens,
        or None for zeros.
        """
        b, t, channels = qkv.shape
        (key_heads, key_dim), (value_heads, value_dim) = self.key_heads, self.heads
        if before is None:
            tail = jnp.zeros((b, kernel.shape[1] - 1, channels), qkv.dtype)
            before = jnp.zeros((b, rate.shape[2], key_dim, value_dim)), tail
        joined = jnp.concatenate([before[1], qkv], axis=1)
        seen = causal_convolution(joined, kernel, positions).astype(qkv.dtype)
        seen = self._tapped("convolution", jax.nn.silu(seen.astype(jnp.float32)).astype(qkv.dtype), ways)
        widths = (key_dim, key_dim, value_dim)
        apart = zip(self._apart(seen.astype(jnp.float32), ways), widths, strict=True)
        q, k, v = (x.reshape(b, t, -1, width) for x, width in apart)
        q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
        q, k = (jnp.repeat(x, value_heads // key_heads, axis=2) for x in (q, k))
        tokens = DeltaTokens(q * key_dim**-0.5, k, v, log_decay, rate, positions == 0)
        y, after = recurrent(tokens, before[0]) if t == 1 else chunked(tokens, before[0])
        return tap("delta_rule", y.astype(qkv.dtype)), (after, joined[:, t:])

    def _of_shared_rows(
        self, qkv: Array, log_decay: Array, rate: Array, positions: Array, kernel: Array, parts: int
    ) -> Float[Array, "b t h v"]:
        """Computes ``_of_heads`` of folded rows: each of the ``parts`` devices of a row computes whole rows."""

        def of_device(qkv: Array, log_decay: Array, rate: Array, positions: Array, kernel: Array) -> tuple[Array]:
            (whole,), (decays, rates) = whole_tokens([qkv], parts), whole_tokens([log_decay, rate], parts)
            y, _ = self._of_heads(whole, decays, rates, gather_tokens(positions), kernel, None)
            return (exchange_back(y, parts, rate.shape[2]),)

        heads = ("rows", "tokens", "act_heads")
        axes = (heads, heads, heads, ("rows", "tokens"), ("exchanged_heads", None))
        run = on_each_device(of_device, axes, ((*heads, None),), rows=qkv.shape[0])
        return run(qkv, log_decay, rate, positions, kernel)[0]
