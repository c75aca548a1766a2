"""Starts the processes of a run, as the configuration or the cluster says."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from rljax.distributed.processes import Processes
from rljax.errors import ConfigError, StartAgainError

_INIT_S = 300
_JAX_HEARTBEAT_FACTOR = 4  # The run's own heartbeat comes first, and its message says more.


@dataclass(frozen=True)
class ProcessOptions:
    """The settings of ``RunConfig`` about processes.

    Attributes:
      processes: The number of processes; 0 for what the cluster says, 1 for a single process.
      process_id: The number of this process, from 0; -1 for what the cluster says.
      coordinator: The ``HOST:PORT`` of process 0; "" for what the cluster says.
      heartbeat_s: The longest time from the last sign of life of a process to the end of the others, in seconds.
      stuck_s: The longest time that a process may stay in one place, in seconds; 0 for no limit.
    """

    processes: int = 0
    process_id: int = -1
    coordinator: str = ""
    heartbeat_s: float = 30.0
    stuck_s: float = 3600.0


def start_processes(options: ProcessOptions) -> Processes:
    """Starts ``jax.distributed`` where there are several processes. Call it before anything asks for devices.

    Args:
      options: The settings of the configuration.

    Returns:
      The processes of this run.

    Raises:
      ConfigError: The options do not fit each other, or the environment has several processes that JAX does not find.
      StartAgainError: The other processes did not connect in time.
    """
    is_set = (options.processes > 1, options.process_id >= 0, bool(options.coordinator))
    limits: dict[str, Any] = {"heartbeat_s": options.heartbeat_s, "stuck_s": options.stuck_s}
    alone = options.processes == 1 or (options.processes == 0 and _is_only_task())
    if alone and not any(is_set):
        return Processes(**limits)
    if any(is_set) and not all(is_set):
        raise ConfigError("run.processes (above 1), run.process_id and run.coordinator are given together, or none")
    if all(is_set) and options.process_id >= options.processes:
        raise ConfigError(f"run.process_id = {options.process_id} must be below run.processes = {options.processes}")
    if all(is_set) and not options.coordinator.rpartition(":")[2].isdecimal():
        raise ConfigError(f"run.coordinator must be HOST:PORT of process 0, got {options.coordinator!r}")
    where: dict[str, Any] = {}
    if all(is_set):
        where = {"coordinator_address": options.coordinator, "num_processes": options.processes}
        where["process_id"] = options.process_id
    # The preemption notifier of JAX would take SIGTERM until Python installs a handler.
    jax.config.update("jax_enable_preemption_service", False)
    heartbeat_s = int(_JAX_HEARTBEAT_FACTOR * options.heartbeat_s) + 10
    try:
        jax.distributed.initialize(**where, initialization_timeout=_INIT_S, heartbeat_timeout_seconds=heartbeat_s)
    except ValueError as error:
        if any(is_set) or "coordinator_address" not in str(error):
            raise ConfigError(f"the processes of this run cannot be started: {error}") from error
        if several := _several_by_environment():
            raise ConfigError(
                f"{several}, but jax.distributed finds no cluster; run.processes = 1 trains alone"
            ) from error
        return Processes(**limits)
    except jax.errors.JaxRuntimeError as error:
        raise StartAgainError(f"the processes of this run did not find each other: {error}") from error
    except RuntimeError:
        if any(is_set):
            raise
        return Processes(**limits)  # The devices of this program are in use already.
    return Processes(jax.process_index(), jax.process_count(), **limits)


def _is_only_task() -> bool:
    """Returns whether this is the only task of a step of Slurm or Open MPI, to which JAX would give one GPU."""
    return any(os.environ.get(name) == "1" for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))


def unused_gpus(used: int, devices: Path = Path("/dev")) -> str | None:
    """Returns a line about the NVIDIA GPUs of this machine that no process of the run uses, or None where all are used.

    Args:
      used: The number of GPUs that this process uses.
      devices: The directory that holds a file ``nvidiaN`` for each GPU.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = devices.glob("nvidia[0-9]*") if chosen is None else filter(None, chosen.split(","))
    here = len(list(names))
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or "1"
    if used * int(re.findall(r"\d+", tasks)[0]) >= here or os.environ.get("JAX_PLATFORMS") == "cpu":
        return None
    return (
        f"this process trains on {used} of the {here} GPUs of this machine; look at mesh, JAX_LOCAL_DEVICE_IDS, "
        "run.processes (1: all GPUs here) and whether jax is installed with CUDA"
    )


def _several_by_environment() -> str:
    """Returns the words of the environment that say there are several processes; "" where nothing says so."""
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        if os.environ.get(name, "1") not in ("", "0", "1"):
            return f"{name} is {os.environ[name]}"
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= os.environ.keys():
        return "this is a pod of an Indexed Job (is the package kubernetes installed?)"
    return ""
