"""Compiles a run's step for a machine that is not present, and reports what the step would take and do.

``python -m rljax.train CONFIG.yaml --dry-run --compile h100:1x8``. This needs JAX's compiler for the machine, but
neither the model's weights nor an accelerator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from rljax.plan.count import Work, by_dtype, count_program
from rljax.plan.dry_run import beside_bytes, check_shapes, in_units, planned_bytes
from rljax.plan.hlo import parse_module
from rljax.plan.kernels import KernelUse, attention_flops, full_row, kernel_uses
from rljax.plan.machines import Machine, topology_devices
from rljax.plan.overlap import Overlap, Timeline, read_overlap
from rljax.plan.roofline import crosses_nodes, times
from rljax.policy.config import PolicyConfig
from rljax.policy.hub import policy_shape
from rljax.policy.kernels import compiled_for_hopper
from rljax.policy.lora import OFF, LoraConfig, targets_of
from rljax.policy.model import abstract_params, logical_axes
from rljax.rollout.kinds import can
from rljax.run.config import Config
from rljax.run.training import batch_shape, make_step, optional_logprobs, responses_per_update
from rljax.sharding import make_mesh
from rljax.trainer.state import make_optimizer

Report = dict[str, Any]
# CUB's sort asks a GPU of this process how much memory it needs, so the program uses XLA's own sort.
COMPILER_OPTIONS: dict[str, dict[str, str | bool]] = {"cuda": {"xla_gpu_enable_cub_radix_sort": False}}
"""The options of XLA for ahead-of-time compilation, by the platform of the machine."""
PARTS = ("micro_batch", "forward", "step")  # of a step, counted separately; each is a field of ``Program``
MODEL_NOTE = (
    "a model, not a measurement: max(products, memory) + links at the card's published rates, nothing else overlapped"
)


@dataclass(frozen=True)
class CompiledStep:
    """A step compiled for a machine."""

    config: Config  # with ``mesh.fsdp: -1`` replaced by a number
    machine: Machine
    mesh: Mesh  # the mesh of the machine's devices
    seconds: float  # the time that the compiler took
    text: str  # the text of the compiled program
    memory: dict[str, int]  # the bytes on a device by kind, from ``memory_by_kind``


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
    check_shapes(config, policy, mesh)
    step = make_step(config, policy, make_optimizer(config.optimizer), mesh)
    with compiled_for_hopper() if machine.platform == "cuda" else contextlib.nullcontext():
        lowered = step.lower(*optional_logprobs(config), reported=config.trained_tops)
    jax.config.update("jax_enable_compilation_cache", False)  # a cached program would take no time
    start = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=COMPILER_OPTIONS.get(machine.platform))
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"--compile {machine.name}: the compiler failed: {error}") from error
    seconds = time.perf_counter() - start
    memory = memory_by_kind(compiled.memory_analysis())
    return CompiledStep(config, machine, mesh, seconds, compiled.as_text() or "", memory)


def memory_by_kind(analysis: Any) -> dict[str, int]:
    """Returns the bytes on a device that the compiler planned, from ``memory_analysis()`` of an executable.

    ``total`` is argument + output - alias + temporary, ``peak`` the most at one time.
    """
    kinds = {"argument": "argument", "output": "output", "alias": "alias", "temporary": "temp"}
    sizes = {name: int(getattr(analysis, f"{kind}_size_in_bytes")) for name, kind in kinds.items()}
    together = sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temporary"]
    return sizes | {"peak": int(analysis.peak_memory_in_bytes), "total": together}


def needed_bytes(machine: Machine, memory: dict[str, int]) -> int:
    """Returns the bytes that a device must have: the sum of all allocations, or on a TPU the peak.

    A TPU's compiler places arrays itself and refuses a step that does not fit. It accepts a step whose arguments and
    temporaries together exceed the memory, if the peak does not.
    """
    return memory["peak"] if machine.platform == "tpu" else max(memory["peak"], memory["total"])


def report(compiled: CompiledStep) -> Report:
    """Reports the memory, work and modelled time of a compiled step on one device, as plain values for JSON.

    Raises:
      ValueError: The program has a form that the counter does not know.
    """
    config, machine, mesh = compiled.config, compiled.machine, compiled.mesh
    policy = policy_shape(config.model.path)
    shape = batch_shape(config, responses_per_update(config))
    module = parse_module(compiled.text)
    program = count_program(module, mesh.size)
    nodes = [device.process_index if machine.card.network_rate else 0 for device in mesh.devices.flat]
    segments = full_row(shape[2], config.max_sequence_tokens)
    planned = sum(part for _, part in planned_bytes(config, policy, mesh).values())
    beside = beside_bytes(config, policy, mesh)
    needed = needed_bytes(machine, compiled.memory) + beside
    works = {part: getattr(program, part) for part in PARTS}
    kernels = {part: kernel_uses(work, segments) for part, work in works.items()}
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
        **{f"flops_per_{part}": by_dtype(work.flops) for part, work in works.items()},
        "flops_per_micro_batch_in_other_branches": by_dtype(program.micro_batch.untaken_flops),
        "kernels": [
            {"per": part, **dataclasses.asdict(use)} for part, uses in kernels.items() for use in uses if use.dtype
        ],
        **{f"memory_bytes_per_{part}": work.memory_bytes for part, work in works.items()},
        "open_loops": program.open_loops,
        "inner_open_loops": program.inner_open_loops,
        "collectives": [
            {
                **{"per": part, "kind": one.kind, "dtype": one.dtype, "count": one.count, "bytes": one.bytes},
                **{"group_size": len(set(one.groups[0])), "across_nodes": crosses_nodes(one, nodes)},
            }
            for part, work in works.items()
            for one in work.merged_collectives()
        ],
        "roofline": _roofline(policy, compiled, works, kernels, nodes),
        "overlap": overlap_report(read_overlap(module, machine.card, nodes, segments)),
    }


def _roofline(
    policy: PolicyConfig,
    compiled: CompiledStep,
    works: dict[str, Work],
    kernels: dict[str, list[KernelUse]],
    nodes: list[int],
) -> Report:
    config, card = compiled.config, compiled.machine.card
    micro, rows, tokens = batch_shape(config, responses_per_update(config))
    by_part = {part: times(works[part], kernels[part], card, nodes) for part in PARTS}
    seconds = micro * by_part["micro_batch"].total + by_part["step"].total
    flops = model_flops(policy, rows, full_row(tokens, config.max_sequence_tokens), config.lora)
    dtype = config.precision.compute_dtype
    peak = card.product_rate(dtype, "highest" if dtype == "float32" else "default")
    return {
        "note": MODEL_NOTE,
        **{f"{part}_s": one.rounded() for part, one in by_part.items()},
        "seconds_of_a_full_step": round(seconds, 3),
        "tokens_per_second_and_device": round(micro * rows * tokens / seconds / compiled.mesh.size, 1),
        "model_flops_per_micro_batch": flops,
        "model_flops_utilisation": round(micro * flops / (seconds * compiled.mesh.size * peak), 4),
    }


def overlap_report(overlap: Overlap) -> Report:
    """Returns the modelled times of each part with its exchanges behind work, and the exchanges that take long."""

    def plain(line: Timeline) -> Report:
        seconds = {"seconds": line.seconds, "work_s": line.work_s, "link_s": line.link_s, "exposed_s": line.exposed_s}
        shown = [one for one in line.exchanges if one.count * one.link_s > 1e-3 * line.seconds]
        rounded = [{k: round(v, 7) if isinstance(v, float) else v for k, v in vars(one).items()} for one in shown]
        share = {"exposed_share": round(line.exposed_share, 4)}
        return {**{name: round(value, 6) for name, value in seconds.items()}, **share, "exchanges": rounded}

    return {part: plain(getattr(overlap, part)) for part in PARTS}


def model_flops(policy: PolicyConfig, rows: int, segments: list[int], lora: LoraConfig = OFF) -> int:
    """Counts the operations that a micro-batch's gradient needs on all devices, without recomputation.

    Each token needs six operations for each parameter that it uses; an untied embedding table does not multiply, and of
    a mixture's experts only ``experts_per_token`` do. A frozen parameter without adapters needs four. Attention is
    causal inside each segment: each pair of a query and a key needs 12 operations for each layer and each element of
    the query heads. ``segments`` are lengths in tokens.
    """
    multiplying = 0 if policy.tie_word_embeddings else -policy.vocab_size * policy.hidden_size
    axes_of_leaves = jax.tree.leaves(logical_axes(policy), is_leaf=lambda node: isinstance(node, tuple))
    for leaf, axes in zip(jax.tree.leaves(abstract_params(policy)), axes_of_leaves, strict=True):
        multiplying += leaf.size * policy.experts_per_token // policy.num_experts if "experts" in axes else leaf.size
    trained = multiplying
    if lora.rank:
        trained = sum(leaf.size for leaf in jax.tree.leaves(targets_of(abstract_params(policy), policy, lora)))
    of_layer = attention_flops(segments, num_heads=policy.num_heads, head_dim=policy.head_dim).forward
    attention = 3 * policy.num_layers * of_layer
    return rows * ((4 * multiplying + 2 * trained) * sum(segments) + attention)


def describe(facts: Report) -> str:
    """Formats a report as lines of text."""
    sizes, line, batch = facts["bytes"], facts["roofline"], facts["batch"]
    mesh = " x ".join(f"{name} {size}" for name, size in facts["mesh"].items())
    against = sizes["needed"] / sizes["planned"] - 1
    flops, rest = (
        ", ".join(f"{dtype} {count:.3e}" for dtype, count in facts[f"flops_per_{part}"].items()) or "none"
        for part in ("micro_batch", "step")
    )
    lines = [
        f"compiled for {facts['machine']} ({facts['card']}), mesh {mesh}, in {facts['compile_s']:.0f} s; a device:",
        f"  bytes        {in_units(sizes['argument'])} of arguments, {in_units(sizes['temporary'])} of temporaries, "
        f"{in_units(sizes['beside'])} beside the step, {in_units(sizes['needed'])} at a time",
        f"  fits         {'yes' if sizes['fits'] else 'NO'}: the card has {in_units(sizes['device'])}; "
        f"the plan says {in_units(sizes['planned'])}, the compiler {against:+.1%}",
        f"  micro-batch  {batch['rows']} rows of {batch['tokens']:,} tokens on all devices; "
        f"at most {batch['micro_batches']} a step",
        f"  products     {flops} FLOPs a micro-batch; {rest} once a step",
    ]
    lines += [
        f"  kernel       {one['target']} x {one['count']} a {one['per']}: {one['dtype']} {one['flops']:.3e} FLOPs "
        "inside custom calls, by formula, with rows full of the longest sequences"
        for one in facts["kernels"]
    ]
    lines += [*_collective_lines(facts["collectives"]), f"  roofline     {line['note']}"]
    for part in PARTS:
        ms = {name: f"{1000 * seconds:.1f} ms" for name, seconds in line[f"{part}_s"].items()}
        parts = ", ".join(f"{name} {ms[name]}" for name in ("products", "memory", "links"))
        lines.append(f"  {part:<12} {parts}: {ms['total']}")
    behind = facts["overlap"]["micro_batch"]
    lines.append(
        f"  overlapped   micro-batch {1000 * behind['seconds']:.1f} ms with exchanges behind the work scheduled beside "
        f"them; {1000 * behind['exposed_s']:.1f} ms of {1000 * behind['link_s']:.1f} ms over links are exposed, "
        f"{behind['exposed_share']:.1%}"
    )
    lines.append(
        f"  modelled     {line['tokens_per_second_and_device']:,.0f} tokens/s a device, "
        f"model-FLOPs utilisation {line['model_flops_utilisation']:.1%}"
    )
    if facts["open_loops"] > 2:
        lines.append(
            f"  warning      {facts['open_loops']} loops without a trip count; all but the largest count as one forward"
        )
    return "\n".join(lines)


def _collective_lines(collectives: list[Report]) -> list[str]:
    """Returns a line for each collective that moves a MiB or more, and one line for all others."""
    large, others = ([one for one in collectives if (one["bytes"] < 2**20) is small] for small in (False, True))
    lines = [
        f"  {one['per']:<12} {one['kind']} of {one['dtype']} x {one['count']}: {in_units(one['bytes'])}, groups of "
        f"{one['group_size']} {'across nodes' if one['across_nodes'] else 'inside a node'}"
        for one in large
    ]
    if others:
        count, size = (sum(one[key] for one in others) for key in ("count", "bytes"))
        lines.append(f"  and          {count} smaller collectives: {in_units(size)}")
    return lines
