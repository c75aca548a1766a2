"""The weights that a run reads from disk: the model or the adapters to train, their base, and the reference policy."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import Mesh

from rljax.policy.config import PolicyConfig
from rljax.policy.hf import load_params
from rljax.policy.lora import MergedPolicy, TrainedParams, init_adapters
from rljax.policy.model import Params, param_shardings
from rljax.policy.peft import load_adapters
from rljax.run.config import Config
from rljax.sharding import HOST_MEMORY, has_host_memory, on_host


def is_offloaded(config: Config) -> bool:
    """Returns whether the training state and the frozen weights are in the host's memory between updates."""
    return config.rollout.colocated and config.rollout.offload_state


def check_offload(config: Config, mesh: Mesh) -> None:
    """Raises ValueError if the state is wanted in a memory of the host that the devices do not know."""
    if is_offloaded(config) and not has_host_memory(mesh):
        kind = mesh.local_devices[0].platform
        raise ValueError(
            f"rollout.offload_state needs the memory kind {HOST_MEMORY}, which the devices ({kind}) do not have: give "
            "false"
        )


def load_merged(config: Config, policy: PolicyConfig, mesh: Mesh) -> MergedPolicy | None:
    """Reads the model under the adapters of a run; it is placed in the memory that ``is_offloaded`` says.

    Returns:
      The policy that the adapters make on the model. None: the run has no adapters.

    Raises:
      OSError: The model cannot be read.
      ValueError: The model is not that of ``policy``.
    """
    lora, dtype = config.lora, config.precision.compute_dtype
    if not lora.rank:
        return None
    base = load_params(config.model.path, policy, param_shardings(policy, mesh), dtype)
    base = on_host(base) if is_offloaded(config) else base
    return MergedPolicy(policy, lora, mesh, base, dtype, as_float32=config.rollout.engine == "exact")


def initial_params(config: Config, policy: PolicyConfig, mesh: Mesh) -> Params:
    """Reads the weights of the model, or reads or initialises adapters: the parameters that a run trains, at step 0.

    Raises:
      OSError: The weights cannot be read.
      ValueError: The weights are not those of ``policy``.
    """
    lora = config.lora
    if not lora.rank:
        return load_params(config.model.path, policy, param_shardings(policy, mesh))
    shardings = TrainedParams(policy, lora).shardings(mesh)
    if lora.adapter is not None:
        return load_adapters(lora.adapter, policy, lora, shardings)
    make: Any = jax.jit(functools.partial(init_adapters, policy, lora, config.run.seed), out_shardings=shardings)
    return make()


def load_reference(
    config: Config, policy: PolicyConfig, mesh: Mesh, merged: MergedPolicy | None = None
) -> Params | None:
    """Reads the frozen policy of a KL penalty, which is the policy that the run starts from.

    Args:
      config: The configuration of the run.
      policy: The shape of the policy.
      mesh: The mesh on which it is placed.
      merged: The policy that adapters make, from ``load_merged``. If the run starts from new adapters, the reference is
        its base, which is not read again. None: the run has no adapters.

    Returns:
      The policy. None: the loss has no KL penalty.

    Raises:
      OSError: The weights cannot be read.
      ValueError: The weights are not those of ``policy``.
    """
    if config.loss.kl == "none":
        return None
    if merged is not None and not config.lora.adapter:
        return merged.frozen()
    params = initial_params(config, policy, mesh)
    params = on_host(params) if is_offloaded(config) else params
    return params if merged is None else merged(params)
