"""The device mesh, the table from logical axes to mesh axes, and constraints by logical axis.

Weights are sharded over both mesh axes: ``fsdp`` splits the model width, ``tp`` splits heads, the MLP's inner width and
the vocabulary. Activations are split by rows over ``fsdp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("fsdp", "tp")

# Logical axis -> mesh axis. None: not split.
RULES: dict[str, str | None] = {
    "layers": None,
    "embed": "fsdp",
    "heads": "tp",
    "kv_heads": "tp",
    "head_dim": None,
    "mlp": "tp",
    "vocab": "tp",
    "norm": None,
    "micro": None,
    "rows": "fsdp",
    "tokens": None,
    "act_embed": None,
    "act_heads": "tp",
    "act_mlp": "tp",
}


@dataclass(frozen=True)
class MeshConfig:
    """How many devices each mesh axis takes; -1 for fsdp means all that tp leaves."""

    fsdp: int = -1
    """Number of parts into which the model width and the rows of a batch are split. -1: all devices that ``tp`` leaves.
    """
    tp: int = 1
    """Number of parts into which heads, MLP width and vocabulary are split."""

    def __post_init__(self) -> None:
        if self.tp < 1 or self.fsdp < -1 or self.fsdp == 0:
            raise ValueError(f"fsdp must be -1 or at least 1 and tp at least 1, got {self.fsdp} and {self.tp}")


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """An ``('fsdp', 'tp')`` mesh with GSPMD (Auto) axes over the first ``fsdp * tp`` devices.

    Raises:
      ValueError: more devices asked for than there are, or tp does not divide them.
    """
    devices = list(jax.devices() if devices is None else devices)
    fsdp = len(devices) // config.tp if config.fsdp == -1 else config.fsdp
    if fsdp < 1 or fsdp * config.tp > len(devices):
        raise ValueError(
            f"a mesh of fsdp={config.fsdp}, tp={config.tp} needs more than the {len(devices)} devices here"
        )
    grid = np.asarray(devices[: fsdp * config.tp]).reshape(fsdp, config.tp)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def partition_spec(logical: Sequence[str | None]) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes (None: not split).

    Raises:
      ValueError: an unknown logical axis, or two axes of one array on the same mesh axis.
    """
    for axis in logical:
        if axis is not None and axis not in RULES:
            raise ValueError(f"unknown logical axis {axis!r}; one of {sorted(RULES)}")
    mesh_axes = [None if axis is None else RULES[axis] for axis in logical]
    used = [axis for axis in mesh_axes if axis is not None]
    if len(set(used)) != len(used):
        raise ValueError(f"logical axes {tuple(logical)} put two dimensions on one mesh axis: {tuple(mesh_axes)}")
    return PartitionSpec(*mesh_axes)


def fit_spec(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """``spec`` without the axes that do not divide their dimension (2 heads on tp=4 are replicated)."""
    return PartitionSpec(
        *(
            axis if axis is None or shape[i] % mesh.shape[axis] == 0 else None
            for i, axis in enumerate(tuple(spec) + (None,) * (len(shape) - len(spec)))
        )
    )


def named_sharding(mesh: Mesh, logical: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """The sharding on ``mesh`` of an array of this shape with these logical axes."""
    return NamedSharding(mesh, fit_spec(partition_spec(logical), shape, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """``x`` constrained to its logical axes on the mesh of the context (``jax.set_mesh``); ``x`` itself without one."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, fit_spec(partition_spec(logical), x.shape, mesh))


def axis_size(logical: str) -> int:
    """Ways a logical axis is split on the mesh of the context (``jax.set_mesh``); 1 without one."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    axis = RULES[logical]
    return 1 if mesh.empty or axis is None else int(mesh.shape[axis])
