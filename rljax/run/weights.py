"""The weights that a run reads from disk: what it trains, the base of adapters, and the reference policy."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import Mesh

from rljax.policy.config import PolicyConfig
from rljax.policy.hf import load_params
from rljax.policy.lora import MergedPolicy, adapter_shardings, init_adapters
from rljax.policy.model import Params, param_shardings
from rljax.policy.peft import load_adapters
from rljax.run.config import Config
from rljax.sharding import HOST_MEMORY, has_host_memory, on_host


def is_offloaded(config: Config) -> bool:
    """Whether what the trainer keeps is in the host's memory between updates: its state, and frozen weights."""
    return config.rollout.colocated and config.rollout.offload_state


def check_offload(config: Config, mesh: Mesh) -> None:
    """Raises ValueError where the state is to be in a memory of the host that the devices do not know."""
    if is_offloaded(config) and not has_host_memory(mesh):
        kind = mesh.local_devices[0].platform
        raise ValueError(
            f"rollout.offload_state needs the memory kind {HOST_MEMORY}, which the devices ({kind}) do not have: give "
            "false"
        )


def load_merged(config: Config, policy: PolicyConfig, mesh: Mesh) -> MergedPolicy | None:
    """The policy that adapters make on the model of the run, which is read here; None without adapters.

    The model lies where ``is_offloaded`` says, as do the weights of ``load_reference``.

    Raises:
      OSError, ValueError: the model cannot be read.
    """
    lora, dtype = config.lora, config.precision.compute_dtype
    if not lora.rank:
        return None
    base = load_params(config.model.path, policy, param_shardings(policy, mesh), dtype)
    base = on_host(base) if is_offloaded(config) else base
    return MergedPolicy(policy, lora, mesh, base, dtype, as_float32=config.rollout.engine == "exact")


def initial_params(config: Config, policy: PolicyConfig, mesh: Mesh) -> Params:
    """What a run trains as it stands before the first step: the model's weights, or adapters.

    Raises:
      OSError, ValueError: they cannot be read.
    """
    lora = config.lora
    if not lora.rank:
        return load_params(config.model.path, policy, param_shardings(policy, mesh))
    shardings = adapter_shardings(policy, lora, mesh)
    if lora.adapter is not None:
        return load_adapters(lora.adapter, policy, lora, shardings)
    make: Any = jax.jit(functools.partial(init_adapters, policy, lora, config.run.seed), out_shardings=shardings)
    return make()


def load_reference(
    config: Config, policy: PolicyConfig, mesh: Mesh, merged: MergedPolicy | None = None
) -> Params | None:
    """The frozen policy of a KL penalty, the policy that the run starts from; None without a penalty.

    ``merged``: from ``load_merged``; with it the policy is that of the first adapters, and without ``lora.adapter``
    the base itself, which is there already.

    Raises:
      OSError, ValueError: it cannot be read.
    """
    if config.loss.kl == "none":
        return None
    if merged is not None and not config.lora.adapter:
        return merged.frozen()
    params = initial_params(config, policy, mesh)
    params = on_host(params) if is_offloaded(config) else params
    return params if merged is None else merged(params)
