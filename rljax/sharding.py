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


def fit_spec(logical: Sequence[str | None], shape: Sequence[int], mesh: Any) -> PartitionSpec:
    """The PartitionSpec of an array of this shape with these logical axes (None: not split).

    A mesh axis that does not divide its dimension is left out: 2 heads on tp=4 are replicated.
    """
    axes = [None if name is None else RULES[name] for name in logical]
    fits = [axis is not None and size % mesh.shape[axis] == 0 for axis, size in zip(axes, shape, strict=True)]
    return PartitionSpec(*(axis if fit else None for axis, fit in zip(axes, fits, strict=True)))


def named_sharding(mesh: Mesh, logical: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """The sharding on ``mesh`` of an array of this shape with these logical axes."""
    return NamedSharding(mesh, fit_spec(logical, shape, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device has all of the array."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """``x`` constrained to its logical axes on the mesh of the context (``jax.set_mesh``); ``x`` itself without one."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, fit_spec(logical, x.shape, mesh))


def axis_size(logical: str) -> int:
    """Ways a logical axis is split on the mesh of the context (``jax.set_mesh``); 1 without one."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    axis = RULES[logical]
    return 1 if mesh.empty or axis is None else int(mesh.shape[axis])
