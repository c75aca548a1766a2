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
from rljax.policy.layers import RMSNorm, linear, param
from rljax.policy.mixers import BlockState, Mixed, StateArray, Where
from rljax.policy.taps import tap
from rljax.sharding import constrain

CHUNK = 64
"""The number of tokens in a chunk."""
NOT_DECAYED = ("log_decay_scale", "step_bias")
"""The parameters without weight decay, as in fla. Decay would pull every A to 1, and such a head forgets at once."""
_SLOWEST, _FASTEST = 1e-4, 1e-2  # the range of a new head's A: it remembers hundreds of tokens or more
_EXACT = jax.lax.Precision.HIGHEST
DeltaState = Float[Array, "b h k v"]


class DeltaTokens(NamedTuple):
    """The tokens of rows for the delta rule, float32."""

    q: Float[Array, "b t h k"]
    k: Float[Array, "b t h k"]
    v: Float[Array, "b t h v"]
    log_decay: Float[Array, "b t h"]  # g, at most 0
    rate: Float[Array, "b t h"]  # beta, from 0 to 1
    starts: Bool[Array, "b t"]  # whether the token is the first of its sequence, which forgets the state


def recurrent(tokens: DeltaTokens, state: DeltaState) -> tuple[Float[Array, "b t h v"], DeltaState]:
    """Computes the rule token by token. Returns the outputs and the state after the last token, float32."""

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

    D[i, j] is the decay from token j to token i of a sequence, and 0 if j is later or in another one. d is the decay
    from the state before the chunk to each token, and e from each token to the last one:

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
    """Inverts I plus the part of a matrix below its diagonal. Its size is a power of two.

    The inverses of two blocks on the diagonal give the inverse of the block of both. XLA's triangular solve would wait
    for ever on a CPU with few cores: two of them at once occupy all threads, and wait for further ones.
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

    Its channels are not split over devices: each device of ``tp`` computes the whole mixer for its rows.
    """

    needs_whole_rows = True
    operations = (
        *("delta_qkv", "delta_gate", "delta_rate", "delta_step"),
        *("convolution", "delta_rule", "gated_norm", "attention_output"),
    )

    def __init__(self, c: PolicyConfig, rngs: nnx.Rngs):
        normal = jax.nn.initializers.normal(c.initializer_range)
        d, heads, width = c.hidden_size, c.delta_value_heads, c.conv_width
        self.heads, self.key_heads = (heads, c.delta_value_dim), (c.delta_key_heads, c.delta_key_dim)
        keys, values = math.prod(self.key_heads), math.prod(self.heads)
        mixed, out = 2 * keys + values, ("embed", "delta")
        taps = jax.nn.initializers.normal(width**-0.5)
        # The vectors have the endings of names whose gradients are added up once for all blocks (``hidden_states``).
        self.qkv = param(rngs, (d, mixed), out, normal, "linear_attn.in_proj_qkv.weight", 1)
        self.gate = param(rngs, (d, values), out, normal, "linear_attn.in_proj_z.weight", 1)
        self.rate = param(rngs, (d, heads), out, normal, "linear_attn.in_proj_b.weight", 1)
        self.step = param(rngs, (d, heads), out, normal, "linear_attn.in_proj_a.weight", 1)
        self.kernel = param(rngs, (mixed, 1, width), ("delta",) * 3, taps, "linear_attn.conv1d.weight")
        self.log_decay_scale = param(rngs, (heads,), ("delta",), _new_decay, "linear_attn.A_log", wide=True)
        self.step_bias = param(rngs, (heads,), ("delta",), jax.nn.initializers.ones, "linear_attn.dt_bias")
        self.norm = RMSNorm(c.delta_value_dim, c.rms_norm_eps, rngs, "linear_attn.norm.weight", wide=True)
        self.output = param(rngs, (values, d), ("delta", "embed"), normal, "linear_attn.out_proj.weight", 1)

    def state_spec(self, rows: int, places: int, dtype: Any, cache_dtype: Any) -> tuple[StateArray, ...]:
        """Returns the state of the rule, and the last inputs of the convolution (``Mixer.state_spec``)."""
        del places, cache_dtype
        shape = (rows, self.heads[0], self.key_heads[1], self.heads[1])
        mixed, _, width = self.kernel.shape
        return (
            StateArray(shape, jnp.float32, ("rows", "delta", "delta", "delta")),
            StateArray((rows, width - 1, mixed), dtype, ("rows", "delta", "delta")),
        )

    def __call__(self, x: Float[Array, "b t d"], where: Where, state: BlockState | None) -> Mixed:
        """Computes the delta net of ``x`` (``Mixer.__call__``)."""
        b, t, _ = x.shape
        arrays = self.state_spec(b, 0, x.dtype, None)
        before = tuple(jnp.zeros(a.shape, a.dtype) for a in arrays) if state is None else state.read()
        x = jnp.where(where.valid[..., None], x, 0)
        weights = (self.qkv[...], self.gate[...], self.rate[...], self.step[...])
        qkv, gate, rate, step = linear(("btd,df->btf",) * 4, x, weights)
        qkv, gate = tap("delta_qkv", constrain(qkv, "rows", "tokens", "delta")), tap("delta_gate", gate)
        rate, step = tap("delta_rate", rate), tap("delta_step", step)
        qkv = jnp.concatenate([before[1], qkv], axis=1)
        seen = causal_convolution(qkv, self.kernel[...][:, 0], where.positions).astype(x.dtype)
        seen = tap("convolution", jax.nn.silu(seen.astype(jnp.float32)).astype(x.dtype))
        tokens = self._tokens(seen.astype(jnp.float32), rate, step, where.positions == 0)
        y, after = recurrent(tokens, before[0]) if t == 1 else chunked(tokens, before[0])
        y = self.norm(tap("delta_rule", y.astype(x.dtype)))
        gate = jax.nn.silu(gate.astype(jnp.float32)).reshape(y.shape)
        y = tap("gated_norm", (y.astype(jnp.float32) * gate).astype(x.dtype)).reshape(b, t, -1)
        out = tap("attention_output", linear(("btf,fd->btd",), y, (self.output[...],))[0])
        return out, None if state is None else state.write((after, qkv[:, t:]))

    def _tokens(self, seen: Array, rate: Array, step: Array, starts: Array) -> DeltaTokens:
        """Returns the tokens of the rule from the convolution's output [b, t, f], and from rate and step [b, t, h]."""
        keys = math.prod(self.key_heads)
        q, k, v = jnp.split(seen, [keys, 2 * keys], axis=-1)
        of_heads = ((q, self.key_heads), (k, self.key_heads), (v, self.heads))
        q, k, v = (x.reshape(*x.shape[:2], *heads) for x, heads in of_heads)
        repeats = self.heads[0] // self.key_heads[0]
        q, k = (
            jnp.repeat(x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6), repeats, axis=2)
            for x in (q, k)
        )
        # A vector is [h], or [b, h] with one for each row.
        vectors = (x[...].astype(jnp.float32) for x in (self.log_decay_scale, self.step_bias))
        log_scale, bias = (jnp.expand_dims(x, range(x.ndim - 1, 2)) for x in vectors)
        log_decay = -jnp.exp(log_scale) * jax.nn.softplus(step.astype(jnp.float32) + bias)
        rate = jax.nn.sigmoid(rate.astype(jnp.float32)).astype(rate.dtype).astype(jnp.float32)
        return DeltaTokens(q * self.key_heads[1] ** -0.5, k, v, log_decay, rate, starts)
