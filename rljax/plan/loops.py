"""How often the loops of a compiled program run, where that is known without running it."""

from __future__ import annotations

import math
import re

from rljax.plan.hlo import Computation, Instruction, Module

_SAME_VALUE = ("bitcast", "convert", "copy", "copy-done", "copy-start")


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Executions of a loop's body; None where the program's input decides.

    XLA writes it down for GPUs. For TPUs it is read from a counter that starts from a constant, grows by one, and is
    compared with another.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known.group(1))
    condition, body = (module.computations[loop.called[part]] for part in ("condition", "body"))
    comparison = condition.root
    if comparison.opcode != "compare" or comparison.attribute("direction") != "LT":
        return None
    counter, limit = (_source(condition, name) for name in comparison.operands)
    index = counter.attribute("index")
    if counter.opcode != "get-tuple-element" or index is None:
        return None
    start = _element(computation, computation.instructions[loop.operands[0]], int(index))
    step = _element(body, body.root, int(index))
    if step is None or step.opcode != "add":
        return None
    before, increment = (_source(body, name) for name in step.operands)
    numbers = [_constant(one) for one in (start, limit, increment)]
    if before.attribute("index") != index or None in numbers:
        return None
    first, last, each = (number for number in numbers if number is not None)
    return max(0, math.ceil((last - first) / each))


def _source(computation: Computation, name: str) -> Instruction:
    """The instruction that a value comes from, copies left out."""
    one = computation.instructions[name]
    while one.opcode in _SAME_VALUE:
        one = computation.instructions[one.operands[0]]
    return one


def _element(computation: Computation, values: Instruction, index: int) -> Instruction | None:
    """Where an element of a tuple comes from; None for a tuple that is not made here."""
    return _source(computation, values.operands[index]) if values.opcode == "tuple" else None


def _constant(one: Instruction | None) -> int | None:
    """The value of an integer constant."""
    literal = one.literal if one is not None and one.opcode == "constant" else ""
    return int(literal) if re.fullmatch(r"-?\d+", literal) else None
