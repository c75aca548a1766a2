"""Work that each copy of the weights (mesh axis ``replica``) does for its own rows, added up once at the end.

Left to GSPMD, a gradient that is summed over rows crosses the nodes in every micro-batch. Here each copy adds up its
own micro-batches, device by device over ``replica`` and as GSPMD sees fit inside a copy.
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
    """Copies of the weights on the mesh of the context (``jax.set_mesh``); 1 without one."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else int(mesh.shape[_AXIS])


def on_each_replica(
    work: Callable[..., tuple[Any, Any]], add_up: Callable[[Any], Any], batch: PackedBatch, *shared: Any
) -> tuple[Any, Any]:
    """``work(batch, *shared)`` with each copy's part of the rows, and what it finds added up over the copies.

    Args:
      work: gives what it found and what it keeps of the tokens [m, b, t, ...] of the rows it was given.
      add_up: called inside, with what one copy found; uses ``sum_over_replicas`` and ``merge_over_replicas``.
      batch: [m, b, t].
      shared: arrays that every copy gets whole.
    """
    if _replicas() == 1:
        return work(batch, *shared)

    def of_one(batch: PackedBatch, *shared: Any) -> tuple[Any, Any]:
        found, logprobs = work(batch, *shared)
        return add_up(found), logprobs

    by_rows, whole = PartitionSpec(None, _AXIS), PartitionSpec()
    rows = jax.tree.map(lambda _: by_rows, batch)._replace(with_loss=whole, used=whole)
    given = (rows, *(jax.tree.map(lambda _: whole, tree) for tree in shared))
    each = jax.shard_map(of_one, in_specs=given, out_specs=(whole, by_rows), axis_names={_AXIS}, check_vma=False)
    return each(batch, *shared)


def sum_over_replicas(tree: Any) -> Any:
    """The sum of each array over the copies, inside ``on_each_replica``."""
    return jax.lax.psum(tree, _AXIS)


def merge_over_replicas(statistics: Any) -> Any:
    """``Statistics``, or a dictionary of them, of all copies, inside ``on_each_replica``."""
    gathered = jax.tree.map(lambda x: jax.lax.all_gather(jnp.asarray(x), _AXIS), statistics)
    parts = [jax.tree.map(lambda x, i=i: x[i], gathered) for i in range(_replicas())]
    return functools.reduce(merge, parts)
