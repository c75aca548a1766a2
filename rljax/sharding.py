"""The device mesh, the table from logical axes to mesh axes, and constraints by logical axis.

Weights are sharded over three of the mesh axes: ``fsdp`` splits the model width, ``tp`` splits heads, the MLP's inner
width and the vocabulary; ``expert`` splits the experts of a mixture, and the model width of all other weights besides.
Each part of ``replica`` has all of them. Activations are split by rows over ``replica``, ``fsdp`` and ``expert``, and
between the products of a block by tokens over ``tp`` (sequence parallelism, arXiv 2205.05198).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("replica", "fsdp", "expert", "tp")

# Logical axis -> mesh axes that split it.
RULES: dict[str, tuple[str, ...]] = {
    "layers": (),
    "embed": ("fsdp", "expert"),
    "experts": ("expert",),
    "expert_embed": ("fsdp",),
    "router": (),
    "heads": ("tp",),
    "kv_heads": ("tp",),
    "head_dim": (),
    "mlp": ("tp",),
    "vocab": ("tp",),
    "norm": (),
    "rank": (),
    "split_rank": ("fsdp", "expert"),
    "micro": (),
    "rows": ("replica", "fsdp", "expert"),
    "tokens": (),
    "split_tokens": ("tp",),
    "act_embed": (),
    "act_heads": ("tp",),
    "act_mlp": ("tp",),
}


@dataclass(frozen=True)
class MeshConfig:
    """How many devices each mesh axis takes."""

    fsdp: int = -1
    """Number of parts into which the model width and the rows of a batch are split. -1: all devices that ``tp`` and
    ``replica`` leave."""
    tp: int = 1
    """Number of parts into which heads, MLP width and vocabulary are split. At most the devices of one node."""
    replica: int = 1
    """Number of complete copies of the sharded weights (hybrid sharding). Each copy takes a part of the rows; weights
    are gathered inside a copy, and gradients are added up across copies once a step. A copy takes neighbouring devices:
    with as many copies as nodes, weights do not travel between nodes."""
    expert: int = 1
    """Number of parts into which the experts of a mixture are split, and with them the rows of a batch. It divides the
    number of experts. At most the devices of one node: tokens travel over it in every block."""
    keep_gathered: bool = False
    """Gather the 16-bit weights over ``fsdp`` once a step and keep them (2 bytes a parameter on each device, over
    ``tp``), in place of gathering them twice for each micro-batch."""

    def __post_init__(self) -> None:
        if min(self.tp, self.replica, self.expert) < 1 or self.fsdp < -1 or self.fsdp == 0:
            raise ValueError(
                "fsdp must be -1 or at least 1, tp, replica and expert at least 1, "
                f"got {self.fsdp}, {self.tp}, {self.replica}, {self.expert}"
            )

    def shape(self, num_devices: int) -> tuple[int, int, int, int]:
        """Sizes of the axes on so many devices, in the order of ``MESH_AXES``."""
        rest = max(1, num_devices // (self.replica * self.expert * self.tp))
        return self.replica, rest if self.fsdp == -1 else self.fsdp, self.expert, self.tp


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of ``MESH_AXES`` with GSPMD (Auto) axes over the first devices.

    Neighbours on ``tp``, then on ``expert`` and ``fsdp``, are neighbours on the links of a TPU, and devices of one
    process elsewhere.

    Raises:
      ValueError: more devices asked for than there are, or so few that a process has none of them.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = config.shape(len(devices))
    named = zip(MESH_AXES, shape, strict=True)
    sizes = ", ".join(f"{axis}={size}" for axis, size in named if axis != "expert" or size > 1)
    if math.prod(shape) > len(devices):
        raise ValueError(f"a mesh of {sizes} needs more than the {len(devices)} devices here")
    used = {device.process_index for device in devices[: math.prod(shape)]}
    if used != {device.process_index for device in devices}:
        raise ValueError(f"a mesh of {sizes} leaves processes without a part of it: there are {len(devices)} devices")
    grid = mesh_utils.create_device_mesh(shape, devices[: math.prod(shape)])
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def fit_spec(logical: Sequence[str | None], shape: Sequence[int], mesh: Any) -> PartitionSpec:
    """The PartitionSpec of an array of this shape with these logical axes (None: not split).

    Mesh axes that do not divide their dimension are left out: 2 heads on tp=4 are replicated. So are those over which
    the context works device by device already (``jax.shard_map``).
    """
    axes = [_automatic(name, mesh) for name in logical]
    ways = [math.prod(mesh.shape[axis] for axis in names) for names in axes]
    return PartitionSpec(
        *(names if names and size % n == 0 else None for names, size, n in zip(axes, shape, ways, strict=True))
    )


def _automatic(logical: str | None, mesh: Any) -> tuple[str, ...]:
    """Mesh axes that split a logical axis and are left to GSPMD in the context."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(axis for axis in (RULES[logical] if logical else ()) if kinds[axis] == AxisType.Auto)


def named_sharding(mesh: Mesh, logical: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """The sharding on ``mesh`` of an array of this shape with these logical axes."""
    return NamedSharding(mesh, fit_spec(logical, shape, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device has all of the array."""
    return NamedSharding(mesh, PartitionSpec())


def put(tree: Any, sharding: Any) -> Any:
    """Arrays of the host, the same on every process, on the devices of ``sharding``, one for all or a tree of them.

    Each process takes the parts that its devices hold. ``jax.device_put`` would compare the arrays across processes.
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
    """Arrays of the devices on the host; where other processes hold parts of one, all of them call this."""

    def whole(array: Any) -> Any:
        is_here = not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated
        return array if is_here else multihost_utils.process_allgather(array, tiled=True)

    return jax.device_get(jax.tree.map(whole, tree))


HOST_MEMORY = "pinned_host"
"""The kind of memory of a device that is the host's, from which the device copies by itself."""


def has_host_memory(mesh: Mesh) -> bool:
    """Whether the devices of this process know ``HOST_MEMORY``."""
    return all(
        HOST_MEMORY in (memory.kind for memory in device.addressable_memories()) for device in mesh.local_devices
    )


def on_host(tree: Any) -> Any:
    """The arrays in ``HOST_MEMORY``, each with the sharding that it has; their memory on the devices is given back.

    The arrays of ``tree`` that were on the devices cannot be used any more.
    """
    moved = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind(HOST_MEMORY)), tree)
    jax.block_until_ready(moved)
    for leaf in jax.tree.leaves(tree):
        if leaf.sharding.memory_kind != HOST_MEMORY:
            leaf.delete()
    return moved


def is_on_host(tree: Any) -> bool:
    """Whether arrays of ``tree`` are in ``HOST_MEMORY``."""
    return any(leaf.sharding.memory_kind == HOST_MEMORY for leaf in jax.tree.leaves(tree))


def on_devices(tree: Any, dtype: Any = None) -> Any:
    """The arrays as computations need them: of those in ``HOST_MEMORY`` a copy on the devices, in ``dtype`` if given.

    The others are returned as they are.
    """

    def copy(leaf: jax.Array) -> jax.Array:
        if leaf.sharding.memory_kind != HOST_MEMORY:
            return leaf
        sharding: Any = leaf.sharding
        there = jax.device_put(leaf, sharding.with_memory_kind(None))  # None: that of the device itself
        return there if dtype is None else there.astype(dtype)

    return jax.tree.map(copy, tree)


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """``x`` constrained to its logical axes on the mesh of the context (``jax.set_mesh``); ``x`` itself without one."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, fit_spec(logical, x.shape, mesh))


def split_over(logical: str) -> tuple[str, ...]:
    """Mesh axes of more than one part that split a logical axis on the mesh of the context; none without one."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    return () if mesh.empty else tuple(axis for axis in _automatic(logical, mesh) if mesh.shape[axis] > 1)


def axis_size(logical: str) -> int:
    """Ways a logical axis is split on the mesh of the context (``jax.set_mesh``); 1 without one."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in _automatic(logical, mesh))


def on_each_device(
    f: Callable[..., Any],
    in_axes: Sequence[Sequence[str | None]],
    out_axes: Sequence[Sequence[str | None]],
    *,
    rows: int,
) -> Callable[..., Any]:
    """``f`` as each device of the context's mesh computes it on the part it has (``jax.shard_map``); else ``f`` itself.

    Inside, a branch is taken by each device alone, and this function does nothing more.

    Args:
      f: from arrays to a tuple of arrays.
      in_axes: logical axes of each argument; a mesh axis must divide the size of what it splits.
      out_axes: logical axes of each result.
      rows: size of the logical axis "rows", which is not split where its mesh axis does not divide it.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Auto not in mesh.axis_types:
        return f
    whole = {"rows"} if rows % axis_size("rows") else set()

    def specs(every: Sequence[Sequence[str | None]]) -> tuple[PartitionSpec, ...]:
        names = ([() if name in whole else _automatic(name, mesh) for name in axes] for axes in every)
        return tuple(PartitionSpec(*(axis or None for axis in axes)) for axes in names)

    # The arrays that are not split are computed alike by every device, which the check cannot see.
    names = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto}
    return jax.shard_map(f, in_specs=specs(in_axes), out_specs=specs(out_axes), axis_names=names, check_vma=False)
