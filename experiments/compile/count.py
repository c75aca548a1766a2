"""Counts the products, memory traffic and collectives of a compiled training step, with the trip counts of its loops.

Two loops over micro-batches have trip counts that are known only when the step runs. One is over micro-batches that
carry loss; the other is over those that need only a forward pass. So the work is counted in three parts: one
micro-batch of each loop, and the rest of the step.

An open loop inside another one counts as run once. Such loops are the rounds of a mixture's experts, where one round is
enough while the routing is even. One branch of a conditional counts: a branch that calls an attention kernel, otherwise
the branch that moves most bytes. The alternative to an attention kernel is for rare batches.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from compile.hlo import Array, Computation, Instruction, Module, replica_groups, trip_count

COLLECTIVES = {
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all",
    "reduce-scatter",
}  # fmt: skip
# The pattern that the attributes of a custom call match if it computes attention.
_ATTENTION = re.compile(r'__cudnn\$fmha|"tpu_custom_call".*(splash|flash)')
# These instructions move nothing themselves. The computations that they call are counted.
_FREE = {
    "add-dependency", "after-all", "bitcast", "call", "conditional", "constant", "get-tuple-element", "opt-barrier",
    "optimization-barrier", "parameter", "partition-id", "replica-id", "tuple", "while",
}  # fmt: skip
_SLICES = ("dynamic-slice", "gather", "slice")
_VIEWS = ("bitcast", "convert", "copy", "reshape", "transpose")


@dataclass(frozen=True)
class Collective:
    """The sum of the exchanges between devices of one kind, dtype and grouping."""

    kind: str  # the opcode in HLO
    dtype: str  # the dtype of the elements
    groups: tuple[tuple[int, ...], ...]  # the partitions that exchange arrays
    count: int  # the number of executions; an exchange of arrays of several dtypes counts once for each dtype
    bytes: int  # the sum of the complete arrays on one device: outputs of an all-gather, inputs of the others


@dataclass
class Work:
    """The work of one device."""

    flops: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The floating-point operations of products by dtype and precision of the operands; a multiply-add is two. The
    precision is ``default``, ``high`` or ``highest``. Two different dtypes are joined by ``x``."""
    untaken_flops: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The same operations in the branches of conditionals that do not count."""
    memory_bytes: int = 0
    """The bytes that every kernel reads from and writes to the device's memory, without any cache."""
    collectives: list[Collective] = field(default_factory=list)
    kernels: list[tuple[Computation, Instruction, int]] = field(default_factory=list)
    """The custom calls with their number of executions. Their products are not in ``flops``."""

    def add(self, other: Work) -> None:
        """Adds the work of another part of the program."""
        for each in dataclasses.fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def merged_collectives(self) -> list[Collective]:
        """Merges the collectives of the same kind, dtype and grouping; the largest comes first."""
        sums: dict[Any, list[int]] = {}
        for one in self.collectives:
            counts = sums.setdefault((one.kind, one.dtype, one.groups), [0, 0])
            counts[:] = counts[0] + one.count, counts[1] + one.bytes
        merged = [Collective(*key, *counts) for key, counts in sums.items()]
        return sorted(merged, key=lambda one: -one.bytes)


def by_dtype(flops: Counter[tuple[str, str]]) -> dict[str, int]:
    """Sums floating-point operations by the dtype of the operands only."""
    totals: Counter[str] = Counter()
    for (dtype, _), count in flops.items():
        totals[dtype] += count
    return dict(sorted(totals.items()))


@dataclass
class Program:
    """The work of a training step by part. An open loop is one without a known trip count."""

    micro_batch: Work  # for each micro-batch with loss: the outermost open loop that moves most bytes
    forward: Work  # for each micro-batch without loss: all other outermost open loops
    step: Work  # once a step
    open_loops: int  # the number of outermost open loops; a third one would count as part of ``forward``
    inner_open_loops: int  # the number of open loops inside the outermost ones


def count_program(module: Module, devices: int) -> Program:
    """Counts the work of a compiled training step on ``devices`` partitions.

    Raises:
      ValueError: The groups of a collective, or a product, have a form that the counter does not know.
    """
    counter = _Counter(module, devices)
    step = counter.scheduled(module.computations[module.entry], 1)
    first, *others = sorted(counter.open_loops, key=lambda loop: -loop.memory_bytes) or [Work()]
    forward = Work()
    for loop in others:
        forward.add(loop)
    return Program(first, forward, step, len(counter.open_loops), counter.inner_open_loops)


class _Counter:
    def __init__(self, module: Module, devices: int):
        self._module, self._devices = module, devices
        self.open_loops: list[Work] = []
        self.inner_open_loops = 0
        self._is_inside = False

    def scheduled(self, computation: Computation, times: int) -> Work:
        """Counts ``times`` executions of a computation whose instructions are all kernels or control flow."""
        work = Work()
        for one in computation.instructions.values():
            work.add(self.executed(computation, one, times))
        return work

    def executed(self, computation: Computation, one: Instruction, times: int) -> Work:
        """Counts ``times`` executions of a kernel or of control flow."""
        work, kind = Work(), one.opcode.removesuffix("-start")
        if one.opcode == "while":
            work.add(self._loop(computation, one, times))
        elif one.opcode == "conditional":
            _add_branches(work, [self._called(one, name, times) for name in one.called])
        elif kind in ("call", "async"):
            work.add(self._called(one, next(iter(one.called)), times))
        elif not one.opcode.endswith(("-done", "-update")):
            self._kernel(work, computation, one, times)
        return work

    def _called(self, one: Instruction, attribute: str, times: int) -> Work:
        return self.scheduled(self._module.computations[one.called[attribute]], times)

    def _loop(self, computation: Computation, one: Instruction, times: int) -> Work:
        if (trips := trip_count(self._module, computation, one)) is not None:
            return self._called(one, "body", times * trips)
        if self._is_inside:
            self.inner_open_loops += 1
            return self._called(one, "body", times)
        self._is_inside = True
        self.open_loops.append(self._called(one, "body", times))
        self._is_inside = False
        return Work()

    def _collective(self, work: Work, computation: Computation, one: Instruction, times: int) -> None:
        groups = tuple(map(tuple, replica_groups(one, self._devices)))
        kind = one.opcode.removesuffix("-start")
        ratio = len(groups[0]) if kind == "all-gather" else 1
        sizes: Counter[str] = Counter()
        for array in itertools.chain(*computation.operand_arrays(one)):
            sizes[array.dtype] += array.bytes * ratio
        for dtype, size in sizes.items():
            work.collectives.append(Collective(kind, dtype, groups, times, size * times))

    def _kernel(self, work: Work, computation: Computation, one: Instruction, times: int) -> None:
        if one.opcode in _FREE or 'custom_call_target="AllocateBuffer"' in one.attributes:
            return
        work.memory_bytes += times * self._memory_bytes(computation, one)
        for inner, instruction in self._inside(computation, one):
            if instruction.opcode in ("dot", "convolution") or _is_gemm(instruction):
                dtypes, flops = _product(inner, instruction)
                work.flops[dtypes] += times * flops
            elif instruction.opcode.removesuffix("-start") in COLLECTIVES:
                self._collective(work, inner, instruction, times)
            elif instruction.opcode == "custom-call":
                work.kernels.append((inner, instruction, times))

    def _fused(self, one: Instruction) -> Computation | None:
        is_fusion = one.opcode.removesuffix("-start") == "fusion" and "calls" in one.called
        return self._module.computations[one.called["calls"]] if is_fusion else None

    def _inside(self, computation: Computation, one: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """Yields a kernel's own instruction and the instructions of the computations fused into it."""
        yield computation, one
        if fused := self._fused(one):
            for instruction in fused.instructions.values():
                yield from self._inside(fused, instruction)

    def _memory_bytes(self, computation: Computation, one: Instruction) -> int:
        """Counts the bytes that a kernel reads and writes: each operand once, or only the slice that it takes."""
        if fused := self._fused(one):
            read = sum(_read(self._module, fused, name) for name in fused.parameters)
            return read + _written(self._module, fused)
        operands = [_main_memory(arrays) for arrays in computation.operand_arrays(one)]
        kind = one.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            members = len(replica_groups(one, self._devices)[0])
            ratio = {"all-gather": 1 + members, "reduce-scatter": 1 + 1 / members}.get(kind, 2)
            return round(ratio * sum(operands))
        if one.opcode == "copy-start":
            return _main_memory(one.arrays)  # (to, from, context)
        if one.opcode == "slice-start":
            source, part, *_ = one.arrays  # ((from), to, context)
            return sum(part.bytes for place in (source, part) if place.memory_space == 0)
        if one.opcode in _SLICES:
            return 2 * _main_memory(one.arrays) + sum(operands[1:])
        if one.opcode == "dynamic-update-slice":
            return 2 * operands[1]
        if one.opcode == "scatter":
            return sum(operands) + operands[-1] - operands[0]
        return sum(operands) + _main_memory(one.arrays)


def _add_branches(work: Work, branches: list[Work]) -> None:
    """Adds the work of the branch that counts; the products of the other branches are added to ``untaken_flops``."""
    *others, taken = sorted(branches, key=_rank)
    work.add(taken)
    for branch in others:
        work.untaken_flops += branch.flops + branch.untaken_flops


def _rank(branch: Work) -> tuple[bool, int]:
    return any(_ATTENTION.search(call.attributes) for _, call, _ in branch.kernels), branch.memory_bytes


def _main_memory(arrays: tuple[Array, ...]) -> int:
    return sum(array.bytes for array in arrays if array.memory_space == 0)


def _read(module: Module, fused: Computation, name: str) -> int:
    """Counts the bytes that a fusion reads of one of its values. If it uses only slices of it, only these count."""
    whole = _main_memory(fused.instructions[name].arrays)
    total = 0
    for user in fused.users[name]:
        first = user.operands[0] == name
        if first and user.opcode == "dynamic-update-slice":
            continue  # written in place
        if first and user.opcode in _SLICES:
            total += _main_memory(user.arrays)
        elif user.opcode in ("bitcast", "reshape") and not user.is_root:
            total += _read(module, fused, user.name)
        elif user.opcode == "fusion":  # on a TPU, a fusion may hold others
            inner = module.computations[user.called["calls"]]
            parameters = zip(user.operands, inner.parameters, strict=True)
            total += sum(_read(module, inner, parameter) for operand, parameter in parameters if operand == name)
        else:
            return whole
    return min(total, whole)


def _written(module: Module, fused: Computation) -> int:
    """Counts the bytes that a fusion writes. If it updates an array in place, only the update counts."""
    root = fused.root
    results = root.operands if root.opcode == "tuple" else (root.name,)
    return sum(_main_memory((_update(module, fused, name) or fused.instructions[name]).arrays) for name in results)


def _update(module: Module, fused: Computation, name: str) -> Instruction | None:
    """Returns the update of a result that a fusion, or one inside it, writes into an array in place; else None."""
    source = fused.source(name, _VIEWS)
    if source.opcode == "fusion":
        inner = module.computations[source.called["calls"]]
        return _update(module, inner, inner.root.name)
    return fused.instructions[source.operands[1]] if source.opcode == "dynamic-update-slice" else None


def _is_gemm(one: Instruction) -> bool:
    return one.opcode == "custom-call" and "__cublas$" in one.attributes


def _product(computation: Computation, one: Instruction) -> tuple[tuple[str, str], int]:
    """Returns ((operands' dtype, precision), floating-point operations) of a product."""
    left, right = (arrays[0] for arrays in computation.operand_arrays(one)[:2])
    dtypes = "x".join(sorted({left.dtype, right.dtype}))
    count = _convolution_flops(one, left, right) if one.opcode == "convolution" else _dot_flops(one, left)
    text = "".join(re.findall(r'"operand_precision":\[([^\]]*)\]', one.attributes)).lower()
    text += one.attribute("operand_precision") or ""
    return (dtypes, "highest" if "highest" in text else "high" if "high" in text else "default"), count


def _dot_flops(one: Instruction, left: Array) -> int:
    """Counts two operations for each element of the result and each contracted index."""
    contracted = one.integers("lhs_contracting_dims")
    if _is_gemm(one):
        listed = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', one.attributes)
        if listed is None:
            raise ValueError(f"{one.name}: a matrix product without contracting dimensions")
        contracted = tuple(int(text.strip('" ')) for text in listed.group(1).split(","))
    return 2 * math.prod(one.arrays[0].dims) * math.prod(left.dims[i] for i in contracted)


def _convolution_flops(one: Instruction, left: Array, right: Array) -> int:
    """Counts two operations for each input and kernel element that meet; padding and holes do not count."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes)
    if labels is None:
        raise ValueError(f"{one.name}: a convolution without dim_labels")
    inputs, kernel, outputs = labels.groups()
    spatial = sum(label.isdigit() for label in inputs)
    window = {key: value.split("x") for key, value in re.findall(r"(\w+)=([\w\-x]+)", one.attribute("window") or "")}
    defaults = {"stride": "1", "pad": "0_0", "lhs_dilate": "1", "rhs_dilate": "1"}
    pairs = 1
    for i in range(spatial):
        sizes = (left.dims[inputs.index(str(i))], right.dims[kernel.index(str(i))])
        settings = (int(window[key][i].split("_")[0] if key in window else defaults[key][0]) for key in defaults)
        pairs *= _meetings(*sizes, one.arrays[0].dims[outputs.index(str(i))], *settings)
    batch_groups = int(one.attribute("batch_group_count") or 1)
    batch = left.dims[inputs.index("b")] // batch_groups
    return 2 * pairs * batch * right.dims[kernel.index("i")] * right.dims[kernel.index("o")]


def _meetings(size: int, kernel: int, out: int, stride: int, low: int, dilate: int, kernel_dilate: int) -> int:
    """Counts the pairs of an output place and a kernel element that meet an input element along one dimension."""
    return sum(
        (place := o * stride + k * kernel_dilate - low) >= 0 and place % dilate == 0 and place // dilate < size
        for o in range(out)
        for k in range(kernel)
    )
