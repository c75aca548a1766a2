"""The NVIDIA GPUs of this machine. This module needs only the standard library, because servers load it, too."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
from pathlib import Path

from rljax.errors import ConfigError

CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
"""The packages of which JAX needs one to see NVIDIA GPUs."""


def unused_gpus(used: int, devices: Path = Path("/dev")) -> str | None:
    """Returns a line about this machine's NVIDIA GPUs that no process of the run uses, or None if all are used.

    ``used`` is the number of GPUs that this process uses. The directory ``devices`` has a file ``nvidiaN`` for each
    GPU. The line is None if the environment variable JAX_PLATFORMS asks for the CPU.

    Raises:
      ConfigError: JAX has its plugin for CUDA and finds none of the GPUs.
    """
    chosen = visible_gpus()
    here = len(list(devices.glob("nvidia[0-9]*"))) if chosen is None else len(chosen)
    asks_for_cpu = os.environ.get("JAX_PLATFORMS", "").partition(",")[0] == "cpu"
    if used * tasks_here() >= here or asks_for_cpu:
        return None
    if not used and any(map(importlib.util.find_spec, CUDA_PLUGINS)):
        raise ConfigError(
            f"JAX finds none of the {here} GPUs of this machine, although its plugin for CUDA is installed. Usual "
            "causes: LD_LIBRARY_PATH names another cuDNN or CUDA (unset it), or lacks the driver's libraries (on GKE "
            "/usr/local/nvidia/lib64); the driver is too old. JAX_PLATFORMS=cuda shows JAX's own error, and "
            "JAX_PLATFORMS=cpu trains on the CPU"
        )
    return (
        f"this process trains on {used} of the {here} GPUs of this machine; look at mesh, JAX_LOCAL_DEVICE_IDS, "
        "run.processes (1: all GPUs here) and whether jax is installed with CUDA"
    )


def tasks_here() -> int:
    """Returns the number of processes that Slurm or Open MPI has started on this machine; 1 without them."""
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or "1"
    return int(re.findall(r"\d+", tasks)[0])


def visible_gpus() -> list[str] | None:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES names, or None if it is not set.

    As in CUDA, the first name that is empty, negative or NoDevFiles ends the list.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return None
    names = (name.strip() for name in chosen.split(","))
    return list(itertools.takewhile(lambda name: name[:1] not in ("", "-") and name != "NoDevFiles", names))
