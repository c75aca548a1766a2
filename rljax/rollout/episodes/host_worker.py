"""The program of a host process: the environments of thousands of trajectories in one asyncio loop, without jax.

``id`` is the number of a trajectory, ``request`` the number of a call of a tool. The parent sends:

- ``("reset", id, problem)``, ``("step", id, response, truncated)``, ``("reward", id)``: A method is to be called.
- ``("end", id)``: The trajectory is to be forgotten.
- ``("began", request)``: A process begins to run the tool.
- ``("result", request, ToolResult)``: The tool has ended.

This process sends:

- ``("outcome", id, Outcome)``: A method has ended.
- ``("tool", request, path, arguments, counted)``: A tool is to be run.
- ``("drop", request)``: Its result is not needed any more.
- ``("refused", 0)``: A call of a tool was refused, which the parent counts.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import time
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from rljax.rewards.processes import end_followers
from rljax.rewards.resolve import describe
from rljax.rewards.worker import GRACE_S, end_by_alarm
from rljax.rollout.episodes import tools
from rljax.rollout.episodes.config import EpisodeConfig
from rljax.rollout.episodes.environment import Environment, find_environment
from rljax.rollout.episodes.outcomes import Outcome, check_outcome
from rljax.rollout.episodes.progress import ProgressBoard
from rljax.rollout.episodes.tools import Arguments, ToolResult

TICK_S = 0.1
_FULL = 0.5  # the share of the memory limit above which a process ends after a memory error
_OWN = os.getpid()
_trajectory: ContextVar[int] = ContextVar("trajectory", default=0)


def host_environments(connection: Connection, path: str, descriptor: int, limits: EpisodeConfig) -> None:
    """Runs the environments of class ``path`` until the parent closes the pipe."""
    try:
        make = find_environment(path)
    except ValueError as error:
        connection.send(str(error))
        return
    asyncio.run(_Host(connection, make, ProgressBoard(descriptor), limits).run())


@dataclass
class _Call:
    """A call of an environment under way."""

    method: str
    task: asyncio.Task[None] | None = None
    used_s: float | None = None  # the time that the call has taken (seconds); None until its code has begun to run
    # The numbers of the tool calls that it waits for. Each value says whether a process runs the tool already.
    tools: dict[int, bool] = field(default_factory=dict)

    @property
    def is_queued(self) -> bool:
        """Whether it waits for tools that no process runs yet."""
        return bool(self.tools) and not any(self.tools.values())


class _Host:
    def __init__(self, connection: Connection, make: type[Environment], board: ProgressBoard, limits: EpisodeConfig):
        self._connection, self._make, self._board, self._limits = connection, make, board, limits
        self._environments: dict[int, Environment] = {}
        self._calls: dict[int, _Call] = {}
        # Calls of tools of an earlier process may still run, so their numbers must not be used again.
        self._requests = itertools.count(time.monotonic_ns())
        self._waiting: dict[int, tuple[_Call | None, asyncio.Future[ToolResult]]] = {}

    async def run(self) -> None:
        """Serves the parent for ever, and looks for calls that take too long."""
        loop = asyncio.get_running_loop()
        make_task: Any = self._make_task  # its declared type is a protocol of a generic method
        loop.set_task_factory(make_task)
        loop.set_exception_handler(lambda loop, context: None)  # a person's forgotten task may fail
        loop.add_reader(self._connection.fileno(), self._receive)
        tools.run_calls_by(self._run_tool, lambda: self._send(("refused", 0)))
        end_by_alarm(self._limits.busy_s + GRACE_S)
        self._board.write(0)
        self._connection.send(None)
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
        if call.used_s is None or call.is_queued:
            return
        call.used_s += elapsed
        if call.used_s > self._limits.call_timeout_s:
            self._stop(number)
            said = f"{call.method} took more than {self._limits.call_timeout_s:g} s"
            self._settle(number, Outcome(None, "timeout", said))

    def _receive(self) -> None:
        try:
            while self._connection.poll(0):
                self._take(*self._connection.recv())
        except (EOFError, ConnectionError):
            _end_with_children()

    def _take(self, kind: str, number: int, *arguments: Any) -> None:
        if kind == "began":
            call, _ = self._waiting.get(number, (None, None))
            if call is not None and number in call.tools:
                call.tools[number] = True
        elif kind == "result":
            _, future = self._waiting.get(number, (None, None))
            if future is not None and not future.done():
                future.set_result(arguments[0])
        elif kind == "end":
            self._stop(number)
            self._environments.pop(number, None)
        else:
            call = self._calls[number] = _Call(kind)
            token = _trajectory.set(number)
            call.task = asyncio.get_running_loop().create_task(self._run_call(number, call, arguments))
            _trajectory.reset(token)

    def _stop(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is not None and call.task is not None:
            call.task.cancel()

    async def _run_call(self, number: int, call: _Call, arguments: tuple[Any, ...]) -> None:
        call.used_s = 0.0
        memory_error = False
        try:
            if call.method == "reset":
                self._environments[number] = self._make()
            value = await getattr(self._environments[number], call.method)(*arguments)
            outcome = check_outcome(call.method, value, self._limits.max_reply_chars)
        except BaseException as error:  # a person's environment may raise anything
            memory_error = isinstance(error, MemoryError)
            outcome = Outcome(None, "raised", f"{call.method}: {describe(error)}")
        if self._calls.get(number) is call:
            del self._calls[number]
            self._settle(number, outcome)
        if memory_error:
            self._make_room(number)

    def _settle(self, number: int, outcome: Outcome) -> None:
        if outcome.failure is not None:
            self._environments.pop(number, None)
        self._send(("outcome", number, outcome))

    def _send(self, message: tuple[Any, ...]) -> None:
        _end_if_forked()
        self._connection.send(message)

    def _make_room(self, number: int) -> None:
        """Ends this process if its memory stays full without the environment that failed for lack of memory."""
        self._environments.pop(number, None)
        gc.collect()
        if _used_gib() > _FULL * self._limits.memory_gib:
            os._exit(1)

    async def _run_tool(self, path: str, arguments: Arguments, counted: bool) -> ToolResult:
        """Has the parent run a tool in one of its processes."""
        request = next(self._requests)
        call = self._calls.get(_trajectory.get())
        future = asyncio.get_running_loop().create_future()
        self._send(("tool", request, path, arguments, counted))
        self._waiting[request] = call, future
        if call is not None:
            call.tools[request] = False
        try:
            return await future
        finally:
            del self._waiting[request]
            if call is not None:
                del call.tools[request]
            if future.cancelled():
                self._send(("drop", request))

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
        self._board.write(self._number)
        try:
            return self._coroutine.send(value)
        finally:
            self._note_end()

    def throw(self, *error: Any) -> Any:
        self._board.write(self._number)
        try:
            return self._coroutine.throw(*error)
        finally:
            self._note_end()

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def _note_end(self) -> None:
        _end_if_forked()
        self._board.write(0)


def _used_gib() -> float:
    """Returns the memory of this process that counts for its limit (GiB), or infinity if it cannot be read."""
    try:
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:")]
    except (OSError, ValueError):
        return float("inf")
    return int(line.split()[1]) / 2**20


def _end_if_forked() -> None:
    """Ends this process if it is a fork that an environment left behind. A fork must not answer for its parent."""
    if os.getpid() != _OWN:
        os._exit(1)


def _end_with_children() -> NoReturn:
    """Ends this process and all processes that environments have started. It is called once the parent has ended."""
    end_followers(os.getpid())
    os._exit(1)
