"""Reads the text of a compiled XLA program: computations, instructions, array shapes, replica groups, trip counts.

The text comes from ``jax.stages.Compiled.as_text()``; its grammar is XLA's (xla/hlo/parser/hlo_parser.cc).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

# The name of an element type in numpy or ml_dtypes and its bits, by its name in HLO.
ELEMENT_TYPES: dict[str, tuple[str, int]] = {
    "pred": ("bool", 8),
    **{f"s{bits}": (f"int{bits}", bits) for bits in (2, 4, 8, 16, 32, 64)},
    **{f"u{bits}": (f"uint{bits}", bits) for bits in (2, 4, 8, 16, 32, 64)},
    "bf16": ("bfloat16", 16),
    **{f"f{bits}": (f"float{bits}", bits) for bits in (16, 32, 64)},
    "f8e4m3fn": ("float8_e4m3fn", 8),
    "f8e5m2": ("float8_e5m2", 8),
    "c64": ("complex64", 64),
    "c128": ("complex128", 128),
}
_ARRAY = re.compile(r"\b(" + "|".join(ELEMENT_TYPES) + r")\[([\d,<=]*)\](?:\{(?:[^{}]*S\((\d+)\))?[^{}]*\})?")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) .*->.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_END = re.compile(r"\}(, execution_thread=.*)?$")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")


@dataclass(frozen=True)
class Array:
    """The shape of an array. Memory space 0 is the device's main memory; on a TPU 1 is on the chip, 5 on the host."""

    dtype: str
    dims: tuple[int, ...]
    memory_space: int = 0

    @property
    def bytes(self) -> int:
        """The size without padding, in bytes."""
        bits = next(bits for name, bits in ELEMENT_TYPES.values() if name == self.dtype)
        return math.prod(self.dims) * bits // 8


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str  # unique in the module, without ``%``
    arrays: tuple[Array, ...]  # the results, in order; a tuple has several
    opcode: str  # such as ``fusion``
    operands: tuple[str, ...]  # the names of instructions of the same computation
    attributes: str  # the text after the operands
    literal: str  # the text between the parentheses
    is_root: bool  # whether this is the computation's result

    @property
    def called(self) -> dict[str, str]:
        """The names of the called computations by attribute; branches are ``branch_0``, ``branch_1``, ..."""
        branches = _BRANCHES.search(self.attributes)
        names = re.findall(r"[\w.\-]+", branches.group(1)) if branches else []
        return dict(_CALLED.findall(self.attributes)) | {f"branch_{i}": name for i, name in enumerate(names)}

    def attribute(self, name: str) -> str | None:
        """Returns TEXT of ``name=TEXT`` or ``name={TEXT}``; None without such an attribute."""
        found = re.search(rf"\b{name}=(?:\{{([^{{}}]*)\}}|([\w.\->]+))", self.attributes)
        return None if found is None else found.group(1) if found.group(1) is not None else found.group(2)

    def integers(self, name: str) -> tuple[int, ...]:
        """Returns the integers of ``name={1,2}``; an empty tuple without such an attribute."""
        return tuple(int(text) for text in (self.attribute(name) or "").split(",") if text)


@dataclass(frozen=True)
class Computation:
    """The instructions of a computation by name, in the order in which they are scheduled."""

    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction that is the result."""
        return next(one for one in self.instructions.values() if one.is_root)

    @functools.cached_property
    def parameters(self) -> list[str]:
        """The names of the parameters, in the order of their numbers."""
        found = [one for one in self.instructions.values() if one.opcode == "parameter"]
        return [one.name for one in sorted(found, key=lambda one: int(one.literal))]

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that take the value of each instruction, by its name."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for one in self.instructions.values():
            for operand in dict.fromkeys(one.operands):
                users[operand].append(one)
        return users

    def operand_arrays(self, instruction: Instruction) -> list[tuple[Array, ...]]:
        """Returns the arrays of each operand."""
        return [self.instructions[name].arrays for name in instruction.operands]

    def source(self, name: str, through: Collection[str]) -> Instruction:
        """Returns the instruction that computes a value. Instructions with the opcodes ``through`` are skipped."""
        one = self.instructions[name]
        while one.opcode in through:
            one = self.instructions[one.operands[0]]
        return one


@dataclass(frozen=True)
class Module:
    """A compiled program: its computations by name, and the name of the entry computation."""

    computations: dict[str, Computation]
    entry: str


def parse_module(text: str) -> Module:
    """Reads a program from its text.

    Raises:
      ValueError: The text has no entry computation, so it is not a program.
    """
    computations: dict[str, Computation] = {}
    entry: str | None = None
    inside: dict[str, Instruction] | None = None
    for line in _logical_lines(text):
        if _END.match(line):
            inside = None
        elif not line.startswith(" "):
            if header := _HEADER.match(line):
                inside = {}
                computations[header.group(2)] = Computation(inside)
                entry = header.group(2) if header.group(1) else entry
        elif inside is not None and (instruction := _parse_instruction(line)):
            inside[instruction.name] = instruction
    if entry is None:
        raise ValueError("the text holds no entry computation of an HLO module")
    return Module(computations, entry)


def _logical_lines(text: str) -> Iterator[str]:
    """Yields the lines, with each instruction on one line; a kernel's metadata may contain line breaks."""
    line = ""
    for following in text.splitlines():
        is_new = not following or any(kind.match(following) for kind in (_INSTRUCTION, _END, _HEADER))
        if _INSTRUCTION.match(line) and not is_new:
            line += following
        else:
            yield line
            line = following
    yield line


def _parse_instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if head is None:
        return None
    start = head.end()
    end = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    opened = line.index("(", end)
    closed = _closing(line, opened)
    literal = line[opened + 1 : closed]
    return Instruction(
        name=head.group(2),
        arrays=parse_arrays(line[start:end]),
        opcode=line[end:opened].strip(),
        operands=tuple(re.findall(r"%([\w.\-]+)", literal)),
        attributes=line[closed + 1 :],
        literal=literal,
        is_root=head.group(1) is not None,
    )


def _closing(line: str, opened: int) -> int:
    depth = 0
    for parenthesis in re.finditer(r"[()]", line[opened:]):
        depth += 1 if parenthesis.group() == "(" else -1
        if depth == 0:
            return opened + parenthesis.start()
    raise ValueError(f"unbalanced parentheses in an instruction: {line.strip()[:80]}")


def parse_arrays(text: str) -> tuple[Array, ...]:
    """Reads the arrays of a type's text, in order: ``(f32[2,3]{1,0}, bf16[4]{0:S(1)})`` has two."""
    return tuple(
        Array(ELEMENT_TYPES[dtype][0], tuple(int(d.lstrip("<=")) for d in dims.split(",") if d), int(space or 0))
        for dtype, dims, space in _ARRAY.findall(text)
    )


_SAME_VALUE = ("bitcast", "convert", "copy", "copy-done", "copy-start")


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Returns the number of executions of a loop's body; None if the program's input decides it.

    For GPUs XLA writes the number down. For TPUs it follows from the loop's counter, which starts at a constant, grows
    by a constant, and is compared with a constant.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known.group(1))
    condition, body = (module.computations[loop.called[part]] for part in ("condition", "body"))
    comparison = condition.root
    if comparison.opcode != "compare" or comparison.attribute("direction") != "LT":
        return None
    counter, limit = (condition.source(name, _SAME_VALUE) for name in comparison.operands)
    index = counter.attribute("index")
    if counter.opcode != "get-tuple-element" or index is None:
        return None
    initial, final = computation.instructions[loop.operands[0]], body.root
    if initial.opcode != "tuple" or final.opcode != "tuple":
        return None
    start = computation.source(initial.operands[int(index)], _SAME_VALUE)
    step = body.source(final.operands[int(index)], _SAME_VALUE)
    if step.opcode != "add":
        return None
    before, increment = (body.source(name, _SAME_VALUE) for name in step.operands)
    constants = (start, limit, increment)
    if before.attribute("index") != index or not all(
        one.opcode == "constant" and re.fullmatch(r"-?\d+", one.literal) for one in constants
    ):
        return None
    first, last, each = (int(one.literal) for one in constants)
    return max(0, math.ceil((last - first) / each))


_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\(([^()]*(?:\([\d,]*\))?)\))? ?\{([^}]*)\}")
_IOTA = re.compile(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})?\}")
_AXIS = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?")


def replica_groups(instruction: Instruction, devices: int) -> list[list[int]]:
    """Returns the groups of a collective's partitions; a program has ``devices`` partitions in total.

    Each pair of a source and a target of a ``collective-permute`` is a group.

    Raises:
      ValueError: The groups have a form that the parser does not know.
    """
    text = instruction.attributes
    if pairs := re.search(r"source_target_pairs=\{(\{[\d,{} ]*\})?\}", text):
        return _listed(pairs.group(1) or "")
    if found := _MESH.search(text):
        return _of_mesh(*found.groups())
    if found := _IOTA.search(text):
        return _iota(found.group(1)).tolist()
    if found := _LISTED.search(text):
        return _listed(found.group(1)) if found.group(1) else [list(range(devices))]
    raise ValueError(f"{instruction.name}: its replica groups are not readable: {text[:200]}")


def _listed(text: str) -> list[list[int]]:
    return [_sizes(group) for group in re.findall(r"\{([\d, ]+)\}", text)]


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


def _iota(text: str) -> np.ndarray:
    """Reads ``[2,4]<=[4,2]T(1,0)``: 0, 1, 2, ... in the second shape, transposed, reshaped to the first shape."""
    shape, dims, order = re.fullmatch(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()  # type: ignore[union-attr]
    ids = np.arange(math.prod(_sizes(dims))).reshape(_sizes(dims))
    ids = ids.transpose(_sizes(order)) if order else ids
    return ids.reshape(_sizes(shape) if shape else -1)


def _of_mesh(axes: str, ids: str | None, wanted: str) -> list[list[int]]:
    """Returns the groups along some axes of a mesh; ``'a':(2)4`` is the part of size 4 of axis a after a part of 2."""
    sizes = {name.strip("' "): int(size) for name, size in (one.split("=") for one in axes.split(",") if one)}
    count = math.prod(sizes.values())
    devices = np.arange(count) if ids is None else _iota(ids) if "[" in ids else np.array(_sizes(ids))
    dims: list[tuple[str, int, int]] = []  # axis, size of the earlier parts of the axis, size
    chosen = [(axis, int(before or 1), int(size or sizes[axis])) for axis, before, size in _AXIS.findall(wanted)]
    for axis, size in sizes.items():
        cuts = {1, size}.union(*({before, before * part} for name, before, part in chosen if name == axis))
        dims += [(axis, low, high // low) for low, high in itertools.pairwise(sorted(cuts))]
    grid = devices.reshape([size for _, _, size in dims])
    last = [
        i
        for axis, before, size in chosen
        for i, (name, low, part) in enumerate(dims)
        if name == axis and before <= low and low * part <= before * size
    ]
    first = [i for i in range(len(dims)) if i not in last]
    members = math.prod(dims[i][2] for i in last)
    return grid.transpose(first + last).reshape(-1, members).tolist()
