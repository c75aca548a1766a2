"""The kernels of a policy's forward, and their choice for a mesh."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh

from rljax.policy.attention import PackedAttention, choose_attention, packed_attention
from rljax.policy.config import PolicyConfig, PolicyOptions
from rljax.policy.context import device_heads, heads_of_device
from rljax.policy.families import state_heads
from rljax.policy.grouped import IN_BLOCKS, Grouped, choose_experts
from rljax.policy.rotary import Rotate, rotate, rotate_by_product


class Kernels(NamedTuple):
    """The implementations of the parts of a policy's forward. The defaults work on every backend."""

    attention: PackedAttention = packed_attention  # the attention of rows of sequences that share nothing
    grouped: Grouped = IN_BLOCKS  # the products of a mixture's experts
    parts: int = 1  # the number of devices that share a row; above 1, ``attention`` takes rows of ``context.fold``
    # The largest number of blocks that are compiled one by one, not as a loop, if the backward pass recomputes nothing.
    unrolled: int = 0
    # Whether the LM head picks a target's logit by index, and keeps up to ``head.MAX_STORED`` logits for its backward.
    stored_logits: bool = False
    rotate: Rotate = rotate  # the rotary embedding
    tree_attention: PackedAttention = packed_attention  # the attention of rows of trees


ON_ANY_BACKEND = Kernels()
MAX_UNROLLED = 8
"""The value of ``Kernels.unrolled`` on a CPU. There, a loop over blocks fills the stacks of saved values with zeros,
and copies each value into its stack and out of it. Each block outside a loop takes its own time to compile, so the
limit is small."""


def check_mesh(config: PolicyConfig, mesh: Any) -> None:
    """Raises ValueError if a mesh, or an ``AbstractMesh``, does not divide the experts or the heads of a policy."""
    for axis, name in (("expert", "num_experts"), ("tp", "expert_size")):
        if config.num_experts and getattr(config, name) % mesh.shape[axis]:
            raise ValueError(f"mesh.{axis} = {mesh.shape[axis]} must divide {name} = {getattr(config, name)}")
    if not config.num_experts and mesh.shape["expert"] > 1:
        raise ValueError(f"mesh.expert = {mesh.shape['expert']} is for a mixture of experts; this policy is dense")
    parts, heads = mesh.shape["context"], state_heads(config)
    # This call refuses a number of devices that cannot exchange tokens for heads.
    heads_of_device(parts, *device_heads(config.num_heads, config.num_kv_heads, mesh.shape["tp"]))
    if parts > 1 and heads % (parts * mesh.shape["tp"]):
        said = f"mesh.context x mesh.tp = {parts} x {mesh.shape['tp']} must divide the {heads} heads"
        raise ValueError(f"{said} whose state a {config.family} policy passes from token to token")


def is_one_cpu(mesh: Any) -> bool:
    """Returns whether the only device of the mesh is a CPU; False for an ``AbstractMesh``, which has no devices.

    The mesh is asked and not the machine, because its device may exist only for compilation ahead of time.
    """
    return not isinstance(mesh, AbstractMesh) and mesh.devices.size == 1 and mesh.devices.flat[0].platform == "cpu"


def choose_kernels(options: PolicyOptions, config: PolicyConfig, dtype: str, mesh: Mesh) -> Kernels:
    """Chooses the implementations that ``policy.attention`` and ``policy.experts`` mean on the devices of the mesh.

    Raises:
      ValueError: An implementation does not support the devices or the policy, or ``check_mesh`` refuses the mesh. The
        message begins with the configuration key.
    """
    check_mesh(config, mesh)
    device = mesh.devices.flat[0]
    parts = mesh.shape["context"]
    attention, of_trees = (
        choose_attention(options.attention, device, dtype, config.head_dim, parts, trees=trees)
        for trees in (False, True)
    )
    inner = config.expert_size // mesh.shape["tp"]
    experts = choose_experts(options.experts, device, dtype, (config.hidden_size, inner))
    on_cpu = is_one_cpu(mesh)
    rotary = rotate_by_product if device.platform == "tpu" and dtype == "bfloat16" else rotate
    return Kernels(attention, experts, parts, MAX_UNROLLED if on_cpu else 0, on_cpu, rotary, of_trees)
