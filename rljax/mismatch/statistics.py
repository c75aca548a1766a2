"""One kind of statistic for everything that is measured: named numbers of some tokens that merge in any order.

A measurement is a function from tokens to ``Statistics`` and a function from ``Statistics`` to metrics. Micro-batches,
packed rows, shards and processes each give their own; merged, they say what one call on all tokens would have said, up
to rounding. Sums are plain float32 on the device, where XLA reduces pairwise, but for those whose terms cancel;
docs/mismatch.md has the errors on 2 million tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rljax.mismatch.accurate import Total, add_totals, value_of
from rljax.mismatch.arrays import count, namespace_of


class Moments(NamedTuple):
    """Count, means and centred second moments of k quantities."""

    count: Any  # shape=(), int
    mean: Any  # shape=(k,), float
    spread: Any  # shape=(k, k), float: sum of (x_i - mean_i)(x_j - mean_j)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Statistics:
    """Named numbers of some tokens; a pytree. Each may be an array, such as a histogram or one number a bucket.

    Attributes:
      sums: counts (int32 on the device, else int64) and sums (float32 or float64); they are added.
      maxima: the larger one is kept; -inf or the smallest possible value without tokens.
      minima: the smaller one is kept; inf without tokens.
      totals: sums carried as two floats: of terms that cancel, and of what the gradient is divided by.
      moments: merged by Chan's rule.
    """

    sums: dict[str, Any]
    maxima: dict[str, Any] = field(default_factory=dict)
    minima: dict[str, Any] = field(default_factory=dict)
    totals: dict[str, Total] = field(default_factory=dict)
    moments: dict[str, Moments] = field(default_factory=dict)

    @property
    def xp(self) -> ModuleType:
        """Numpy or jax.numpy."""
        return namespace_of(*jax.tree.leaves(self))

    def __getitem__(self, name: str) -> Any:
        """The number, or the moments, of this name; on the host in float64 or int64, in which metrics are finished."""
        kinds: tuple[dict[str, Any], ...] = (self.sums, self.maxima, self.minima, self.totals, self.moments)
        found = jax.tree.map(_wide, next(kind[name] for kind in kinds if name in kind))
        return value_of(found) if isinstance(found, Total) else found

    def mean(self, name: str, over: str = "token_count") -> Any:
        """The sum of this name over a count; 0 where nothing was counted."""
        return self[name] / self.xp.maximum(self[over], 1)

    def extreme(self, name: str, over: str = "token_count") -> Any:
        """The maximum or minimum of this name; 0 where nothing was counted."""
        return self.xp.where(self[over] > 0, self[name], 0)


def _wide(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf
    leaf = np.asarray(leaf)
    return leaf.astype(np.float64 if leaf.dtype.kind == "f" else np.int64)


def merge(a: Any, b: Any) -> Any:
    """Statistics of the tokens of both, two ``Statistics`` or pytrees of them; any order up to rounding.

    Raises:
      ValueError: they hold other names.
    """
    return jax.tree.map(_merge, a, b, is_leaf=_is_statistics)


def zeros(shapes: Any) -> Any:
    """The statistics of no tokens, which merging starts from.

    Args:
      shapes: ``Statistics`` of ``jax.ShapeDtypeStruct``, or a pytree of them.
    """
    start = {"maxima": -np.inf, "minima": np.inf}

    def of(shapes: Statistics) -> Statistics:
        def fill(kind: str) -> Any:
            return jax.tree.map(lambda x: jnp.full(x.shape, start.get(kind, 0), x.dtype), getattr(shapes, kind))

        return Statistics(**{kind.name: fill(kind.name) for kind in fields(Statistics)})

    return jax.tree.map(of, shapes, is_leaf=_is_statistics)


def moments_of(xp: ModuleType, quantities: Any, valid: Any) -> Moments:
    """Moments over the valid tokens of ``quantities``, [k, b, t] float, 0 elsewhere."""
    number = count(xp, valid)
    mean = xp.sum(quantities, axis=(1, 2)) / xp.maximum(number, 1)
    centred = xp.where(valid[None], quantities - mean[:, None, None], 0)
    return Moments(number, mean, xp.sum(centred[:, None] * centred[None], axis=(2, 3)))


def _is_statistics(node: Any) -> bool:
    return isinstance(node, Statistics)


def _merge(a: Statistics, b: Statistics) -> Statistics:
    names = [sorted(name for kind in fields(s) for name in getattr(s, kind.name)) for s in (a, b)]
    if names[0] != names[1]:
        raise ValueError(f"statistics that merge must hold the same names, got {names[0]} and {names[1]}")
    xp = namespace_of(*jax.tree.leaves((a, b)))
    combine: dict[str, Callable[[Any, Any], Any]] = {
        "sums": operator.add,
        "maxima": xp.maximum,
        "minima": xp.minimum,
        "totals": add_totals,
        "moments": _merge_moments,
    }
    kinds = ((kind, both, getattr(a, kind), getattr(b, kind)) for kind, both in combine.items())
    return Statistics(**{kind: {name: both(x[name], y[name]) for name in x} for kind, both, x, y in kinds})


def _merge_moments(a: Moments, b: Moments) -> Moments:
    """Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979)."""
    number, dtype = a.count + b.count, a.mean.dtype
    share = b.count.astype(dtype) / namespace_of(number).maximum(number, 1).astype(dtype)
    gap = b.mean - a.mean
    weight = a.count.astype(dtype) * share
    return Moments(number, a.mean + gap * share, a.spread + b.spread + weight * gap[:, None] * gap[None])
