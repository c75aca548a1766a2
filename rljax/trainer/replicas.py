"""Work that each copy of the weights (mesh axis ``replica``) does for its own rows, added up once at the end.

GSPMD alone would send the sum of gradients over rows between the nodes in every micro-batch. Here each copy adds up its
own micro-batches. The axis ``replica`` is manual, and GSPMD partitions the work inside a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rljax.mismatch import merge
from rljax.trainer.packing import PackedBatch

_AXIS = "replica"


def _replicas() -> int:
    """Returns the number of copies of the weights on the mesh of ``jax.set_mesh``; 1 without a mesh."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else int(mesh.shape[_AXIS])


def on_each_replica(
    work: Callable[..., tuple[Any, Any]], add_up: Callable[[Any], Any], batch: PackedBatch, *shared: Any
) -> tuple[Any, Any]:
    """Calls ``work(batch, *shared)`` in each copy with its own rows, and adds up the totals over the copies.

    Args:
      work: A function that returns totals, and token values [m, b, t, ...] of its rows.
      add_up: A function that adds up the totals of one copy with those of the others, by ``sum_over_replicas`` and
        ``merge_over_replicas``.
      *shared: The arrays that every copy gets whole.

    Returns:
      The totals of all copies, and the token values of all rows.
    """
    if _replicas() == 1:
        return work(batch, *shared)

    def of_one(batch: PackedBatch, *shared: Any) -> tuple[Any, Any]:
        totals, values = work(batch, *shared)
        return add_up(totals), values

    by_rows, whole = PartitionSpec(None, _AXIS), PartitionSpec()
    rows = jax.tree.map(lambda _: by_rows, batch)._replace(with_loss=whole, used=whole)
    specs = (rows, *(jax.tree.map(lambda _: whole, tree) for tree in shared))
    each = jax.shard_map(of_one, in_specs=specs, out_specs=(whole, by_rows), axis_names={_AXIS}, check_vma=False)
    return each(batch, *shared)


def sum_over_replicas(tree: Any) -> Any:
    """Returns the sum of each array over the copies. It is called inside ``on_each_replica``."""
    return jax.lax.psum(tree, _AXIS)


def merge_over_replicas(statistics: Any) -> Any:
    """Merges ``Statistics``, or a dictionary of them, over the copies. It is called inside ``on_each_replica``."""
    gathered = jax.tree.map(lambda x: jax.lax.all_gather(jnp.asarray(x), _AXIS), statistics)
    parts = [jax.tree.map(lambda x, i=i: x[i], gathered) for i in range(_replicas())]
    return functools.reduce(merge, parts)
