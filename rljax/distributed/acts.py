"""The acts of a run: methods that all processes run at the same time, each on its own object."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import GenericAlias
from typing import Any, ClassVar, TypeVar, cast, get_type_hints

import msgspec

from rljax.distributed.messages import Announcement, pack, unpack
from rljax.distributed.processes import STOP, Processes

Item = TypeVar("Item")
Value = TypeVar("Value")
Method = TypeVar("Method", bound=Callable[..., Any])

OWN = ("state", "params")
"""The names of the arguments of acts that are not sent, because each process has its own."""


class Shared:
    """An object that each process of a run has. Its methods that ``together`` decorates are acts."""

    name: ClassVar[str]
    """The name of the object in announcements. It differs between the objects of a run."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes


def together(method: Method) -> Method:
    """Makes a method of a ``Shared`` an act. Process 0 calls it, and ``follow`` runs it in the other processes.

    The arguments are sent to them, except those named in ``OWN``. The types of the arguments tell ``messages.unpack``
    how to read them. A method that yields runs to its end in all processes, even if the caller stops early.
    """

    @functools.wraps(method)
    def lead(self: Shared, *given: Any, **named: Any) -> Any:
        if self.processes.count == 1:
            return method(self, *given, **named)
        bound = inspect.signature(method).bind(self, *given, **named).arguments
        announced = Announcement(self.name, method.__name__, pack([bound[name] for name in sent_types(method)]))
        if inspect.isgeneratorfunction(method):
            return to_the_end(self.processes, announced, method(**bound))
        with self.processes.together(announced):
            return method(**bound)

    return cast(Method, lead)


def follow(processes: Processes, shared: Iterable[Shared], own: Any) -> int:
    """Runs the acts that process 0 announces until it announces the end of the run. Returns the run's exit status.

    ``shared`` are the objects of this process. ``own`` has an attribute for each name in ``OWN``, and its method
    ``take`` gets the result of each act.
    """
    by_name = {each.name: each for each in shared}
    while (announced := processes.listen()).name != STOP:
        one = by_name[announced.name]
        method = inspect.unwrap(getattr(type(one), announced.method))
        with processes.following():
            types = sent_types(method)
            sent = unpack(announced.arguments, GenericAlias(tuple, tuple(types.values())))
            given = {name: getattr(own, name) for name in OWN if name in inspect.signature(method).parameters}
            made = method(one, **given, **dict(zip(types, sent, strict=True)))
            for _ in made if inspect.isgeneratorfunction(method) else ():
                pass
            own.take(made)
    return int(unpack(announced.arguments, int))


@functools.cache
def sent_types(method: Callable[..., Any]) -> Mapping[str, Any]:
    """Returns the types of the arguments that an act sends to the other processes, by the names of the arguments."""
    hints = get_type_hints(method)
    return {name: hints[name] for name in inspect.signature(method).parameters if name not in ("self", *OWN)}


def gather_results(processes: Processes, work: Callable[[], Any]) -> list[dict[str, Any]]:
    """Does ``work`` in every process, and gathers the results and OSErrors of all processes for ``values_of``.

    All processes call it. An OSError of one process is not raised here, so that all processes go on together.
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


def to_the_end(processes: Processes, announced: Announcement, items: Iterator[Item]) -> Iterator[Item]:
    """Yields the items of an act, which is announced when the first item is asked for.

    If the caller stops early, the remaining items are still computed. The other processes compute all items, too, and
    would wait for this one in collectives.
    """
    with processes.together(announced):
        try:
            for item in items:  # noqa: UP028 ("yield from" would close the items with this generator)
                yield item
        finally:
            for _ in items:
                pass
