"""A batch on the devices, the loop over its micro-batches, and the work of each copy of the weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rljax.mismatch import merge
from rljax.policy.score import PrefixTrees
from rljax.sharding import constrain, put
from rljax.tokens import TOPS
from rljax.trainer.packing import PackedBatch, fill

POLICY_ARRAYS = ("tokens", "segment_ids", "positions", "routes", "trees")
"""The names of the arrays of a batch that the policy reads."""
BATCH_AXES = ("micro", "batch_rows", "batch_tokens")
"""The logical axes of the arrays of a batch."""
_AXIS = "replica"


def place_batch(batch: PackedBatch, by_rows: NamedSharding, everywhere: NamedSharding) -> PackedBatch:
    """Puts the batch on the devices, split by rows. A single CPU device may share the memory of the arrays.

    The function may return before the copies are complete.
    """
    return put(batch, batch_shardings(batch, by_rows, everywhere))


def batch_shardings(batch: PackedBatch, by_rows: NamedSharding, everywhere: NamedSharding) -> PackedBatch:
    """Returns the sharding of each array of ``batch``: split by rows, and the two counts on every device."""
    return jax.tree.map(lambda _: by_rows, batch)._replace(with_loss=everywhere, used=everywhere)


def abstract_batch(
    shape: tuple[int, int, int],
    by_rows: NamedSharding,
    everywhere: NamedSharding,
    optional: Sequence[str] = (),
    reported: int = 0,
    flat_tokens: int = 0,
) -> PackedBatch:
    """Returns a ``jax.ShapeDtypeStruct`` with a sharding for each array of a batch of the ``shape`` (m, b, t).

    The batch has the ``optional`` log-probabilities, and ``reported`` likeliest tokens at each position. If
    ``flat_tokens`` is above 0, rows of t tokens hold trees, and each has a flat row of ``flat_tokens`` tokens.
    """
    empty = fill([], {}, (0, 0, 0))._replace(**dict.fromkeys(optional, np.zeros(0, np.float32)))
    if reported:
        none = np.zeros((0, 0, 0, reported))
        empty = empty._replace(top_ids=none.astype(np.int32), top_logprobs=none.astype(np.float32))

    rows = (*shape[:2], flat_tokens or shape[2])

    def of_shape(array: np.ndarray, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*rows, *array.shape[3:]) if array.ndim else (), array.dtype, sharding=sharding)

    batch = jax.tree.map(of_shape, empty, batch_shardings(empty, by_rows, everywhere))
    whole = jax.ShapeDtypeStruct(shape, np.int32, sharding=by_rows)
    return batch._replace(trees=PrefixTrees(whole, whole, whole, batch.tokens)) if flat_tokens else batch


def over_micro_batches(
    batch: PackedBatch,
    each: Callable[[PackedBatch], tuple[Any, Any]],
    zero: Callable[[Any], Any],
    add: Callable[[Any, Any], Any],
    span: tuple[Any, Any],
    before: Any = None,
) -> tuple[Any, Any]:
    """Returns the total over micro-batches of a batch [m, b, t], and the token values [m, b, t, ...].

    Args:
      each: A function of a micro-batch [b, t]. It returns numbers to add up, and token values [b, t, ...] to keep.
      zero: A function that returns the total of no micro-batch, from the ``jax.ShapeDtypeStruct`` of the numbers.
      add: A function that adds the numbers of one micro-batch to a total.
      span: The indices of the first micro-batch and of the one after the last. If they are Python integers that differ
        by at most 1, no loop is compiled.
      before: The token values [m, b, t, ...] of the micro-batches outside ``span``; None for zeros.
    """

    @functools.partial(jax.jit, inline=True)  # it is traced once for its shapes and for the loop, and leaves no call
    def of_index(index: jax.Array | int) -> tuple[Any, Any]:
        arrays = batch._replace(with_loss=None, used=None)
        micro = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), arrays)
        return each(with_all_rows(micro))

    def body(index: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        numbers, values = of_index(index)

        def put_in(kept: jax.Array, part: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(kept, constrain(part, *batch_axes(part)), index, 0)

        return add(carry[0], numbers), jax.tree.map(put_in, carry[1], values)

    numbers, parts = jax.eval_shape(of_index, span[0])
    if before is None:
        before = jax.tree.map(lambda part: jnp.zeros((len(batch.tokens), *part.shape), part.dtype), parts)
    before = jax.tree.map(lambda kept: constrain(kept, "micro", *batch_axes(kept[0])), before)
    none = zero(numbers), before
    if isinstance(span[1], int) and span[1] - span[0] <= 1:
        return body(span[0], none) if span[0] < span[1] else none
    return jax.lax.fori_loop(*span, body, none)


def batch_axes(part: Any) -> tuple[str | None, ...]:
    """Returns the logical axes of an array [b, t, ...] of a micro-batch."""
    return *BATCH_AXES[1:], *[None] * (part.ndim - 2)


def with_all_rows(micro: PackedBatch) -> PackedBatch:
    """Gathers all rows of a micro-batch on each device, except in the arrays that only the policy reads.

    Losses, corrections and measurements take few operations per token and many sums. If every device computes them for
    all tokens, they need no collectives. On simulated CPU devices the order of independent collectives is not fixed, so
    many of them can wait for each other forever. The arrays travel together, as one array.

    If a micro-batch has likeliest tokens, its ``tokens`` are gathered as well, because losses compare the two.
    """
    tops = {name: getattr(micro, name) for name in TOPS if micro.top_ids is not None}
    kept = {name: getattr(micro, name) for name in POLICY_ARRAYS if not (tops and name == "tokens")}
    arrays, structure = jax.tree.flatten(micro._replace(**dict.fromkeys((*kept, *TOPS))))

    def convert(x: jax.Array, dtype: Any) -> jax.Array:
        is_mask = jnp.bool_ in (x.dtype, dtype)
        return x.astype(dtype) if is_mask else jax.lax.bitcast_convert_type(x, dtype)

    layers = jnp.stack([convert(x, jnp.int32) for x in arrays])
    if tops:
        layers = jnp.concatenate([layers, *(jnp.moveaxis(convert(x, jnp.int32), 2, 0) for x in tops.values())])
    whole = constrain(layers, None, None, None)
    gathered = [convert(part, x.dtype) for x, part in zip(arrays, whole, strict=False)]
    first = len(arrays)
    for name, x in tops.items():
        kept[name] = convert(jnp.moveaxis(whole[first : first + x.shape[2]], 0, 2), x.dtype)
        first += x.shape[2]
    return jax.tree.unflatten(structure, gathered)._replace(**kept)


def _replicas() -> int:
    """Returns the number of copies of the weights on the mesh of ``jax.set_mesh``; 1 without a mesh."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else int(mesh.shape[_AXIS])


def on_each_replica(
    work: Callable[..., tuple[Any, Any]], add_up: Callable[[Any], Any], batch: PackedBatch, *shared: Any
) -> tuple[Any, Any]:
    """Calls ``work(batch, *shared)`` in each copy of the weights with its own rows, and adds up the totals at the end.

    GSPMD by itself would send the sum of gradients over rows between the nodes in every micro-batch. Here the mesh axis
    ``replica`` is manual, and GSPMD partitions the work inside a copy.

    ``work`` returns totals, and token values [m, b, t, ...] of its rows. ``add_up`` adds up the totals of all copies,
    by ``sum_over_replicas`` and ``merge_over_replicas``. Every copy gets the arrays ``shared`` whole. Returns the
    totals of all copies, and the token values of all rows.
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
    """Returns the sum of each array over the copies of the weights. It is called inside ``on_each_replica``."""
    return jax.lax.psum(tree, _AXIS)


def merge_over_replicas(statistics: Any) -> Any:
    """Merges ``Statistics``, or a dictionary of them, over the copies. It is called inside ``on_each_replica``."""
    gathered = jax.tree.map(lambda x: jax.lax.all_gather(jnp.asarray(x), _AXIS), statistics)
    parts = [jax.tree.map(lambda x, i=i: x[i], gathered) for i in range(_replicas())]
    return functools.reduce(merge, parts)
