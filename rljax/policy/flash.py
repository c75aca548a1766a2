"""Flash attention of packed rows in plain JAX: only the scores of one pair of blocks are in memory at a time.

This is FlashAttention-2 (arXiv 2307.08691) as a scan over the pairs (query block i, key block j <= i) of a row. A pair
without a query that sees a key is skipped. Softmax is computed online. The backward pass recomputes the probabilities
from the saved log-sum-exp. Scores, softmax and sums are float32. Probabilities and their cotangents are rounded to the
dtype of the inputs before a product. The number of pairs is static, so that a compiled program shows its FLOPs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from rljax.sharding import axis_size, on_each_device

BLOCKS = (512, 256, 128)
"""Block sizes in tokens. The first size that gives a row at least ``FEWEST`` blocks is used, or else the last."""
FEWEST = 11  # n blocks have n (n + 1) / 2 pairs, which is 54.5% of the square for n = 11
OUT_NAME, LSE_NAME = "attention_out", "attention_lse"
"""Names (``jax.ad_checkpoint.checkpoint_name``) of the output and the log-sum-exp. A remat policy that saves both does
not recompute the forward pass."""
FLOAT16_SHIFT = 2.0**8
"""The factor by which gradients of scores are multiplied in float16. They are products with probabilities, which are
small in long segments. Without the factor they would lose digits below 6e-5."""
_MASKED = -1e30

Triple = tuple[Array, Array, Array]
Queries = Float[Array, "b t h k"]
KeyBlocks = Float[Array, "b t g k"]
"""The keys or the values. Query head i attends to key-value head i // (h / g)."""
Ends = Int[Array, "b t"]
"""The place after the last token that sees each token, as in ``rljax.policy.score.PrefixTrees``; 0 for padding."""


class Blocks(NamedTuple):
    """One row in n blocks of b tokens.

    Each of the g key-value heads has r query heads. A head has k features. The query at i sees the key at j <= i if
    i < ends[j].
    """

    q: Float[Array, "n g r*b k"]
    k: Float[Array, "n g b k"]
    v: Float[Array, "n g b k"]
    ends: Int[Array, "n b"]


def block_size(t: int) -> int:
    """Returns the block size in tokens for a row of ``t`` tokens."""
    return next((size for size in BLOCKS if -(-t // size) >= FEWEST), BLOCKS[-1])


def block_pairs(n: int) -> Int[np.ndarray, "pairs 2"]:
    """Returns the pairs (query block, key block) of a row of ``n`` blocks that are on or below the diagonal."""
    return np.stack(np.tril_indices(n), axis=1).astype(np.int32)


def seen_blocks(ends: Int[Array, "n b"]) -> Bool[Array, "n n"]:
    """Marks the pairs of a query block i and a key block j <= i where a query may see a key. Others mean nothing."""
    n, block = ends.shape
    return jnp.arange(n)[:, None] * block < jnp.max(ends, axis=1)[None, :]


def pad_rows(block: int, *arrays: Array) -> list[Array]:
    """Pads arrays [b, t, ...] with zeros, so that t is a multiple of ``block``."""
    missing = -arrays[0].shape[1] % block
    if not missing:
        return list(arrays)
    return [jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)]) for x in arrays]


def head_axes(k: Float[Array, "b t g k"]) -> tuple[str | None, ...]:
    """Returns the logical axes of queries, keys and values. Heads are split only if each device gets whole groups."""
    return ("rows", "tokens", "act_heads" if k.shape[2] % axis_size("act_heads") == 0 else None, "head_dim")


def block_attention(q: Queries, k: KeyBlocks, v: KeyBlocks, ends: Ends, *, block: int | None = None) -> Queries:
    """Computes attention of packed rows: an implementation of ``rljax.policy.attention.PackedAttention``.

    It needs memory for the inputs in float32 and for one pair of blocks of ``block`` tokens (None: ``block_size``),
    never for t * t scores. On the mesh of the context each device computes its own rows and heads.
    """
    t = q.shape[1]
    block = block or block_size(t)
    return _attention(*pad_rows(block, q, k, v, ends), block)[:, :t]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q: Array, k: Array, v: Array, ends: Array, block: int) -> Array:
    return _attention_fwd(q, k, v, ends, block)[0]


def _attention_fwd(q: Array, k: Array, v: Array, ends: Array, block: int) -> tuple[Array, tuple[Array, ...]]:
    """Computes the output [b, t, h, k], and saves it with the log-sum-exp, float32 [b, t, h, 1]."""
    heads = head_axes(k)

    def of_device(*rows: Array) -> tuple[Array, Array]:
        return lax.map(lambda row: _row_forward(row, block), rows)

    run = on_each_device(of_device, (heads, heads, heads, ("rows", "tokens")), (heads, heads), rows=q.shape[0])
    out, lse = run(q, k, v, ends)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return out, (q, k, v, ends, out, lse)


def _attention_bwd(block: int, saved: tuple[Array, ...], d_out: Array) -> tuple[Array, Array, Array, None]:
    heads = head_axes(saved[1])

    def of_device(*rows: Array) -> Triple:
        return lax.map(lambda row: _row_backward(row, block), rows)

    axes = (heads, heads, heads, ("rows", "tokens"), heads, heads, heads)
    run = on_each_device(of_device, axes, (heads, heads, heads), rows=d_out.shape[0])
    return *run(*saved, d_out), None


_attention.defvjp(_attention_fwd, _attention_bwd)


def _row_forward(arrays: tuple[Array, ...], block: int) -> tuple[Array, Array]:
    """Computes the output [t, h, k] and the log-sum-exp [t, h, 1] from (q, k, v, ends) of a row."""
    q, k, v, ends = arrays
    row = _in_blocks(q, k, v, ends, block)
    n, g, rb, d = row.q.shape
    seen = seen_blocks(row.ends)

    def add_pair(state: Triple, i: Array, j: Array) -> Triple:
        top, total, out = (_get(x, i) for x in state)
        scores, mask = _scores(row, i, j)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        p = jnp.where(mask, jnp.exp(scores - new_top[..., None]), 0.0)
        shrink = jnp.exp(top - new_top)
        total = total * shrink + jnp.sum(p, axis=-1)
        out = out * shrink[..., None] + _dot(p.astype(v.dtype), _get(row.v, j), 2, 1)
        return _put(state[0], new_top, i), _put(state[1], total, i), _put(state[2], out, i)

    zeros = jnp.zeros((n, g, rb), jnp.float32)
    start = (jnp.full_like(zeros, _MASKED), zeros, jnp.zeros((n, g, rb, d), jnp.float32))
    top, total, out = _over_pairs(add_pair, start, seen)
    total = jnp.where(total > 0, total, 1.0)  # padding: no key, output 0
    out = (out / total[..., None]).astype(q.dtype)
    return _in_tokens(out, q.shape[1]), _in_tokens((top + jnp.log(total))[..., None], q.shape[1])


def _row_backward(arrays: tuple[Array, ...], block: int) -> Triple:
    """Computes the gradients of q, k and v from (q, k, v, ends, output, log-sum-exp, d output) of a row."""
    q, k, v, ends, out, lse, d_out = arrays
    row = _in_blocks(q, k, v, ends, block)
    g, d = k.shape[1:]
    # The term of the softmax's normalisation, sum_j p_ij dp_ij, equals d_out . out.
    mean = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    lse_of, mean_of, d_out_of = (_heads_in_blocks(x, g, block) for x in (lse, mean, d_out))
    seen = seen_blocks(row.ends)
    shift = FLOAT16_SHIFT if q.dtype == jnp.float16 else 1.0

    def add_pair(grads: Triple, i: Array, j: Array) -> Triple:
        scores, mask = _scores(row, i, j)
        p = jnp.where(mask, jnp.exp(scores - _get(lse_of, i)), 0.0)
        dp = _dot(_get(d_out_of, i), _get(row.v, j), 2, 2)
        ds = (p * (dp - _get(mean_of, i)) * shift).astype(q.dtype)
        dq, dk, dv = grads
        dq = _put(dq, _get(dq, i) + _dot(ds, _get(row.k, j), 2, 1), i)
        dk = _put(dk, _get(dk, j) + _dot(ds, _get(row.q, i), 1, 1), j)
        dv = _put(dv, _get(dv, j) + _dot(p.astype(v.dtype), _get(d_out_of, i), 1, 1), j)
        return dq, dk, dv

    dq, dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in (row.q, row.k, row.v))
    dq, dk, dv = _over_pairs(add_pair, (dq, dk, dv), seen)
    scale = d**-0.5 / shift
    return (
        _in_tokens((dq * scale).astype(q.dtype), q.shape[1]),
        _in_tokens((dk * scale).astype(k.dtype), g),
        _in_tokens(dv.astype(v.dtype), g),
    )


def _over_pairs(add_pair: Any, start: Triple, seen: Bool[Array, "n n"]) -> Triple:
    """Folds ``add_pair(state, i, j)`` over the pairs that ``seen_blocks`` marks. The state is updated in place."""

    def body(state: Triple, pair: Array) -> tuple[Triple, None]:
        i, j = pair[0], pair[1]
        return lax.cond(seen[i, j], lambda state: add_pair(state, i, j), lambda state: state, state), None

    return lax.scan(body, start, jnp.asarray(block_pairs(seen.shape[0])))[0]


def _scores(row: Blocks, i: Array, j: Array) -> tuple[Float[Array, "g r*b b"], Bool[Array, "1 r*b b"]]:
    """Computes the scaled and masked scores of query block i and key block j, and the mask."""
    block, d = row.ends.shape[1], row.q.shape[-1]
    place = jnp.arange(block)
    mask = (i * block + place[:, None] < _get(row.ends, j)[None, :]) & (
        (i - j) * block + place[:, None] >= place[None, :]
    )
    mask = jnp.tile(mask, (row.q.shape[2] // block, 1))[None]
    scores = _dot(_get(row.q, i), _get(row.k, j), 2, 2) * d**-0.5
    return jnp.where(mask, scores, _MASKED), mask


def _dot(a: Array, b: Array, contract_a: int, contract_b: int) -> Array:
    """Contracts one axis of each array. Axis 0 (heads) is a batch axis, and sums are float32."""
    dims = (((contract_a,), (contract_b,)), ((0,), (0,)))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _get(x: Array, i: Array) -> Array:
    return lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def _put(x: Array, value: Array, i: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, value, i, 0)


def _in_blocks(q: Array, k: Array, v: Array, ends: Array, block: int) -> Blocks:
    q, k, v = (_heads_in_blocks(x, k.shape[1], block) for x in (q, k, v))
    return Blocks(q, k, v, ends.reshape(-1, block))


def _heads_in_blocks(x: Float[Array, "t h k"], groups: int, block: int) -> Float[Array, "n g r*b k"]:
    t, h, d = x.shape
    split = x.reshape(t // block, block, groups, h // groups, d)
    return split.transpose(0, 2, 3, 1, 4).reshape(t // block, groups, -1, d)


def _in_tokens(x: Float[Array, "n g r*b k"], heads: int) -> Float[Array, "t h k"]:
    n, groups, rows, d = x.shape
    ways = heads // groups
    return x.reshape(n, groups, ways, rows // ways, d).transpose(0, 3, 1, 2, 4).reshape(-1, heads, d)
