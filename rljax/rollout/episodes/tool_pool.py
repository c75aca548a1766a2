"""Runs tools in worker processes, as rewards run, and counts their calls and failures."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

from rljax.distributed.child import LONGEST, Child, ChildPool, Decoder, LostError, NotSentError
from rljax.errors import printable
from rljax.rollout.episodes.config import MAX_REPLY_CHARS, EpisodeConfig
from rljax.rollout.episodes.outcomes import UTF8_BYTES, clip
from rljax.rollout.episodes.tools import ToolArguments, ToolResult

log = logging.getLogger(__name__)

_IMPORT_S = 60.0
_SHOWN = 320  # characters of the text of a failure
_COMPLAINT = Decoder(str | None)
_RESULT = Decoder(ToolResult)
_COUNTED = {"error": "turns/tool_errors", "timeout": "turns/tool_timeouts", "died": "turns/tool_deaths"}
KEYS = ("turns/tool_calls", *_COUNTED.values(), "turns/tool_cut")


class ToolPool:
    """Processes that run tools. They start with the first call."""

    def __init__(self, limits: EpisodeConfig, workers: int | None):
        """Sets the limits, and the number of processes as for ``ChildPool``.

        The wait for a free process does not count as time of a call. A process that takes too long is replaced.
        """
        self._timeout_s = limits.tool_timeout_s
        program, longest = "rljax.rollout.episodes.tools:run_tools", LONGEST + UTF8_BYTES * MAX_REPLY_CHARS
        start = functools.partial(Child, "tool worker", program, (), limits.memory_gib, longest=longest)
        make = functools.partial(start, on_unasked=self._count_unasked)
        self._start: Callable[[], ChildPool] = functools.partial(ChildPool, make, workers)
        self._pool: ChildPool | None = None
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._closed = False

    def submit(
        self,
        path: str,
        arguments: ToolArguments | bytes,
        counted: bool = True,
        began: Callable[[], None] | None = None,
    ) -> Future[ToolResult]:
        """Starts to call the function ``path`` with named or listed arguments, or the pickle of them.

        ``counted``: Whether the call counts in the metrics. ``began`` is called on another thread, once a free process
        has imported the function. The result is a future, also of a failure. The future itself raises RuntimeError only
        if no process can be started, and CancelledError after ``close``.

        Raises:
          RuntimeError: The pool is closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool of tools is closed")
            if self._pool is None:
                self._pool = self._start()
            return self._pool.submit(functools.partial(self._call, path, arguments, counted, began))

    def count_refused(self) -> None:
        """Counts a call and an error for a call that an environment refused before it came here."""
        with self._lock:
            self._counts["turns/tool_calls"] += 1
            self._counts[_COUNTED["error"]] += 1

    def pop_metrics(self) -> dict[str, int]:
        """Returns the counts since the last call, by the names in ``KEYS``."""
        with self._lock:
            counts = {key: self._counts[key] for key in KEYS}
            self._counts.clear()
        return counts

    def close(self) -> None:
        """Ends every process at once and cancels the waiting calls. A second call does nothing."""
        with self._lock:
            self._closed = True
        if self._pool is not None:
            self._pool.close()

    def _call(
        self,
        path: str,
        arguments: ToolArguments | bytes,
        counted: bool,
        began: Callable[[], None] | None,
        process: Child,
    ) -> ToolResult:
        result = self._run(path, arguments, began, process)
        if counted:
            self._count(path, result)
        return result

    def _run(
        self, path: str, arguments: ToolArguments | bytes, began: Callable[[], None] | None, process: Child
    ) -> ToolResult:
        limit_s = _IMPORT_S
        try:
            complaint = process.ask((path,), limit_s, _COMPLAINT)
            if complaint is not None:
                return ToolResult(f"error: {printable(complaint[:_SHOWN])}", "error")
            if began is not None:
                began()
            limit_s = self._timeout_s
            result = process.ask((path, arguments), limit_s, _RESULT)
        except TimeoutError:
            return ToolResult(f"error: the tool took more than {limit_s:g} s", "timeout")
        except LostError as error:
            return ToolResult(f"error: the tool's process {error}", "died")
        except NotSentError as error:
            return ToolResult(f"error: {error}", "error")
        if result.failure == "died":  # The memory may stay full, and the next call would fail, too.
            process.replace()
        if result.failure is not None:
            return ToolResult(printable(result.text[:_SHOWN]), result.failure)
        text, cut = clip(result.text, MAX_REPLY_CHARS)
        return ToolResult(text, cut=result.cut or cut)

    def _count_unasked(self, said: str) -> None:
        with self._lock:
            self._counts[_COUNTED["died"]] += 1
        log.warning("a tool worker %s; the next call went to a new one", said)

    def _count(self, path: str, result: ToolResult) -> None:
        with self._lock:
            first = result.failure is not None and not any(self._counts[key] for key in _COUNTED.values())
            self._counts["turns/tool_calls"] += 1
            self._counts["turns/tool_cut"] += result.cut
            if result.failure is not None:
                self._counts[_COUNTED[result.failure]] += 1
        if first:
            log.warning("a call of the tool %s failed: %s", printable(path), result.text)
