"""Attention of trees of two levels by kernels that know segments only: a call for each level.

A tree has a root and its branches. In the first call each node sees itself. In the second one each branch sees its
root. The outputs are joined by their log-sum-exps. The backward pass of a call gets the joined output and log-sum-exp,
which determine the probabilities of all keys. The kernels' own gradients leave out the log-sum-exp.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Int

from rljax.policy.flash import LSE_NAME, OUT_NAME


class TwoLevels(NamedTuple):
    """The nodes of rows of trees of at most two levels. Neighbouring tokens of padding are a node and a tree, too."""

    nodes: Int[Array, "*b t"]  # the number of each token's node, from 1
    trees: Int[Array, "*b t"]  # the number of each token's tree, from 1; on padding it may be that of the last tree
    is_root: Bool[Array, "*b t"]  # whether the token is in the root of a tree
    is_branch: Bool[Array, "*b t"]  # whether the token is in a branch


def number_runs(x: Int[Array, "*b t"]) -> Int[Array, "*b t"]:
    """Returns the number, from 1, of the run of equal neighbours in which each entry is. Entries are not negative."""
    before = jnp.pad(x[..., :-1], [(0, 0)] * (x.ndim - 1) + [(1, 0)], constant_values=-1)
    return jnp.cumsum(x != before, axis=-1)


def two_levels(ends: Int[Array, "*b t"]) -> TwoLevels:
    """Finds the nodes of rows. Tokens of a node have equal ends. A tree's largest end is its first token's."""
    last = ends.ndim - 1
    nodes, trees = number_runs(ends), number_runs(jax.lax.cummax(ends, axis=last))
    starts = jnp.diff(trees, axis=-1, prepend=0) > 0
    is_root = (nodes == jax.lax.cummax(jnp.where(starts, nodes, 0), axis=last)) & (ends > 0)
    return TwoLevels(nodes, trees, is_root, (ends > 0) & ~is_root)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def join_levels(calls: Any, forward: Any, backward: Any, q: Array, k: Array, v: Array, ends: Array) -> Array:
    """Computes the attention of the queries to the keys of all levels.

    Queries, keys, values and outputs have the kernel's order of axes. Log-sum-exps have the axes of the output without
    the last one, and are very low where a query has no keys.

    Args:
      calls: A function of ``ends`` that returns the call of each level.
      forward: A function (q, k, v, call) -> (output, log-sum-exp).
      backward: A function (q, k, v, call, output, log-sum-exp, d output) -> (d q, d k, d v).
    """
    return _join_fwd(calls, forward, backward, q, k, v, ends)[0]


def _join_fwd(
    calls: Any, forward: Any, backward: Any, q: Array, k: Array, v: Array, ends: Array
) -> tuple[Array, tuple[Array, ...]]:
    outs, sums = zip(*(forward(q, k, v, call) for call in calls(ends)), strict=True)
    lse = functools.reduce(jnp.logaddexp, sums)
    parts = (out.astype(jnp.float32) * jnp.exp(one - lse)[..., None] for out, one in zip(outs, sums, strict=True))
    out = functools.reduce(jnp.add, parts).astype(q.dtype)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return out, (q, k, v, ends, out, lse)


def _join_bwd(
    calls: Any, forward: Any, backward: Any, saved: tuple[Array, ...], d_out: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, ends, out, lse = saved
    grads = [backward(q, k, v, call, out, lse, d_out) for call in calls(ends)]
    in_float32 = (sum(x.astype(jnp.float32) for x in each) for each in zip(*grads, strict=True))
    d_q, d_k, d_v = (each.astype(x.dtype) for each, x in zip(in_float32, (q, k, v), strict=True))
    return d_q, d_k, d_v, None


join_levels.defvjp(_join_fwd, _join_bwd)
