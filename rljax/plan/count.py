"""What a compiled training step does: products, traffic to memory and collectives, with the trip counts of its loops.

The micro-batches are loops whose trip counts are known only when the step runs: one over those that carry loss, and one
over the others, which take a forward alone. So everything is counted for one micro-batch of either and, apart from
them, for what is done once a step. A loop of such a kind inside another one counts as run once each time: the rounds of
a mixture's experts, of which one is enough while the routing is even. Of a conditional one branch counts: one that
calls an attention kernel (its alternative is for rare batches), else the one that moves most bytes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from rljax.plan.hlo import Array, Computation, Instruction, Module, replica_groups
from rljax.plan.loops import trip_count

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
ATTENTION_KERNEL = re.compile(r'__cudnn\$fmha|"tpu_custom_call".*(splash|flash)')
"""What the attributes of a custom call hold that computes attention."""
# They move nothing themselves; what they call, if anything, is counted.
_FREE = {
    "add-dependency",
    "after-all",
    "bitcast",
    "call",
    "conditional",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "optimization-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
    "while",
}
_SLICES = ("dynamic-slice", "gather", "slice")
_VIEWS = ("bitcast", "convert", "copy", "reshape", "transpose")


@dataclass(frozen=True)
class Collective:
    """Exchanges between devices of one kind, dtype and grouping, added up.

    Attributes:
      kind: HLO's opcode.
      dtype: of the elements.
      groups: partitions that work together.
      count: executions; one that carries arrays of several dtypes counts for each of them.
      bytes: of the complete arrays on one device, added up: what an all-gather gives, what the others take.
    """

    kind: str
    dtype: str
    groups: tuple[tuple[int, ...], ...]
    count: int
    bytes: int


@dataclass
class Work:
    """What one device does.

    Attributes:
      flops: (dtype of the operands, their precision) -> floating-point operations of products, two per multiply-add.
        The precision is ``default``, ``high`` or ``highest``; dtypes that differ are joined by ``x``.
      untaken_flops: as ``flops``, in branches of conditionals that are not counted.
      memory_bytes: read from and written to the device's memory by every kernel, as if no cache kept anything.
      collectives: exchanges.
      kernels: custom calls with their number of executions; what they multiply is not in ``flops``.
    """

    flops: Counter[tuple[str, str]] = field(default_factory=Counter)
    untaken_flops: Counter[tuple[str, str]] = field(default_factory=Counter)
    memory_bytes: int = 0
    collectives: list[Collective] = field(default_factory=list)
    kernels: list[tuple[Computation, Instruction, int]] = field(default_factory=list)

    @property
    def calls_attention(self) -> bool:
        """Whether any of ``kernels`` computes attention."""
        return any(ATTENTION_KERNEL.search(call.attributes) for _, call, _ in self.kernels)

    def add(self, other: Work) -> None:
        """Adds what another part of the program does."""
        self.flops.update(other.flops)
        self.untaken_flops.update(other.untaken_flops)
        self.memory_bytes += other.memory_bytes
        self.collectives += other.collectives
        self.kernels += other.kernels

    def merged_collectives(self) -> list[Collective]:
        """One entry for each kind, dtype and grouping, the largest first."""
        merged: dict[tuple[str, str, tuple[tuple[int, ...], ...]], Collective] = {}
        for one in self.collectives:
            key = (one.kind, one.dtype, one.groups)
            before = merged.get(key, dataclasses.replace(one, count=0, bytes=0))
            merged[key] = dataclasses.replace(one, count=before.count + one.count, bytes=before.bytes + one.bytes)
        return sorted(merged.values(), key=lambda one: -one.bytes)


def by_dtype(flops: Counter[tuple[str, str]]) -> dict[str, int]:
    """Floating-point operations by the dtype of the operands alone."""
    totals: Counter[str] = Counter()
    for (dtype, _), count in flops.items():
        totals[dtype] += count
    return dict(sorted(totals.items()))


@dataclass
class Program:
    """A training step.

    Attributes:
      micro_batch: what is done for each micro-batch: the loop without a trip count that moves most bytes.
      forward: what is done for each micro-batch without loss: the other such loops.
      step: what is done once.
      open_loops: number of outermost loops without a trip count. One more than two would be counted as if it ran once a
        forward.
      inner_open_loops: number of those inside of them.
    """

    micro_batch: Work
    forward: Work
    step: Work
    open_loops: int
    inner_open_loops: int


def count_program(module: Module, devices: int) -> Program:
    """Counts a compiled training step on ``devices`` partitions.

    Raises:
      ValueError: the groups of a collective, or a product, are written in a form that is not known here.
    """
    counter = _Counter(module, devices)
    step = counter.scheduled(module.computations[module.entry], 1)
    first, *others = sorted(counter.open_loops, key=lambda loop: -loop.memory_bytes) or [Work()]
    forward = Work()
    for loop in others:
        forward.add(loop)
    return Program(first, forward, step, len(counter.open_loops), counter.inner_open_loops)


class _Counter:
    """Walks the computations of a module."""

    def __init__(self, module: Module, devices: int):
        self._module, self._devices = module, devices
        self.open_loops: list[Work] = []
        self.inner_open_loops = 0
        self._is_inside = False

    def scheduled(self, computation: Computation, times: int) -> Work:
        """What a computation of which every instruction is a kernel or control flow does in ``times`` executions."""
        work = Work()
        for one in computation.instructions.values():
            kind = one.opcode.removesuffix("-start")
            if one.opcode == "while":
                work.add(self._loop(computation, one, times))
            elif one.opcode == "conditional":
                branches = [self._called(one, name, times) for name in one.called]
                _add_branches(work, branches)
            elif kind in ("call", "async"):
                work.add(self._called(one, next(iter(one.called)), times))
            elif not one.opcode.endswith(("-done", "-update")):
                self._kernel(work, computation, one, times)
        return work

    def _called(self, one: Instruction, attribute: str, times: int) -> Work:
        return self.scheduled(self._module.computations[one.called[attribute]], times)

    def _loop(self, computation: Computation, one: Instruction, times: int) -> Work:
        trips = trip_count(self._module, computation, one)
        if trips is not None:
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
        arrays = [array for operand in computation.operand_arrays(one) for array in operand]
        kind = one.opcode.removesuffix("-start")
        ratio = len(groups[0]) if kind == "all-gather" else 1
        sizes: Counter[str] = Counter()
        for array in arrays:
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

    def _inside(self, computation: Computation, one: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """A kernel's instructions: itself, and those of the computations fused into it."""
        yield computation, one
        if one.opcode in ("fusion", "fusion-start") and "calls" in one.called:
            fused = self._module.computations[one.called["calls"]]
            for instruction in fused.instructions.values():
                yield from self._inside(fused, instruction)

    def _memory_bytes(self, computation: Computation, one: Instruction) -> int:
        """Bytes that a kernel reads and writes: each operand once, of what it slices only the slice."""
        if one.opcode in ("fusion", "fusion-start") and "calls" in one.called:
            fused = self._module.computations[one.called["calls"]]
            return sum(_read_by_fusion(fused)) + _written(fused)
        operands = [_main_memory(arrays) for arrays in computation.operand_arrays(one)]
        kind = one.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            members = len(replica_groups(one, self._devices)[0])
            ratio = {"all-gather": 1 + members, "reduce-scatter": 1 + 1 / members}.get(kind, 2)
            return round(ratio * sum(operands))
        if one.opcode == "copy-start":
            return _main_memory(one.arrays)  # (to, from, context)
        if one.opcode in _SLICES:
            return 2 * _main_memory(one.arrays) + sum(operands[1:])
        if one.opcode == "dynamic-update-slice":
            return 2 * operands[1]
        if one.opcode == "scatter":
            return sum(operands) + operands[-1] - operands[0]
        return sum(operands) + _main_memory(one.arrays)


def _add_branches(work: Work, branches: list[Work]) -> None:
    """Adds the branch of a conditional that counts, and of the others what they would multiply."""
    *others, taken = sorted(branches, key=lambda branch: (branch.calls_attention, branch.memory_bytes))
    work.add(taken)
    for branch in others:
        work.untaken_flops.update(branch.flops)
        work.untaken_flops.update(branch.untaken_flops)


def _main_memory(arrays: tuple[Array, ...]) -> int:
    return sum(array.bytes for array in arrays if array.memory_space == 0)


def _read_by_fusion(fused: Computation) -> Iterator[int]:
    """Bytes read of each parameter: what is sliced from it where that is all that is done with it."""
    users: dict[str, list[Instruction]] = {name: [] for name in fused.instructions}
    for one in fused.instructions.values():
        for operand in one.operands:
            users[operand].append(one)

    def read(name: str) -> int:
        whole = _main_memory(fused.instructions[name].arrays)
        total = 0
        for user in users[name]:
            first = user.operands[0] == name
            if first and user.opcode in _SLICES:
                total += _main_memory(user.arrays)
            elif first and user.opcode == "dynamic-update-slice":
                total += 0  # written in place
            elif user.opcode in ("bitcast", "reshape") and not user.is_root:
                total += read(user.name)
            else:
                return whole
        return min(total, whole)

    for name, one in fused.instructions.items():
        if one.opcode == "parameter":
            yield read(name)


def _written(fused: Computation) -> int:
    """Bytes written by a fusion: of an array that is updated in place only the update."""

    def of(name: str) -> int:
        one = fused.instructions[name]
        source = one
        while source.opcode in _VIEWS:
            source = fused.instructions[source.operands[0]]
        if source.opcode == "dynamic-update-slice":
            return _main_memory(fused.instructions[source.operands[1]].arrays)
        return _main_memory(one.arrays)

    root = fused.root
    return sum(map(of, root.operands)) if root.opcode == "tuple" else of(root.name)


# --- floating-point operations of one product -------------------------------------------------------------------------


def _is_gemm(one: Instruction) -> bool:
    return one.opcode == "custom-call" and "__cublas$" in one.attributes


def _product(computation: Computation, one: Instruction) -> tuple[tuple[str, str], int]:
    """((operands' dtype, precision), floating-point operations) of a product."""
    left, right = (arrays[0] for arrays in computation.operand_arrays(one)[:2])
    dtypes = "x".join(sorted({left.dtype, right.dtype}))
    count = _convolution_flops(one, left, right) if one.opcode == "convolution" else _dot_flops(one, left)
    return (dtypes, _precision(one)), count


def _precision(one: Instruction) -> str:
    text = (one.attribute("operand_precision") or "") + "".join(
        re.findall(r'"operand_precision":\[([^\]]*)\]', one.attributes)
    ).lower()
    return "highest" if "highest" in text else "high" if "high" in text else "default"


def _dot_flops(one: Instruction, left: Array) -> int:
    """Two operations for each element of the result and each contracted index."""
    contracted = one.integers("lhs_contracting_dims")
    if _is_gemm(one):
        found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', one.attributes)
        if found is None:
            raise ValueError(f"{one.name}: a matrix product without contracting dimensions")
        contracted = tuple(int(text.strip('" ')) for text in found.group(1).split(","))
    return 2 * math.prod(one.arrays[0].dims) * math.prod(left.dims[i] for i in contracted)


def _convolution_flops(one: Instruction, left: Array, right: Array) -> int:
    """Two operations for each pair of an input and a kernel element that meet; padding and holes are not counted."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes)
    if labels is None:
        raise ValueError(f"{one.name}: a convolution without dim_labels")
    inputs, kernel, outputs = labels.groups()
    spatial = sum(label.isdigit() for label in inputs)
    window = {key: value.split("x") for key, value in re.findall(r"(\w+)=([\w\-x]+)", one.attribute("window") or "")}

    def of(key: str, default: str) -> list[str]:
        return window.get(key, [default] * spatial)

    pairs = 1
    for i in range(spatial):
        pairs *= _meetings(
            left.dims[inputs.index(str(i))],
            right.dims[kernel.index(str(i))],
            one.arrays[0].dims[outputs.index(str(i))],
            int(of("stride", "1")[i]),
            int(of("pad", "0_0")[i].split("_")[0]),
            int(of("lhs_dilate", "1")[i]),
            int(of("rhs_dilate", "1")[i]),
        )
    batch_groups = int(one.attribute("batch_group_count") or 1)
    batch = left.dims[inputs.index("b")] // batch_groups
    return 2 * pairs * batch * right.dims[kernel.index("i")] * right.dims[kernel.index("o")]


def _meetings(size: int, kernel: int, out: int, stride: int, low: int, dilate: int, kernel_dilate: int) -> int:
    """(place of the output, element of the kernel) pairs that meet an element of the input along one dimension."""
    return sum(
        (place := o * stride + k * kernel_dilate - low) >= 0 and place % dilate == 0 and place // dilate < size
        for o in range(out)
        for k in range(kernel)
    )
