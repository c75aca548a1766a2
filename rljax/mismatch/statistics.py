"""Statistics of tokens: named numbers that merge in any order. Every measurement uses them.

A measurement is a function from tokens to ``Statistics`` and a function from ``Statistics`` to metrics. Micro-batches,
packed rows, shards and processes compute their own statistics. Merged, these equal the statistics of one call on all
tokens, up to rounding. On the device sums are plain float32, which XLA reduces pairwise, except where terms cancel. The
page docs/mismatch.md gives the errors on 2 million tokens.
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
    """The count, means and centred second moments of k quantities."""

    count: Any  # shape=(), int
    mean: Any  # shape=(k,), float
    spread: Any  # shape=(k, k), float: sum of (x_i - mean_i)(x_j - mean_j)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Statistics:
    """Named numbers of some tokens; a pytree. Each number may be an array, such as a histogram or one value per bucket.

    Sums and counts merge by addition. Totals are more exact sums: of terms that cancel, and for gradient divisors.
    """

    sums: dict[str, Any]  # counts (int32 on the device, int64 on the host) and sums (float32 or float64)
    maxima: dict[str, Any] = field(default_factory=dict)  # without tokens: -inf, or the smallest possible value
    minima: dict[str, Any] = field(default_factory=dict)  # without tokens: inf
    totals: dict[str, Total] = field(default_factory=dict)  # sums carried as two floats
    moments: dict[str, Moments] = field(default_factory=dict)  # moments that merge by Chan's rule

    @property
    def xp(self) -> ModuleType:
        """The array namespace of the numbers, numpy or jax.numpy."""
        return namespace_of(*jax.tree.leaves(self))

    def __getitem__(self, name: str) -> Any:
        """Returns the number, or the moments, with this name. On the host it is float64 or int64."""
        kinds: tuple[dict[str, Any], ...] = (self.sums, self.maxima, self.minima, self.totals, self.moments)
        number = jax.tree.map(_wide, next(kind[name] for kind in kinds if name in kind))
        return value_of(number) if isinstance(number, Total) else number

    def mean(self, name: str, over: str = "token_count") -> Any:
        """Divides the sum of this name by the count of the name ``over``. The result is 0 where the count is 0."""
        return self[name] / self.xp.maximum(self[over], 1)

    def extreme(self, name: str, over: str = "token_count") -> Any:
        """Returns the maximum or minimum of this name, but 0 where the count of the name ``over`` is 0."""
        return self.xp.where(self[over] > 0, self[name], 0)


def _wide(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf
    leaf = np.asarray(leaf)
    return leaf.astype(np.float64 if leaf.dtype.kind == "f" else np.int64)


def merge(a: Any, b: Any) -> Any:
    """Merges two ``Statistics``, or two pytrees of them. Up to rounding, the order of merges does not matter.

    Raises ValueError if the names differ.
    """
    return jax.tree.map(_merge, a, b, is_leaf=_is_statistics)


def zeros(shapes: Any) -> Any:
    """Returns the statistics of no tokens, the start value of merging.

    ``shapes`` are ``Statistics`` of ``jax.ShapeDtypeStruct`` or a pytree of them.
    """
    start = {"maxima": -np.inf, "minima": np.inf}

    def of(shapes: Statistics) -> Statistics:
        def fill(kind: str) -> Any:
            return jax.tree.map(lambda x: jnp.full(x.shape, start.get(kind, 0), x.dtype), getattr(shapes, kind))

        return Statistics(**{kind.name: fill(kind.name) for kind in fields(Statistics)})

    return jax.tree.map(of, shapes, is_leaf=_is_statistics)


def moments_of(xp: ModuleType, quantities: Any, valid: Any) -> Moments:
    """Computes the moments of ``quantities`` ([k, b, t] float, 0 outside the valid tokens) over the valid tokens."""
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
    """Merges moments by Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for ... Variances" (1979)."""
    number, dtype = a.count + b.count, a.mean.dtype
    share = b.count.astype(dtype) / namespace_of(number).maximum(number, 1).astype(dtype)
    gap = b.mean - a.mean
    weight = a.count.astype(dtype) * share
    return Moments(number, a.mean + gap * share, a.spread + b.spread + weight * gap[:, None] * gap[None])
