"""Reads from a compiled program which exchanges between devices run behind other work, and models the exposed time.

The instructions of a compiled program stand in the order in which they start. An exchange with a start and an end of
its own runs at the same time as the kernels between them. The links carry one exchange at a time. So the time of an
exchange is the wait for an earlier one and its own time over the links. It is exposed for the part of this time that
exceeds the modelled time of the kernels between start and end. Copies that run at the same time as kernels delay
nothing. But a part never takes less time than all of its memory traffic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from compile.count import Work, counted_computation, instruction_work
from compile.hlo import Computation, Instruction, Module, trip_count
from compile.kernels import kernel_uses
from compile.roofline import times
from rljax.plan.machines import Card


@dataclass(frozen=True)
class Exchange:
    """One collective instruction; every number but ``count`` belongs to a single execution."""

    name: str  # the name of the instruction that starts the exchange
    kind: str  # the opcode in HLO, such as all-gather; several are joined by ``+``
    count: int  # the number of executions
    bytes: int  # the bytes of the complete arrays
    link_s: float  # the modelled seconds over the links
    covering_s: float  # the modelled seconds of the kernels between start and end
    covering_flops: int  # the operations of these kernels
    covering_bytes: int  # the bytes that these kernels read and write
    exposed_s: float  # the seconds for which the device waits


@dataclass
class Timeline:
    """The modelled seconds of a part of the program on one device."""

    work_s: float = 0.0  # the kernels, each at the rate of its products or of its memory traffic
    traffic_s: float = 0.0  # the memory traffic of kernels and copies
    link_s: float = 0.0  # all exchanges, one after another
    exposed_s: float = 0.0  # the part of ``link_s`` for which the device waits
    flops: int = 0  # the operations of all kernels
    memory_bytes: int = 0  # the bytes that all kernels read and write
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def elapsed_s(self) -> float:
        """The time of the kernels and of the exchanges that nothing hides."""
        return self.work_s + self.exposed_s

    @property
    def seconds(self) -> float:
        """The time of the part: the elapsed time, or that of the memory traffic if it is longer."""
        return max(self.elapsed_s, self.traffic_s)

    @property
    def exposed_share(self) -> float:
        """The exposed exchanges as a share of the time; 0 for a part without work."""
        return self.exposed_s / self.seconds if self.seconds else 0.0

    def add(self, other: Timeline, count: int = 1) -> None:
        """Adds ``count`` executions of another part."""
        for name in ("work_s", "traffic_s", "link_s", "exposed_s", "flops", "memory_bytes"):
            setattr(self, name, getattr(self, name) + count * getattr(other, name))
        self.exchanges += [dataclasses.replace(one, count=one.count * count) for one in other.exchanges]


@dataclass
class Overlap:
    """The timelines of a training step by part, as in ``count.Program``."""

    micro_batch: Timeline  # for each micro-batch with loss: the outermost open loop that takes longest
    forward: Timeline  # for each micro-batch without loss: all other outermost open loops
    step: Timeline  # once a step


def read_overlap(module: Module, card: Card, nodes: Sequence[int], segments: Sequence[int]) -> Overlap:
    """Models a compiled step's time, with its exchanges hidden by the work that is scheduled at the same time.

    Every device is a ``card``. ``nodes`` has the node of each partition. ``segments`` has the lengths of the segments
    in every row, in tokens, for the work of attention kernels.

    Raises:
      ValueError: The program has a form that the counter does not know.
    """
    reader = _Reader(module, card, nodes, segments)
    step = reader.run(module.computations[module.entry])
    first, *others = sorted(reader.open_loops, key=lambda loop: -loop.seconds) or [Timeline()]
    forward = Timeline()
    for loop in others:
        forward.add(loop)
    return Overlap(first, forward, step)


@dataclass(frozen=True)
class _Flight:
    """An exchange that has started and not ended."""

    instruction: Instruction
    work: Work
    link_s: float
    end_s: float  # the time at which the links have carried it
    work_s: float  # the timeline's ``work_s`` at the start
    flops: int  # the timeline's ``flops`` at the start
    memory_bytes: int  # the timeline's ``memory_bytes`` at the start


class _Reader:
    """A walk through the computations of a module in scheduled order."""

    def __init__(self, module: Module, card: Card, nodes: Sequence[int], segments: Sequence[int]):
        self._module, self._card, self._nodes, self._segments = module, card, nodes, segments
        self._is_inside = False
        self.open_loops: list[Timeline] = []

    def run(self, computation: Computation) -> Timeline:
        """Models one execution of a computation."""
        line, links_free = Timeline(), 0.0
        flights: dict[str, _Flight] = {}
        for one in computation.instructions.values():
            if one.opcode.endswith(("-done", "-update")):
                flight = flights.pop(one.operands[0], None)
                if flight is not None and one.opcode.endswith("-update"):
                    flights[one.name] = flight
                elif flight is not None:
                    self._land(line, flight)
                continue
            if one.opcode in ("while", "conditional", "call"):
                inner = self._inner(computation, one)
                links_free += inner.link_s if flights else 0.0
                line.add(inner)
                continue
            work = instruction_work(self._module, computation, one, len(self._nodes))
            uses = kernel_uses(work, self._segments)
            cost = times(work, uses, self._card, self._nodes)
            line.traffic_s += cost.memory
            if one.opcode.endswith("-start"):
                if work.collectives:
                    links_free = max(links_free, line.elapsed_s) + cost.links
                    start = line.work_s, line.flops, line.memory_bytes
                    flights[one.name] = _Flight(one, work, cost.links, links_free, *start)
                continue
            line.work_s += max(cost.products, cost.memory)
            line.flops += sum(work.flops.values()) + sum(use.flops or 0 for use in uses)
            line.memory_bytes += work.memory_bytes
            if work.collectives:  # nothing else runs at the same time
                end = max(links_free, line.elapsed_s) + cost.links
                links_free = end
                self._land(line, _Flight(one, work, cost.links, end, line.work_s, line.flops, line.memory_bytes))
        return line

    def _land(self, line: Timeline, flight: _Flight) -> None:
        exposed = max(0.0, flight.end_s - line.elapsed_s)
        line.exchanges.append(
            Exchange(
                name=flight.instruction.name,
                kind="+".join(sorted({one.kind for one in flight.work.collectives})),
                count=1,
                bytes=sum(one.bytes for one in flight.work.collectives),
                link_s=flight.link_s,
                covering_s=line.work_s - flight.work_s,
                covering_flops=line.flops - flight.flops,
                covering_bytes=line.memory_bytes - flight.memory_bytes,
                exposed_s=exposed,
            )
        )
        line.link_s += flight.link_s
        line.exposed_s += exposed

    def _inner(self, computation: Computation, one: Instruction) -> Timeline:
        """Models one execution of a loop, a call or a conditional. An outermost open loop goes to ``open_loops``."""
        if one.opcode != "while":
            return self.run(counted_computation(self._module, one, len(self._nodes)))
        body = self._module.computations[one.called["body"]]
        trips = trip_count(self._module, computation, one)
        if trips is None and not self._is_inside:
            self._is_inside = True
            self.open_loops.append(self.run(body))
            self._is_inside = False
            return Timeline()
        line = Timeline()
        line.add(self.run(body), 1 if trips is None else trips)
        return line
