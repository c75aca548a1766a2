"""Reports what a compiled step does on one device: products, kernels, memory traffic, collectives, modelled times."""

from __future__ import annotations

import dataclasses
from typing import Any

from compile.count import Work, by_dtype, count_program
from compile.hlo import parse_module
from compile.kernels import KernelUse, full_row, kernel_uses, model_flops
from compile.roofline import RATES, crosses_nodes, times
from rljax.plan.compile import CompiledStep
from rljax.plan.dry_run import in_units
from rljax.policy.config import PolicyConfig
from rljax.policy.hub import policy_shape
from rljax.run.packing import batch_shape, responses_per_update

Report = dict[str, Any]
PARTS = ("micro_batch", "forward", "step")  # of a step, counted separately; each is a field of ``Program``
MODEL_NOTE = (
    "a model, not a measurement: max(products, memory) + links at the card's published rates, nothing else overlapped"
)


def work_report(compiled: CompiledStep) -> Report:
    """Reports the work and the modelled time of a compiled step on one device, as plain values for JSON.

    Raises:
      ValueError: The program has a form that the counter does not know.
    """
    config, machine, mesh = compiled.config, compiled.machine, compiled.mesh
    policy = policy_shape(config.model.path)
    tokens = batch_shape(config, responses_per_update(config))[2]
    program = count_program(parse_module(compiled.text), mesh.size)
    nodes = [device.process_index if RATES[machine.card.name].network else 0 for device in mesh.devices.flat]
    segments = full_row(tokens, config.max_sequence_tokens)
    works = {part: getattr(program, part) for part in PARTS}
    kernels = {part: kernel_uses(work, segments) for part, work in works.items()}
    return {
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
    }


def _roofline(
    policy: PolicyConfig,
    compiled: CompiledStep,
    works: dict[str, Work],
    kernels: dict[str, list[KernelUse]],
    nodes: list[int],
) -> Report:
    config, rates = compiled.config, RATES[compiled.machine.card.name]
    micro, rows, tokens = batch_shape(config, responses_per_update(config))
    by_part = {part: times(works[part], kernels[part], rates, nodes) for part in PARTS}
    seconds = micro * by_part["micro_batch"].total + by_part["step"].total
    flops = model_flops(policy, rows, full_row(tokens, config.max_sequence_tokens), config.lora)
    dtype = config.precision.compute_dtype
    peak = rates.of_products(dtype, "highest" if dtype == "float32" else "default")
    return {
        "note": MODEL_NOTE,
        **{f"{part}_s": one.rounded() for part, one in by_part.items()},
        "seconds_of_a_full_step": round(seconds, 3),
        "tokens_per_second_and_device": round(micro * rows * tokens / seconds / compiled.mesh.size, 1),
        "model_flops_per_micro_batch": flops,
        "model_flops_utilisation": round(micro * flops / (seconds * compiled.mesh.size * peak), 4),
    }


def describe_work(facts: Report) -> str:
    """Formats a work report as lines of text."""
    line = facts["roofline"]
    flops, rest = (
        ", ".join(f"{dtype} {count:.3e}" for dtype, count in facts[f"flops_per_{part}"].items()) or "none"
        for part in ("micro_batch", "step")
    )
    lines = [f"  products     {flops} FLOPs a micro-batch; {rest} once a step"]
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
