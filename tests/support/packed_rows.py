"""Packed rows of random heads, and a reference in numpy (float64) for their attention and its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from rljax.policy import attention_errors
from rljax.policy.attention import path_mask
from rljax.policy.flash import block_attention
from rljax.policy.score import segment_ends
from rljax.policy.splash import splash_attention

SMALL_BLOCKS = functools.partial(block_attention, block=16)
INTERPRETED = functools.partial(splash_attention, block=128, interpret=True)  # a TPU's kernel, operation by operation


def row(t, lengths):
    """Returns segment ids [t] of sequences of these lengths from the left; the rest is padding."""
    ids = np.zeros(t, np.int32)
    ids[: sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return ids


def heads(segments, dtype="float32", num_heads=4, kv_heads=2, head_dim=8, seed=0):
    """Returns normal (q, k, v, cotangent of the output); the cotangent is 0 on padding, as it is in a loss."""
    rng = np.random.default_rng(seed)
    b, t = segments.shape
    arrays = [rng.normal(size=(b, t, n, head_dim)) for n in (num_heads, kv_heads, kv_heads, num_heads)]
    arrays[3] *= (segments > 0)[:, :, None, None]
    return [np.asarray(x, jnp.dtype(dtype)) for x in arrays]


@functools.cache
def compiled(attention):
    return jax.jit(attention_errors.gradients(attention))


def gradients(attention, arrays, segments):
    """Returns (output, dq, dk, dv) of an implementation, compiled; the output is set to 0 on padding."""
    return tree_gradients(attention, arrays, segment_ends(segments))


def tree_gradients(attention, arrays, ends):
    return [np.asarray(x) for x in compiled(attention)(*arrays, ends)]


def check_trees(attention, ends, **kind):
    arrays = heads(ends, **kind)
    expected = masked_reference(*arrays, np.asarray(path_mask(ends)) & (ends > 0)[:, :, None])
    for x, wanted in zip(tree_gradients(attention, arrays, ends), expected, strict=True):
        np.testing.assert_allclose(x, wanted, atol=1e-5, rtol=0)


def ends_of(t, trees):
    """Returns the ends [t] of trees from the left, each (tokens of the root, its subtrees); the rest is padding."""
    ends = np.zeros(t, np.int32)

    def add(start, tree):
        tokens, branches = tree
        end = start + tokens
        for branch in branches:
            end = add(end, branch)
        ends[start : start + tokens] = end
        return end

    place = 0
    for tree in trees:
        place = add(place, tree)
    return ends


def reference(q, k, v, d_out, segments):
    """Returns (output, dq, dk, dv), computed in float64."""
    mask = (segments[:, :, None] == segments[:, None, :]) & np.tri(q.shape[1], dtype=bool)
    return masked_reference(q, k, v, d_out, mask & (segments > 0)[:, :, None])


def masked_reference(q, k, v, d_out, mask):
    """Returns (output, dq, dk, dv) of queries that see the keys of ``mask`` [b, t, s], computed in float64."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    ways, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    keys, values = (np.repeat(x, ways, axis=2) for x in (k, v))
    scores = np.where(mask[:, None], np.einsum("bthk,bshk->bhts", q, keys) * scale, -np.inf)
    weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True, initial=-1e300))
    p = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
    dp = np.einsum("bthk,bshk->bhts", d_out, values)
    ds = p * (dp - np.sum(p * dp, axis=-1, keepdims=True)) * scale
    dk, dv = np.einsum("bhts,bthk->bshk", ds, q), np.einsum("bhts,bthk->bshk", p, d_out)
    dk, dv = (x.reshape(*k.shape[:3], ways, -1).sum(axis=3) for x in (dk, dv))
    return np.einsum("bhts,bshk->bthk", p, values), np.einsum("bhts,bshk->bthk", ds, keys), dk, dv


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)
