"""Compiles a run's step for a machine that is not present, and reports the memory that the step would take.

``python -m rljax.train CONFIG.yaml --dry-run --compile h100:1x8``. This needs JAX's compiler for the machine, but
neither the model's weights nor an accelerator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from rljax.plan.budget import H100, TPUS, Card
from rljax.plan.dry_run import beside_bytes, check_shapes, in_units, planned_bytes
from rljax.plan.memory import compiled_for_hopper
from rljax.policy.hub import policy_shape
from rljax.record.rows import text_table
from rljax.rollout.kinds import can
from rljax.run.config import Config
from rljax.run.packing import batch_shape, responses_per_update, settle_prefixes
from rljax.run.training import make_step, optional_logprobs
from rljax.sharding import make_mesh

# CUB's sort asks a GPU of this process how much memory it needs, so the program uses XLA's own sort.
COMPILER_OPTIONS: dict[str, dict[str, str | bool]] = {"cuda": {"xla_gpu_enable_cub_radix_sort": False}}
"""The options of XLA for ahead-of-time compilation, by the platform of the machine."""
_NO_TPU_HOST = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-16", "TPU_WORKER_HOSTNAMES": "localhost"}
INSTALL = {  # the advice of an error message, by platform
    "tpu": "pip install 'jax[tpu]'",
    "cuda": "pip install --no-deps nvidia-cudnn-cu12, and jax-cuda12-plugin and jax-cuda12-pjrt of jaxlib's version",
}


@dataclass(frozen=True)
class Machine:
    """The machine to compile for: the cards that train together."""

    name: str  # the name on the command line
    card: Card  # the card of every device
    platform: str  # cuda or tpu
    topology: str  # JAX's name for the arrangement of the cards


@dataclass(frozen=True)
class CompiledStep:
    """A step compiled for a machine."""

    config: Config  # with ``mesh.fsdp: -1`` replaced by a number
    machine: Machine
    mesh: Mesh  # the mesh of the machine's devices
    seconds: float  # the time that the compiler took
    text: str  # the text of the compiled program
    memory: dict[str, int]  # the bytes on a device by kind, from ``memory_by_kind``
    cost: dict[str, float]  # the compiler's counts on a device, from ``cost_by_kind``


def parse_machine(name: str) -> Machine:
    """Reads a machine's name: ``h100:NODESxCARDS``, such as h100:2x8, or ``tpu:KIND:SHAPE``, such as tpu:v5p:2x2x4.

    Raises:
      ValueError: There is no such machine.
    """
    if gpus := re.fullmatch(r"h100:([1-9]\d*)x([1-9]\d*)", name):
        nodes, cards = int(gpus.group(1)), int(gpus.group(2))
        return Machine(name, H100, "cuda", f"{nodes}x1x{cards}")
    kinds = "|".join(TPUS)
    if tpu := re.fullmatch(rf"tpu:({kinds}):((?:[1-9]\d*x)*[1-9]\d*)", name):
        kind, shape = tpu.groups()
        return Machine(name, TPUS[kind], "tpu", f"{kind}:{shape}")
    raise ValueError(
        f"--compile: no machine {name!r}; give h100:NODESxCARDS, such as h100:1x8, or tpu:KIND:SHAPE with one of "
        f"{', '.join(TPUS)}, such as tpu:v5p:2x2x4"
    )


def topology_devices(machine: Machine) -> list[Any]:
    """Returns the machine's devices (``jax.Device``) to compile for. They need not be present.

    JAX runs on the CPU after this call, because a compiler's plug-in would otherwise ask for its own devices.

    Raises:
      ValueError: The compiler for the machine is not installed, or there is no such arrangement.
    """
    jax.config.update("jax_platforms", "cpu")
    if machine.platform == "tpu":
        # Without these variables libtpu asks a metadata server about this host, and fails if there is none.
        for variable, value in _NO_TPU_HOST.items():
            os.environ.setdefault(variable, value)
        options = {"topology_name": machine.topology}
        if machine.topology.startswith("v4:"):
            options["chip_config_name"] = "megacore"  # on Cloud TPU a v4 chip is one device
    else:
        target = files("rljax.plan").joinpath("h100_sxm.txtpb").read_text()
        options = {"topology_name": "", "target_config": target, "topology": machine.topology}
    try:
        return list(topologies.get_topology_desc(platform=machine.platform, **options).devices)
    except Exception as error:  # each plug-in raises errors of its own: RuntimeError, JaxRuntimeError and others
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"--compile {machine.name}: JAX has no compiler for it here, or knows no such arrangement "
            f"({type(error).__name__}: {reason:.200}); {INSTALL[machine.platform]}"
        ) from error


def compile_step(config: Config, machine: Machine) -> CompiledStep:
    """Compiles the step of a run for a machine.

    Raises:
      ValueError: The machine's compiler is not installed, the mesh does not fit the machine, or the step does not fit
        its memory.
    """
    if can(config.rollout.engine, "is_exact"):
        raise ValueError("--compile: rollout.engine = exact has an executable of its own; choose another engine")
    policy = policy_shape(config.model.path)
    mesh = make_mesh(config.mesh, topology_devices(machine))
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, fsdp=int(mesh.shape["fsdp"])))
    config = settle_prefixes(config, policy)
    check_shapes(config, policy, mesh)
    step = make_step(config, policy, mesh)
    with compiled_for_hopper() if machine.platform == "cuda" else contextlib.nullcontext():
        lowered = step.lower(*optional_logprobs(config), reported=config.trained_tops)
    jax.config.update("jax_enable_compilation_cache", False)  # a cached program would take no time
    start = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=COMPILER_OPTIONS.get(machine.platform))
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"--compile {machine.name}: the compiler failed: {error}") from error
    seconds = time.perf_counter() - start
    memory, cost = memory_by_kind(compiled.memory_analysis()), cost_by_kind(compiled.cost_analysis())
    return CompiledStep(config, machine, mesh, seconds, compiled.as_text() or "", memory, cost)


def memory_by_kind(analysis: Any) -> dict[str, int]:
    """Returns the bytes on a device that the compiler planned, from ``memory_analysis()`` of an executable.

    ``total`` is argument + output - alias + temporary, ``peak`` the most at one time.
    """
    kinds = {"argument": "argument", "output": "output", "alias": "alias", "temporary": "temp"}
    sizes = {name: int(getattr(analysis, f"{kind}_size_in_bytes")) for name, kind in kinds.items()}
    together = sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temporary"]
    return sizes | {"peak": int(analysis.peak_memory_in_bytes), "total": together}


def cost_by_kind(analysis: Any) -> dict[str, float]:
    """Returns the compiler's counts of operations and of bytes moved, from ``cost_analysis()`` of an executable.

    The compiler counts a loop once if it does not know how often the loop runs, and knows nothing of custom calls. The
    compiler for GPUs gives no counts without a GPU.
    """
    names = {"flops": "flops", "bytes_accessed": "bytes accessed"}
    return {name: float(analysis[key]) for name, key in names.items() if analysis and key in analysis}


def needed_bytes(machine: Machine, memory: dict[str, int]) -> int:
    """Returns the bytes that a device must have: the larger of ``total`` and ``peak``, or on a TPU the peak.

    A TPU's compiler places arrays itself and refuses a step that does not fit. It accepts a step whose arguments and
    temporaries together exceed the memory, if the peak does not.
    """
    return memory["peak"] if machine.platform == "tpu" else max(memory["peak"], memory["total"])


def report(compiled: CompiledStep) -> dict[str, Any]:
    """Reports the compiler's numbers of a step on one device, as plain values for JSON."""
    config, machine, mesh = compiled.config, compiled.machine, compiled.mesh
    policy = policy_shape(config.model.path)
    shape = batch_shape(config, responses_per_update(config))
    beside = beside_bytes(config, policy, mesh)
    needed = needed_bytes(machine, compiled.memory) + beside
    return {
        "machine": machine.name,
        "card": machine.card.name,
        "jax": jax.__version__,
        "mesh": {name: int(size) for name, size in mesh.shape.items()},
        "model": config.model.path,
        "batch": dict(zip(("micro_batches", "rows", "tokens"), shape, strict=True)),
        "compile_s": round(compiled.seconds, 1),
        "bytes": {
            **compiled.memory,
            "beside": beside,
            "needed": needed,
            "planned": sum(part for _, part in planned_bytes(config, policy, mesh).values()),
            "device": machine.card.memory_bytes,
            "fits": needed <= machine.card.memory_bytes,
        },
        "cost": compiled.cost,
    }


def describe(facts: dict[str, Any]) -> str:
    """Formats a report as a table of a device's bytes and of the compiler's counts."""
    mesh = " x ".join(f"{name} {size}" for name, size in facts["mesh"].items())
    sizes = {name: in_units(size) for name, size in facts["bytes"].items() if name != "fits"}
    sizes["fits"] = "yes" if facts["bytes"]["fits"] else "NO"
    note = ", each loop over micro-batches once, without custom calls"
    counts = {name.replace("_", " "): f"{count:.3e}{note}" for name, count in facts["cost"].items()}
    head = f"compiled for {facts['machine']} ({facts['card']}), mesh {mesh}, in {facts['compile_s']:.0f} s; a device:"
    return f"{head}\n{text_table(list((sizes | counts).items()))}"
