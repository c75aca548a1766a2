"""The program of a host process: the environments of thousands of trajectories in one asyncio loop, without jax.

Each message of the parent is the pickle of one of these tuples, in which ``id`` is the number of a trajectory. The
number of its frame is the number of a call of an environment:

- ``("reset", id, problem)``, ``("step", id, response, truncated)``, ``("reward", id)``: A method is to be called.
- ``("end", id)``: The trajectory is to be forgotten.

This process sends the types of ``outcomes.HostMessage``. Every call of a method gets one ``Outcome``, also if its
trajectory is forgotten meanwhile. Tools run in children of this process, and the parent counts their calls.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import pickle
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rljax.distributed.answering import GRACE_S, end_by_alarm, end_if_forked, send, tell_ready
from rljax.distributed.child import Child, ChildPool
from rljax.distributed.frames import Frames
from rljax.errors import describe
from rljax.rollout.episodes import tools
from rljax.rollout.episodes.config import EpisodeConfig
from rljax.rollout.episodes.environment import Environment, find_environment
from rljax.rollout.episodes.outcomes import HostMessage, Outcome, ProgressBoard, ToolEnded, ToolUnasked, check_outcome
from rljax.rollout.episodes.tools import ToolArguments, ToolResult

TICK_S = 0.1
_FULL = 0.5  # the share of the memory limit above which a process ends after a memory error
_trajectory: ContextVar[int] = ContextVar("trajectory", default=0)


def host_environments(frames: Frames, path: str, descriptor: int, limits: EpisodeConfig, tool_workers: int) -> None:
    """Runs environments of class ``path``, and ``tool_workers`` tool processes, until the parent closes the socket."""
    try:
        make = find_environment(path)
    except ValueError as error:
        tell_ready(frames, str(error))
        return
    asyncio.run(_Host(frames, make, ProgressBoard(descriptor), limits, tool_workers).run())


@dataclass
class _Call:
    """A call of an environment under way."""

    method: str
    number: int  # the number of the call
    task: asyncio.Task[None] | None = None
    used_s: float | None = None  # the time that the call has taken (seconds); None until its code has begun to run
    # The tool calls that it waits for. Each value says whether a process runs the tool already.
    tools: dict[object, bool] = field(default_factory=dict)


class _Host:
    def __init__(
        self, frames: Frames, make: type[Environment], board: ProgressBoard, limits: EpisodeConfig, tool_workers: int
    ):
        self._frames, self._make, self._board, self._limits = frames, make, board, limits
        self._environments: dict[int, Environment] = {}
        self._calls: dict[int, _Call] = {}
        self._tool_workers = tool_workers

    @functools.cached_property
    def _pool(self) -> ChildPool:
        """The processes of tools, which start with the first call."""
        return tools.start_tools(self._limits, self._tool_workers, lambda said: self._send(0, ToolUnasked(said)))

    async def run(self) -> None:
        """Serves the parent for ever, and ends calls that take too long."""
        loop = asyncio.get_running_loop()
        make_task: Any = self._make_task  # its declared type is a protocol of a generic method
        loop.set_task_factory(make_task)
        loop.set_exception_handler(lambda loop, context: None)  # a person's forgotten task may fail
        loop.add_reader(self._frames.fileno(), self._receive)
        tools.run_calls_by(self._run_tool, lambda: self._send(0, ToolEnded("", "error", False, "")))
        end_by_alarm(self._limits.busy_s + GRACE_S)
        self._board.write(0)
        tell_ready(self._frames)
        last = time.monotonic()
        tick_s = min(TICK_S, self._limits.call_timeout_s / 10)
        while True:
            await asyncio.sleep(tick_s)
            now = time.monotonic()
            # If code blocked the loop for longer, only two ticks count for each call.
            elapsed, last = min(now - last, 2 * tick_s), now
            self._board.write(0)
            end_by_alarm(self._limits.busy_s + GRACE_S)
            for number, call in list(self._calls.items()):
                self._let_time_pass(number, call, elapsed)

    def _let_time_pass(self, number: int, call: _Call, elapsed: float) -> None:
        is_queued = call.tools and not any(call.tools.values())  # it waits for tools that no process runs yet
        if call.used_s is None or is_queued:
            return
        call.used_s += elapsed
        if call.used_s > self._limits.call_timeout_s:
            self._stop(number)
            said = f"{call.method} took more than {self._limits.call_timeout_s:g} s"
            self._settle(number, call, Outcome(None, "timeout", said))

    def _receive(self) -> None:
        try:
            while self._frames.look() != "quiet":
                number, body = self._frames.receive()
                try:
                    message = pickle.loads(body)
                except Exception as error:  # the memory may be full, and the call needs an answer
                    self._send(number, Outcome(None, "raised", describe(error)))
                else:
                    self._take(number, *message)
        except EOFError:
            os._exit(1)  # The parent has ended. The process above ends what environments have started.

    def _take(self, request: int, kind: str, *arguments: Any) -> None:
        if kind == "end":
            (number,) = arguments
            if (call := self._stop(number)) is not None:
                self._settle(number, call, Outcome())
            self._environments.pop(number, None)
        else:
            number, *rest = arguments
            call = self._calls[number] = _Call(kind, request)
            token = _trajectory.set(number)
            call.task = asyncio.get_running_loop().create_task(self._run_call(number, call, rest))
            _trajectory.reset(token)

    def _stop(self, number: int) -> _Call | None:
        call = self._calls.pop(number, None)
        if call is not None and call.task is not None:
            call.task.cancel()
        return call

    async def _run_call(self, number: int, call: _Call, arguments: Sequence[Any]) -> None:
        call.used_s = 0.0
        memory_error = False
        try:
            if call.method == "reset":
                self._environments[number] = self._make()
            value = await getattr(self._environments[number], call.method)(*arguments)
            outcome = check_outcome(call.method, value)
        except BaseException as error:  # a person's environment may raise anything
            memory_error = isinstance(error, MemoryError)
            outcome = Outcome(None, "raised", f"{call.method}: {describe(error)}")
        if self._calls.get(number) is call:
            del self._calls[number]
            self._settle(number, call, outcome)
        if memory_error:
            self._environments.pop(number, None)
            gc.collect()
            if _used_gib() > _FULL * self._limits.memory_gib:  # it stays full without the environment that failed
                os._exit(1)

    def _settle(self, number: int, call: _Call, outcome: Outcome) -> None:
        if outcome.failure is not None:
            self._environments.pop(number, None)
        self._send(call.number, outcome)

    def _send(self, number: int, message: HostMessage) -> None:
        send(self._frames, number, message)

    async def _run_tool(self, path: str, arguments: ToolArguments, counted: bool) -> ToolResult:
        """Runs a tool in a process of its own, and waits for the result."""
        call, key, loop = self._calls.get(_trajectory.get()), object(), asyncio.get_running_loop()
        waits = {} if call is None else call.tools

        def note() -> None:
            if key in waits:
                waits[key] = True

        def began() -> None:
            loop.call_soon_threadsafe(note)

        def told(found: ToolResult) -> ToolResult:
            if counted:
                self._send(0, ToolEnded(path, found.failure, found.cut, found.text if found.failure else ""))
            return found

        try:
            packed = pickle.dumps(arguments)  # now, because the environment may change them
        except Exception as error:  # pickling runs a person's code
            return told(ToolResult(f"error: {describe(error)}", "error"))

        def run(process: Child) -> ToolResult:
            return told(tools.run_in(process, path, packed, self._limits.tool_timeout_s, began))

        waits[key] = False
        try:
            return await asyncio.wrap_future(self._pool.submit(run))
        except RuntimeError as error:  # no process can be started
            return ToolResult(f"error: {error}", "died")
        finally:
            del waits[key]

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        """Makes a task. While its code runs, the board names the trajectory that made the task."""
        number = _trajectory.get()
        noted = _Noted(coroutine, number, self._board) if number else coroutine
        return asyncio.Task(noted, loop=loop, **options)


class _Noted(Coroutine[Any, Any, Any]):
    """A coroutine that writes the number of its trajectory to the board while its code runs, and 0 afterwards."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], number: int, board: ProgressBoard):
        self._coroutine, self._number, self._board = coroutine, number, board

    def send(self, value: Any) -> Any:
        return self._run(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._run(self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # inspect and anyio ask for the attributes cr_*

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def _run(self, act: Callable[..., Any], *arguments: Any) -> Any:
        self._board.write(self._number)
        try:
            return act(*arguments)
        finally:
            end_if_forked()
            self._board.write(0)


def _used_gib() -> float:
    """Returns the memory of this process that counts for its limit (GiB), or infinity if it cannot be read."""
    try:
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:")]
    except (OSError, ValueError):
        return float("inf")
    return int(line.split()[1]) / 2**20
