"""Compiles a run's step for a machine that is not here, and says what it would take and do.

``python -m rljax.train CONFIG.yaml --dry-run --compile h100:1x8``. The compilers are those of
``launch/install_compilers.sh``; neither the model's weights nor an accelerator are needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from rljax.plan.count import Program, Work, by_dtype, count_program
from rljax.plan.dry_run import beside_bytes, check_shapes, in_units, planned_bytes
from rljax.plan.hlo import parse_module
from rljax.plan.kernels import KernelUse, attention_flops, full_row, kernel_uses
from rljax.plan.machines import Machine, node_of, topology_devices
from rljax.plan.roofline import Times, crosses_nodes, times
from rljax.policy.ahead import compiled_for_hopper
from rljax.policy.config import PolicyConfig
from rljax.policy.hub import policy_shape
from rljax.policy.lora import OFF, LoraConfig, targets_of
from rljax.policy.model import Params, abstract_params, logical_axes
from rljax.run.config import Config
from rljax.run.training import batch_shape, has_separate_forward, make_step, responses_per_update
from rljax.sharding import make_mesh
from rljax.trainer.packing import Given
from rljax.trainer.state import make_optimizer

Report = dict[str, Any]
# CUB's sort asks the process's own GPU how much memory it needs; XLA's own sort takes its place in the program.
_OPTIONS: dict[str, dict[str, str | bool]] = {"cuda": {"xla_gpu_enable_cub_radix_sort": False}}
PARTS = ("micro_batch", "forward", "step")
"""What is counted apart: fields of ``Program``."""
MODEL_NOTE = (
    "a model, not a measurement: max(products, memory) + links at the card's published rates, nothing else overlapped"
)
KERNEL_NOTE = "inside custom calls, by formula from segments of the longest sequences"


@dataclass(frozen=True)
class CompiledStep:
    """A step compiled for a machine.

    Attributes:
      config: of the run, with ``mesh.fsdp: -1`` written out.
      machine: for which.
      mesh: of the machine's devices.
      seconds: that the compiler took.
      text: the compiled program.
      memory: bytes on a device by kind.
    """

    config: Config
    machine: Machine
    mesh: Mesh
    seconds: float
    text: str
    memory: dict[str, int]


def compile_step(config: Config, machine: Machine) -> CompiledStep:
    """Compiles the step of a run.

    Raises:
      ValueError: there is no compiler for the machine here, the mesh does not fit it, or the step does not fit its
        memory.
    """
    if config.rollout.engine == "exact":
        raise ValueError("--compile: rollout.engine = exact has an executable of its own; give another engine")
    policy = policy_shape(config.model.path)
    mesh = make_mesh(config.mesh, topology_devices(machine))
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, fsdp=int(mesh.shape["fsdp"])))
    check_shapes(config, policy, mesh)
    step = make_step(config, policy, make_optimizer(config.optimizer), mesh)
    with compiled_for_hopper() if machine.platform == "cuda" else contextlib.nullcontext():
        lowered = step.lower(*_given(config))
    jax.config.update("jax_enable_compilation_cache", False)  # the time is to be the compiler's
    start = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=_OPTIONS.get(machine.platform))
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"--compile {machine.name}: the compiler gives up: {error}") from error
    seconds = time.perf_counter() - start
    memory = memory_by_kind(compiled.memory_analysis())
    return CompiledStep(config, machine, mesh, seconds, compiled.as_text() or "", memory)


def _given(config: Config) -> list[Given]:
    """The optional arrays of the batches that the step gets."""
    given: list[Given] = []
    if has_separate_forward(config):
        given.append("old_logprobs")
    if config.loss.kl != "none":
        given.append("reference_logprobs")
    if config.correction.part != "whole":
        given.append("behaviour_logprobs")
    return given


def memory_by_kind(analysis: Any) -> dict[str, int]:
    """Bytes on a device that the compiler planned, from ``memory_analysis()`` of an executable; docs/compile.md."""
    kinds = {"argument": "argument", "output": "output", "alias": "alias", "temporary": "temp"}
    sizes = {name: int(getattr(analysis, f"{kind}_size_in_bytes")) for name, kind in kinds.items()}
    together = sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temporary"]
    return sizes | {"peak": int(analysis.peak_memory_in_bytes), "total": together}


def needed_bytes(machine: Machine, memory: dict[str, int]) -> int:
    """Bytes that a device must have: all that are allocated, of a TPU the most at one time.

    A TPU's compiler places arrays itself and refuses what does not fit. It accepts steps whose arguments and
    temporaries are together more than the memory, as long as the peak is less.
    """
    return memory["peak"] if machine.platform == "tpu" else max(memory["peak"], memory["total"])


def report(compiled: CompiledStep) -> Report:
    """What the compiled step takes and does, on one device: plain values for JSON; docs/compile.md says what each is.

    Raises:
      ValueError: the program is written in a form that is not known here.
    """
    config, machine, mesh = compiled.config, compiled.machine, compiled.mesh
    policy = policy_shape(config.model.path)
    shape = batch_shape(config, responses_per_update(config))
    program = count_program(parse_module(compiled.text), mesh.size)
    nodes = [node_of(machine, device) for device in mesh.devices.flat]
    segments = full_row(shape[2], config.max_sequence_tokens)
    kernels = {part: kernel_uses(getattr(program, part), segments) for part in PARTS}
    planned = sum(part for _, part in planned_bytes(config, policy, mesh).values())
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
            "planned": planned,
            "device": machine.card.memory_bytes,
            "fits": needed <= machine.card.memory_bytes,
        },
        "flops_per_micro_batch": by_dtype(program.micro_batch.flops),
        "flops_per_forward": by_dtype(program.forward.flops),
        "flops_per_step": by_dtype(program.step.flops),
        "flops_per_micro_batch_in_other_branches": by_dtype(program.micro_batch.untaken_flops),
        "kernels": [
            {"per": part, **dataclasses.asdict(use)} for part, uses in kernels.items() for use in uses if use.dtype
        ],
        "memory_bytes_per_micro_batch": program.micro_batch.memory_bytes,
        "memory_bytes_per_forward": program.forward.memory_bytes,
        "memory_bytes_per_step": program.step.memory_bytes,
        "open_loops": program.open_loops,
        "inner_open_loops": program.inner_open_loops,
        "collectives": _collectives(program, nodes),
        "roofline": _roofline(policy, compiled, program, kernels, nodes),
    }


def _collectives(program: Program, nodes: list[int]) -> list[Report]:
    """The collectives of a micro-batch, and those of the rest of a step."""
    return [
        {
            "per": part,
            "kind": one.kind,
            "dtype": one.dtype,
            "count": one.count,
            "bytes": one.bytes,
            "group_size": len(set(one.groups[0])),
            "across_nodes": crosses_nodes(one, nodes),
        }
        for part in PARTS
        for one in getattr(program, part).merged_collectives()
    ]


def _roofline(
    policy: PolicyConfig,
    compiled: CompiledStep,
    program: Program,
    kernels: dict[str, list[KernelUse]],
    nodes: list[int],
) -> Report:
    config, card = compiled.config, compiled.machine.card
    micro, rows, tokens = batch_shape(config, responses_per_update(config))

    def of(work: Work, uses: list[KernelUse]) -> Times:
        flops: dict[str, int] = {}
        for use in uses:
            flops[use.dtype] = flops.get(use.dtype, 0) + (use.flops or 0)
        return times(work, flops, card, nodes)

    found = {part: of(getattr(program, part), kernels[part]) for part in PARTS}
    seconds = micro * found["micro_batch"].total + found["step"].total
    flops = model_flops(policy, rows, full_row(tokens, config.max_sequence_tokens), config.lora)
    dtype = config.precision.compute_dtype
    peak = card.product_rate(dtype, "highest" if dtype == "float32" else "default")
    return {
        "note": MODEL_NOTE,
        **{f"{part}_s": {**_rounded(one), "total": round(one.total, 6)} for part, one in found.items()},
        "seconds_of_a_full_step": round(seconds, 3),
        "tokens_per_second_and_device": round(micro * rows * tokens / seconds / compiled.mesh.size, 1),
        "model_flops_per_micro_batch": flops,
        "model_flops_utilisation": round(micro * flops / (seconds * compiled.mesh.size * peak), 4),
    }


def _rounded(seconds: Times) -> dict[str, float]:
    return {name: round(value, 6) for name, value in dataclasses.asdict(seconds).items()}


def active_parameters(policy: PolicyConfig) -> int:
    """Parameters that one token meets: of a mixture, those of ``experts_per_token`` experts and all others."""
    found = 0
    for leaf, axes in zip(jax.tree.leaves(abstract_params(policy)), _axes(policy), strict=True):
        found += leaf.size * policy.experts_per_token // policy.num_experts if "experts" in axes else leaf.size
    return found


def _axes(policy: PolicyConfig) -> list[tuple[str, ...]]:
    return jax.tree.leaves(logical_axes(policy), is_leaf=lambda node: isinstance(node, tuple))


def model_flops(policy: PolicyConfig, rows: int, segments: list[int], lora: LoraConfig = OFF) -> int:
    """Operations that a micro-batch's gradient needs, on all devices: nothing recomputed, causal inside each segment.

    Six for each token and each parameter that it meets (an embedding table of its own does not multiply), four where
    adapters are trained and the parameter has none, and three times the forward's four for each pair of a query and a
    key, each layer and each element of the query heads.
    """
    looked_up = 0 if policy.tie_word_embeddings else policy.vocab_size * policy.hidden_size
    multiplying = active_parameters(policy) - looked_up
    trained = _size(targets_of(abstract_params(policy), policy, lora)) if lora.rank else multiplying
    of_layer = attention_flops(segments, num_heads=policy.num_heads, head_dim=policy.head_dim).forward
    attention = 3 * policy.num_layers * of_layer
    return rows * ((4 * multiplying + 2 * trained) * sum(segments) + attention)


def _size(params: Params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


# --- for a reader -----------------------------------------------------------------------------------------------------


def describe(found: Report) -> str:
    """The report as lines of text."""
    sizes, line = found["bytes"], found["roofline"]
    mesh = " x ".join(f"{name} {size}" for name, size in found["mesh"].items())
    batch = found["batch"]
    against = sizes["needed"] / sizes["planned"] - 1
    lines = [
        f"compiled for {found['machine']} ({found['card']}), mesh {mesh}, in {found['compile_s']:.0f} s; a device:",
        f"  bytes        {in_units(sizes['argument'])} of arguments, {in_units(sizes['temporary'])} of temporaries, "
        f"{in_units(sizes['beside'])} beside the step, {in_units(sizes['needed'])} at a time",
        f"  fits         {'yes' if sizes['fits'] else 'NO'}: the card has {in_units(sizes['device'])}; "
        f"the plan says {in_units(sizes['planned'])}, the compiler {against:+.1%}",
        f"  micro-batch  {batch['rows']} rows of {batch['tokens']:,} tokens on all devices; "
        f"at most {batch['micro_batches']} a step",
        *_flops_lines(found),
        *_collective_lines(found["collectives"]),
        f"  roofline     {line['note']}",
        *(f"  {part:<12} {_times_line(line[f'{part}_s'])}" for part in PARTS),
        f"  modelled     {line['tokens_per_second_and_device']:,.0f} tokens/s a device, "
        f"model-FLOPs utilisation {line['model_flops_utilisation']:.1%}",
    ]
    if found["open_loops"] > 2:
        lines.append(
            f"  warning      {found['open_loops']} loops without a trip count; all but the largest count as one forward"
        )
    return "\n".join(lines)


def _flops_lines(found: Report) -> list[str]:
    flops = ", ".join(f"{dtype} {count:.3e}" for dtype, count in found["flops_per_micro_batch"].items()) or "none"
    rest = ", ".join(f"{dtype} {count:.3e}" for dtype, count in found["flops_per_step"].items()) or "none"
    lines = [f"  products     {flops} FLOPs a micro-batch; {rest} once a step"]
    lines += [
        f"  kernel       {one['target']} x {one['count']} a {one['per']}: {one['dtype']} {one['flops']:.3e} FLOPs "
        f"{KERNEL_NOTE}"
        for one in found["kernels"]
    ]
    return lines


def _collective_lines(collectives: list[Report]) -> list[str]:
    """A line for each that moves a MiB, and one for the others together."""
    lines, others = [], [one for one in collectives if one["bytes"] < 2**20]
    for one in collectives:
        where = "across nodes" if one["across_nodes"] else "inside a node"
        what = f"{one['kind']} of {one['dtype']} x {one['count']}"
        if one not in others:
            lines.append(f"  {one['per']:<12} {what}: {in_units(one['bytes'])}, groups of {one['group_size']} {where}")
    if others:
        count, size = (sum(one[key] for one in others) for key in ("count", "bytes"))
        lines.append(f"  and          {count} smaller collectives: {in_units(size)}")
    return lines


def _times_line(seconds: dict[str, float]) -> str:
    parts = ", ".join(f"{name} {1000 * seconds[name]:.1f} ms" for name in ("products", "memory", "links"))
    return f"{parts}: {1000 * seconds['total']:.1f} ms"
