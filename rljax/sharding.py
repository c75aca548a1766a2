"""The device mesh, the table from logical axes to mesh axes, and constraints by logical axis.

Weights are sharded over four mesh axes. ``fsdp`` and ``context`` split the model width. ``tp`` splits heads, the inner
width of the MLP and the vocabulary. ``expert`` splits the experts of a mixture, and the model width of all other
weights. Each part of ``replica`` holds a copy of all weights. A batch is split by rows over ``replica``, ``fsdp`` and
``expert``, and by tokens over ``context``. Inside the policy, each part of a packed row over ``context`` is a row of
its own (``rljax.policy.context``). Between the matrix products of a block, activations are split by tokens over ``tp``
(sequence parallelism, arXiv 2205.05198).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("replica", "fsdp", "expert", "context", "tp")
OPTIONAL_AXES = ("expert", "context")
"""The axes that a description of a mesh leaves out if they have one part."""

# Logical axis -> mesh axes that split it.
RULES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("layers", "router", "head_dim", "norm", "rank", "micro", "tokens", "act_embed"), ()),
    **dict.fromkeys(("heads", "kv_heads", "mlp", "vocab", "act_heads", "act_mlp", "split_tokens"), ("tp",)),
    **dict.fromkeys(("embed", "split_rank"), ("fsdp", "expert", "context")),
    "experts": ("expert",),
    "expert_embed": ("fsdp", "context"),
    "exchanged_heads": ("tp", "context"),
    "batch_rows": ("replica", "fsdp", "expert"),
    "batch_tokens": ("context",),
    "rows": ("replica", "fsdp", "expert", "context"),
}


@dataclass(frozen=True)
class MeshConfig:
    """The number of devices on each mesh axis."""

    fsdp: int = -1
    """Number of parts into which the model width and the rows of a batch are split. -1: all devices that the other
    axes leave."""
    tp: int = 1
    """Number of parts into which heads, MLP width and vocabulary are split. Use at most the devices of one node."""
    replica: int = 1
    """Number of complete copies of the sharded weights (hybrid sharding). Each copy takes a part of the rows. Weights
    are gathered inside a copy, and gradients are added up across copies once a step. A copy takes neighbouring devices:
    with as many copies as nodes, weights do not travel between nodes."""
    expert: int = 1
    """Number of parts into which the experts of a mixture are split, and with them the rows of a batch. It must divide
    the number of experts. Use at most the devices of one node, because tokens travel over this axis in every block."""
    context: int = 1
    """Number of parts into which the tokens of a row are split, for long sequences. Weights are split over it, too.
    The number must divide the row length. Use at most the devices of one node, because keys and values travel over this
    axis in every block."""
    keep_gathered: bool = False
    """Gather the 16-bit weights over ``fsdp`` once a step and keep them, instead of twice in each micro-batch. This
    takes 2 bytes of each device's memory per parameter, divided by ``tp``."""

    def __post_init__(self) -> None:
        if min(self.tp, self.replica, self.expert, self.context) < 1 or self.fsdp < -1 or self.fsdp == 0:
            raise ValueError(
                "fsdp must be -1 or at least 1, tp, replica, expert and context at least 1, "
                f"got {self.fsdp}, {self.tp}, {self.replica}, {self.expert}, {self.context}"
            )

    def shape(self, num_devices: int) -> tuple[int, ...]:
        """Returns the sizes of the axes on ``num_devices`` devices, in the order of ``MESH_AXES``."""
        rest = max(1, num_devices // (self.replica * self.expert * self.context * self.tp))
        return self.replica, rest if self.fsdp == -1 else self.fsdp, self.expert, self.context, self.tp

    def row_ways(self, num_devices: int) -> int:
        """Returns the number of parts into which the rows of a batch are split on ``num_devices`` devices."""
        return num_parts(dict(zip(MESH_AXES, self.shape(num_devices), strict=True)), "batch_rows")


def num_parts(sizes: Mapping[str, int], logical: str) -> int:
    """Returns the number of parts into which mesh axes of these sizes split a logical axis."""
    return math.prod(sizes[axis] for axis in RULES[logical])


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a mesh of ``MESH_AXES`` with GSPMD (Auto) axes over the first ``devices`` (None: all devices).

    On a TPU, neighbours on ``tp``, then on ``context``, ``expert`` and ``fsdp``, are neighbours on the links between
    chips. On other platforms they are neighbours in the list of devices, process by process.

    Raises:
      ValueError: The mesh needs more devices than there are, or so few that some process has no part of it.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = config.shape(len(devices))
    named = zip(MESH_AXES, shape, strict=True)
    sizes = ", ".join(f"{axis}={size}" for axis, size in named if axis not in OPTIONAL_AXES or size > 1)
    if math.prod(shape) > len(devices):
        raise ValueError(f"a mesh of {sizes} needs more than the {len(devices)} devices here")
    used = {device.process_index for device in devices[: math.prod(shape)]}
    if used != {device.process_index for device in devices}:
        raise ValueError(f"a mesh of {sizes} leaves processes without a part of it, got {len(devices)} devices")
    grid = mesh_utils.create_device_mesh(shape, devices[: math.prod(shape)])
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def fit_spec(logical: Sequence[str | EllipsisType | None], shape: Sequence[int], mesh: Any) -> PartitionSpec:
    """Returns the PartitionSpec of an array from its logical axes (None: not split) and its shape.

    The compiler chooses the split of a dimension whose axis is ``...``. A dimension that its mesh axes together do not
    divide is not split: 2 heads on tp=4 are replicated. Mesh axes that are manual in the context (inside
    ``jax.shard_map``) are left out.
    """
    axes = [() if name is ... else _automatic(name, mesh) for name in logical]
    ways = [math.prod(mesh.shape[axis] for axis in names) for names in axes]
    fitting = (names if names and size % n == 0 else None for names, size, n in zip(axes, shape, ways, strict=True))
    free = PartitionSpec.UNCONSTRAINED
    return PartitionSpec(*(free if name is ... else names for name, names in zip(logical, fitting, strict=True)))


def _automatic(logical: str | None, mesh: Any) -> tuple[str, ...]:
    """Returns the mesh axes that split a logical axis and are left to GSPMD in the context."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(axis for axis in (RULES[logical] if logical else ()) if kinds[axis] == AxisType.Auto)


def named_sharding(mesh: Mesh, logical: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """Returns the sharding on ``mesh`` of an array with these logical axes and this shape."""
    return NamedSharding(mesh, fit_spec(logical, shape, mesh))


def constrain_tree(tree: Any, axes: Any) -> Any:
    """Constrains each array of ``tree`` to the logical axes in the tuple at the same path of ``axes``."""
    return jax.tree.map(lambda leaf, logical: constrain(leaf, *logical), tree, axes)


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding under which every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


_TPU_OPTIONS = {
    "xla_tpu_enable_windowed_einsum_for_all_gather": False,
    "xla_tpu_spmd_threshold_for_allgather_cse": 1_000_000,
}


def compiler_options(mesh: Mesh) -> dict[str, bool | int] | None:
    """Returns the options of XLA for a program that gathers weights on the mesh's devices, or None for its defaults.

    They are for TPUs. By default the compiler splits the gather of a weight and the product with it into four steps.
    Each step reads and writes the sum of the products in float32. The first option makes it gather a weight before the
    product. The compiler also gathers a weight again for a product that many operations separate from the first one.
    The second option lifts the limit on their number. docs/compile.md counts the saved memory traffic.
    """
    is_tpu = mesh.devices.flat[0].platform == "tpu"
    return dict(_TPU_OPTIONS) if is_tpu else None


def put(tree: Any, sharding: Any) -> Any:
    """Puts arrays of the host, which are equal on every process, on the devices.

    Each process copies only the parts of its own devices. ``jax.device_put`` would compare the arrays across processes.
    ``sharding`` is the sharding of all arrays, or a tree of shardings with the structure of ``tree``.
    """

    def place(value: Any, where: NamedSharding) -> jax.Array:
        if where.is_fully_addressable or isinstance(value, jax.Array):
            return jax.device_put(value, where)
        host = np.asarray(value)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])

    if isinstance(sharding, NamedSharding):
        return jax.tree.map(lambda value: place(value, sharding), tree)
    return jax.tree.map(place, tree, sharding)


def fetch(tree: Any) -> Any:
    """Copies arrays from the devices to the host, as numpy arrays.

    If other processes hold parts of an array, every process must make this call.
    """

    def whole(array: Any) -> Any:
        is_here = not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated
        return array if is_here else multihost_utils.process_allgather(array, tiled=True)

    return jax.device_get(jax.tree.map(whole, tree))


HOST_MEMORY = "pinned_host"
"""The name of the host memory from which a device can copy by itself."""


def has_host_memory(mesh: Mesh) -> bool:
    """Whether all devices of this process support ``HOST_MEMORY``."""
    kinds = [{memory.kind for memory in device.addressable_memories()} for device in mesh.local_devices]
    return all(HOST_MEMORY in each for each in kinds)


def on_host(tree: Any) -> Any:
    """Moves arrays to ``HOST_MEMORY``, each with its sharding, and frees their memory on the devices.

    The arrays of ``tree`` that were on the devices are deleted and cannot be used any more.
    """
    moved = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind(HOST_MEMORY)), tree)
    jax.block_until_ready(moved)
    for leaf in jax.tree.leaves(tree):
        if leaf.sharding.memory_kind != HOST_MEMORY:
            leaf.delete()
    return moved


def is_on_host(tree: Any) -> bool:
    """Whether any array of ``tree`` is in ``HOST_MEMORY``."""
    return any(leaf.sharding.memory_kind == HOST_MEMORY for leaf in jax.tree.leaves(tree))


def on_devices(tree: Any, dtype: Any = None) -> Any:
    """Copies the arrays that are in ``HOST_MEMORY`` to the devices, cast to ``dtype`` if it is not None.

    Arrays that are on the devices already are returned unchanged.
    """

    def copy(leaf: jax.Array) -> jax.Array:
        if leaf.sharding.memory_kind != HOST_MEMORY:
            return leaf
        sharding: Any = leaf.sharding
        moved = jax.device_put(leaf, sharding.with_memory_kind(None))  # None: the memory of the device itself
        return moved if dtype is None else moved.astype(dtype)

    return jax.tree.map(copy, tree)


def constrain(x: jax.Array, *logical: str | EllipsisType | None) -> jax.Array:
    """Constrains ``x`` to its logical axes (``fit_spec``) on the mesh of the context. Returns ``x`` without a mesh."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, fit_spec(logical, x.shape, mesh))


def split_over(logical: str) -> tuple[str, ...]:
    """Returns the mesh axes with more than one part that split a logical axis on the mesh of the context.

    Axes that are manual there (inside ``jax.shard_map``) do not count. Without a mesh there are none.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    return () if mesh.empty else tuple(axis for axis in _automatic(logical, mesh) if mesh.shape[axis] > 1)


def axis_size(logical: str) -> int:
    """Returns the number of parts of a logical axis on the mesh of the context (``jax.set_mesh``), 1 without a mesh."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in split_over(logical))


_NARROW_SUMS: ContextVar[bool] = ContextVar("narrow_sums", default=False)


@contextlib.contextmanager
def narrow_gradient_sums(narrow: bool) -> Iterator[None]:
    """Chooses how devices add up the gradients of weights, for the products that are traced in this context.

    If ``narrow``, a sum travels in the dtype of the product's operands, otherwise in float32.
    """
    token = _NARROW_SUMS.set(narrow)
    try:
        yield
    finally:
        _NARROW_SUMS.reset(token)


def gradient_sum_dtype(operands: Any) -> Any:
    """Returns the dtype in which devices add up a weight's gradient. ``operands``: the dtype of its factors."""
    return operands if _NARROW_SUMS.get() else np.dtype(np.float32)


def on_each_device(
    f: Callable[..., Any],
    in_axes: Sequence[Sequence[str | None]],
    out_axes: Sequence[Sequence[str | None]],
    *,
    rows: int,
) -> Callable[..., Any]:
    """Returns a function that computes ``f`` on each device of the context's mesh, on its parts (``jax.shard_map``).

    ``f`` takes arrays and returns a tuple of arrays. Inside it each device takes its own branch of a ``lax.cond``.
    Without a mesh, or where all its axes are manual already, ``f`` itself is returned. ``in_axes`` and ``out_axes`` are
    the logical axes of each argument and result. A mesh axis must divide the dimension that it splits. But "rows", of
    the size ``rows``, is not split where its mesh axes do not divide it.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Auto not in mesh.axis_types:
        return f
    whole = {"rows"} if rows % axis_size("rows") else set()

    def specs(every: Sequence[Sequence[str | None]]) -> tuple[PartitionSpec, ...]:
        names = ([() if name in whole else _automatic(name, mesh) for name in axes] for axes in every)
        return tuple(PartitionSpec(*(axis or None for axis in axes)) for axes in names)

    # check_vma=False: every device computes the unsplit arrays from equal inputs, which the check cannot see.
    names = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto}
    return jax.shard_map(f, in_specs=specs(in_axes), out_specs=specs(out_axes), axis_names=names, check_vma=False)
