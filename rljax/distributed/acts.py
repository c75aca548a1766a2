"""The acts of a run: work that all processes do at the same time. One class has the sides of leader and followers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import numpy as np

from rljax.distributed.messages import Request
from rljax.distributed.processes import STOP, Processes

Local = TypeVar("Local")
Item = TypeVar("Item")
Value = TypeVar("Value")


class Act(Generic[Local]):
    """Work that all processes of a run do at the same time.

    Process 0 leads: a method of a subclass announces the work with ``lead`` and does it. Every other process follows:
    it hears the announcement and does the same work on its own shards in ``follow``.
    """

    name: ClassVar[str]
    """The name of the act in announcements; it differs between the acts of a run."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes

    def lead(
        self, part: str = "", fields: Mapping[str, Any] | None = None, arrays: Mapping[str, np.ndarray] | None = None
    ) -> AbstractContextManager[None]:
        """Announces a part of this act, with the fields and arrays of a ``Request``. Process 0 works in the block."""
        return self.processes.together(Request(self.name, part, fields or {}, arrays or {}))

    def follow(self, request: Request, local: Local) -> None:
        """Does the side of a process other than 0; acts read and replace the objects in ``local``."""
        raise NotImplementedError


def follow(processes: Processes, acts: Iterable[Act[Local]], local: Local) -> int:
    """Follows the announcements of process 0 until it announces the end of the run. Returns the run's exit status.

    Each announcement names one of ``acts``, which reads and replaces the objects in ``local``.
    """
    by_name = {act.name: act for act in acts}
    while (request := processes.listen()).act != STOP:
        with processes.following():
            by_name[request.act].follow(request, local)
    return int(request.fields["status"])


def gather_results(processes: Processes, work: Callable[[], Any]) -> list[dict[str, Any]]:
    """Does ``work`` in every process, and gathers the results and OSErrors of all processes for ``values_of``.

    All processes call it. An OSError in one process is not raised here, so that all stay at the same place.
    """
    try:
        result: Any = {"value": msgspec.to_builtins(work())}
    except OSError as error:
        result = {"error": f"process {processes.index}: {error}"}
    return processes.gather(result)


def values_of(results: Sequence[Mapping[str, Any]], kind: type[Value]) -> list[Value]:
    """Converts the values that ``gather_results`` gathered to ``kind``, in the order of the processes.

    Raises OSError if ``work`` raised OSError in a process. The message has the errors of all processes.
    """
    errors = [result["error"] for result in results if "error" in result]
    if errors:
        raise OSError("; ".join(errors))
    return [msgspec.convert(result["value"], kind) for result in results]


def to_the_end(items: Iterator[Item]) -> Iterator[Item]:
    """Yields the items. If the caller stops early, the remaining items are still computed.

    The other processes compute all items, too, and would wait for this one in collectives.
    """
    try:
        for item in items:  # noqa: UP028 ("yield from" would close the items with this generator)
            yield item
    finally:
        for _ in items:
            pass
