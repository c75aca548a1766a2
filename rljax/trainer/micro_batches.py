"""A batch on the devices, and the loop over its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from rljax.sharding import constrain, put
from rljax.trainer.packing import PackedBatch, fill

OF_POLICY = ("tokens", "segment_ids", "positions", "routes")
"""Arrays of a batch that the policy reads."""


def place_batch(batch: PackedBatch, by_rows: NamedSharding, everywhere: NamedSharding) -> PackedBatch:
    """The batch on the devices, split by rows."""
    return put(batch, batch_shardings(batch, by_rows, everywhere))


def batch_shardings(batch: PackedBatch, by_rows: NamedSharding, everywhere: NamedSharding) -> PackedBatch:
    """The sharding of each array that ``batch`` has (see ``place_batch``)."""
    return jax.tree.map(lambda _: by_rows, batch)._replace(with_loss=everywhere, used=everywhere)


def abstract_batch(
    shape: tuple[int, int, int], by_rows: NamedSharding, everywhere: NamedSharding, given: Sequence[str] = ()
) -> PackedBatch:
    """``jax.ShapeDtypeStruct`` with a sharding for each array of a batch [m, b, t]; of the optional ones ``given``."""
    empty = fill([], {}, (0, 0, 0))._replace(**dict.fromkeys(given, np.zeros(0, np.float32)))
    return jax.tree.map(
        lambda array, sharding: jax.ShapeDtypeStruct(shape if array.ndim else (), array.dtype, sharding=sharding),
        empty,
        batch_shardings(empty, by_rows, everywhere),
    )


def over_micro_batches(
    batch: PackedBatch,
    each: Callable[[PackedBatch], tuple[Any, Any]],
    zero: Callable[[Any], Any],
    add: Callable[[Any, Any], Any],
    span: tuple[Any, Any],
    before: Any = None,
) -> tuple[Any, Any]:
    """Adds up micro-batches of a batch [m, b, t].

    Args:
      batch: arrays on the devices.
      each: what a micro-batch [b, t] gives: numbers to add, and what is kept of its tokens, a pytree [b, t, ...].
      zero: the total of none, from ``jax.ShapeDtypeStruct`` of those numbers.
      add: a total with the numbers of one more.
      span: the first micro-batch, and the first after the last.
      before: what was kept of other micro-batches [m, b, t, ...]; None: nothing.

    Returns:
      The total, and what was kept [m, b, t, ...], 0 of micro-batches that were not computed.
    """

    def of_index(index: jax.Array | int) -> tuple[Any, Any]:
        arrays = batch._replace(with_loss=None, used=None)
        micro = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), arrays)
        return each(with_all_rows(micro))

    def body(index: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        found, of_micro = of_index(index)

        def put_in(kept: jax.Array, part: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(kept, constrain(part, *_axes(part)), index, 0)

        return add(carry[0], found), jax.tree.map(put_in, carry[1], of_micro)

    numbers, parts = jax.eval_shape(of_index, 0)
    if before is None:
        before = jax.tree.map(lambda part: jnp.zeros((len(batch.tokens), *part.shape), part.dtype), parts)
    before = jax.tree.map(lambda kept: constrain(kept, "micro", *_axes(kept[0])), before)
    return jax.lax.fori_loop(*span, body, (zero(numbers), before))


def _axes(part: Any) -> tuple[str | None, ...]:
    """Logical axes of something of each token, [b, t, ...]."""
    return "rows", "tokens", *[None] * (part.ndim - 2)


def with_all_rows(micro: PackedBatch) -> PackedBatch:
    """A micro-batch whose arrays, but for those that the policy reads, hold all rows on each device.

    Losses, corrections and measurements are a few operations a token with many sums. Done by every device for all
    tokens they take no collective of their own; on simulated CPU devices, whose order of independent collectives is
    not fixed, many of them can wait for each other for good. The arrays travel together, as one.
    """
    kept = {name: getattr(micro, name) for name in OF_POLICY}
    arrays, structure = jax.tree.flatten(micro._replace(**dict.fromkeys(OF_POLICY)))
    bits = [x.astype(jnp.int32) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, jnp.int32) for x in arrays]
    whole = constrain(jnp.stack(bits), None, None, None)
    found = [
        part.astype(x.dtype) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(part, x.dtype)
        for part, x in zip(whole, arrays, strict=True)
    ]
    return jax.tree.unflatten(structure, found)._replace(**kept)
