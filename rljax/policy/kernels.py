"""The implementations that a policy's forward is computed with, chosen together."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax.sharding import Mesh

from rljax.policy.attention import PackedAttention, choose_attention, packed_attention
from rljax.policy.config import PolicyConfig
from rljax.policy.grouped import IN_BLOCKS, Grouped, choose_experts
from rljax.policy.options import PolicyOptions


class Kernels(NamedTuple):
    """Of packed rows' attention, and of the experts' products; those that every backend has by default."""

    attention: PackedAttention = packed_attention
    grouped: Grouped = IN_BLOCKS


ON_ANY_BACKEND = Kernels()


def check_experts(config: PolicyConfig, mesh: Any) -> None:
    """Raises ValueError where the mesh, which may have no devices, does not divide the experts of a mixture."""
    for axis, name in (("expert", "num_experts"), ("tp", "expert_size")):
        if config.num_experts and getattr(config, name) % mesh.shape[axis]:
            raise ValueError(f"mesh.{axis} = {mesh.shape[axis]} must divide {name} = {getattr(config, name)}")
    if not config.num_experts and mesh.shape["expert"] > 1:
        raise ValueError(f"mesh.expert = {mesh.shape['expert']} is for a mixture of experts; this policy is dense")


def choose_kernels(options: PolicyOptions, config: PolicyConfig, dtype: str, mesh: Mesh) -> Kernels:
    """What ``policy.attention`` and ``policy.experts`` come to on the devices of the mesh.

    Raises:
      ValueError: the devices or the policy are not for what was asked for, or the mesh does not divide the experts;
        opens with the key.
    """
    check_experts(config, mesh)
    device = mesh.devices.flat[0]
    attention = choose_attention(options.attention, device, dtype, config.head_dim)
    inner = config.expert_size // mesh.shape["tp"]
    return Kernels(attention, choose_experts(options.experts, device, dtype, (config.hidden_size, inner)))
