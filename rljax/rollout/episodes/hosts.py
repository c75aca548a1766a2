"""Runs the environments of trajectories in worker processes. Every call ends with an outcome, even after a crash."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import pickle
import queue
import threading
import time
from collections import Counter
from collections.abc import Hashable, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from rljax.distributed.child import Child, decode, default_count, new_number
from rljax.distributed.frames import FrameError
from rljax.errors import printable
from rljax.rollout.episodes.config import MAX_REPLY_CHARS, EpisodeConfig
from rljax.rollout.episodes.environment import find_environment
from rljax.rollout.episodes.outcomes import (
    HOST_MESSAGE,
    LONGEST_MESSAGE,
    UTF8_BYTES,
    HostMessage,
    Outcome,
    ProgressBoard,
    ToolEnded,
    check_outcome,
)

log = logging.getLogger(__name__)

_COUNTED = {
    "raised": "turns/env_errors",
    "bad_reply": "turns/env_errors",
    "timeout": "turns/env_timeouts",
    "died": "turns/env_deaths",
}
_CUT = "turns/cut_replies"
_TOOLS_COUNTED = {"error": "turns/tool_errors", "timeout": "turns/tool_timeouts", "died": "turns/tool_deaths"}
_NAMES = (*dict.fromkeys(_COUNTED.values()), _CUT, "turns/tool_calls", *_TOOLS_COUNTED.values(), "turns/tool_cut")
_CLOSED = "the environments are closed"
_LOOK_S = 0.1
_JOIN_S = 1.0
_LONGEST = (1 << 26) + UTF8_BYTES * MAX_REPLY_CHARS  # bytes of a message of a host process

Outbox = queue.SimpleQueue[tuple[int, bytes] | None]  # numbered messages; None: there are no more


@dataclass
class _Trajectory:
    """A trajectory that has an environment."""

    key: Hashable  # the name of the trajectory that the caller chose
    number: int  # the number of the trajectory in messages
    host: HostProcess  # the process of its environment
    method: str = ""  # the method that is being called; "" if none is
    future: Future[Outcome] | None = None  # the future of that call
    packed: bytes | None = None  # the message of ``reset``, until its outcome is known
    resent: bool = False  # whether that message was sent a second time, because the first process ended too early
    lost: Outcome | None = None  # the outcome of every later call, if the trajectory has failed


@dataclass
class HostProcess:
    """A process of environments, which is replaced when it ends, and the work that it still has to do.

    One thread sends and another receives the messages of all its trajectories.
    """

    child: Child
    board: ProgressBoard
    outbox: Outbox = field(default_factory=queue.SimpleQueue)  # the messages to the present process
    # The calls that it still has to answer, by their numbers. A trajectory may be forgotten meanwhile.
    calls: dict[int, _Trajectory] = field(default_factory=dict)


class EnvironmentHosts:
    """Processes that hold the environments of many trajectories; a context manager.

    Each process runs its environments in one asyncio loop. A call that awaits for too long is cancelled. A process is
    replaced if it crashes, runs out of memory, or its loop is blocked. Its trajectories are then lost, but for those
    whose ``reset`` can be sent again. Any thread may call all methods, of which only ``close`` waits.

    ``step`` and ``reward`` raise KeyError for a key without a trajectory. They and ``reset`` raise RuntimeError after
    ``close``. A second call for a trajectory before the first has ended raises ValueError.
    """

    def __init__(
        self,
        path: str,
        limits: EpisodeConfig = EpisodeConfig(),  # noqa: B008 - it is frozen
        *,
        tool_workers: int | None = None,
    ):
        """Checks the environment and starts the processes without waiting for them.

        ``path`` names the environment's class, ``package.module:Class``. ``limits`` has the number and the limits of
        the processes. The time that a call waits for a free process of a tool does not count. ``tool_workers``
        processes run tools, from the first call of a tool on, and at least one for each process of environments. None
        means one less than the number of CPU cores, at most 8.

        Raises:
          ValueError: The environment cannot be found or lacks a method.
        """
        find_environment(path)
        self._path, self._limits = path, limits
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._trajectories: dict[Hashable, _Trajectory] = {}
        self._counts: Counter[str] = Counter()
        self._over = ""  # why no call can be made any more
        tool_workers = max(1, (default_count() if tool_workers is None else tool_workers) // limits.workers)
        program = "process of environments", "rljax.rollout.episodes.host_worker:host_environments"
        start = functools.partial(Child, *program, memory_gib=limits.memory_gib, longest=_LONGEST)
        self._hosts: list[HostProcess] = []
        for _ in range(limits.workers):
            board = ProgressBoard()
            child = start((path, board.descriptor, limits, tool_workers), files=[board.descriptor])
            self._hosts.append(HostProcess(child, board))
        self._threads = [threading.Thread(target=self._serve, args=(host,), daemon=True) for host in self._hosts]
        for thread in self._threads:
            thread.start()

    def reset(self, key: Hashable, problem: Mapping[str, Any]) -> Future[Outcome]:
        """Makes an environment for the trajectory ``key`` and resets it. A trajectory of the same key is ended first.

        The value of the ``Outcome`` is the prompt: a text, messages, or None for the problem's own. An outcome may also
        be a failure. ``close`` and ``end`` cancel the future, which raises RuntimeError if no process can be started.
        This is the same for ``step`` and ``reward``.
        """
        self.end(key)
        with self._lock:
            number = next(self._numbers)
            trajectory = self._trajectories[key] = _Trajectory(key, number, self._hosts[number % len(self._hosts)])
        return self._call(trajectory, "reset", dict(problem))

    def step(self, key: Hashable, response: str, truncated: bool) -> Future[Outcome]:
        """Gives a turn of the policy to the trajectory's environment. The value of the ``Outcome`` is the ``Reply``."""
        return self._call(self._known(key), "step", response, truncated)

    def reward(self, key: Hashable) -> Future[Outcome]:
        """Asks for the reward of a trajectory. The value of the ``Outcome`` is a finite float."""
        return self._call(self._known(key), "reward")

    def end(self, key: Hashable) -> None:
        """Forgets a trajectory and cancels its call, if there is one. An unknown key has no effect."""
        with self._lock:
            trajectory = self._trajectories.pop(key, None)
            if trajectory is None:
                return
            future, trajectory.future = trajectory.future, None
            if trajectory.lost is None and not self._over:
                trajectory.host.outbox.put((0, pickle.dumps(("end", trajectory.number))))
        if future is not None:
            future.cancel()

    def pop_metrics(self) -> dict[str, int]:
        """Returns the counts since the last call, by their names ``turns/...``.

        Each trajectory that failed counts once. ``turns/env_errors``: the environment raised or returned something
        wrong. ``turns/env_timeouts``: it took too long or blocked its process. ``turns/env_deaths``: it was lost with
        its process. ``turns/cut_replies`` counts replies that were cut. The other names count calls of tools.
        """
        with self._lock:
            counts = {name: self._counts[name] for name in _NAMES}
            self._counts.clear()
        return counts

    def close(self) -> None:
        """Ends every process and cancels every call; a second call does nothing."""
        with self._lock:
            self._over = _CLOSED
            futures = [one.future for one in self._trajectories.values() if one.future is not None]
            self._trajectories.clear()
        for host in self._hosts:
            host.child.stop()
            host.outbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        for future in futures:
            future.cancel()

    def __enter__(self) -> EnvironmentHosts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _known(self, key: Hashable) -> _Trajectory:
        with self._lock:
            if self._over:
                raise RuntimeError(self._over)
            return self._trajectories[key]

    def _call(self, trajectory: _Trajectory, method: str, *arguments: Any) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        message = pickle.dumps((method, trajectory.number, *arguments))
        with self._lock:
            if self._over:
                raise RuntimeError(self._over)
            if trajectory.future is not None:
                raise ValueError(
                    f"trajectory {trajectory.key!r} is asked for {method} before {trajectory.method} ended"
                )
            trajectory.method = method
            if trajectory.lost is not None:
                future.set_result(trajectory.lost)
            else:
                trajectory.future = future
                trajectory.packed = message if method == "reset" else None
                self._send(trajectory, message)
        return future

    def _send(self, trajectory: _Trajectory, message: bytes) -> None:
        """Sends a call to the process of a trajectory. The lock is held."""
        number = new_number()
        trajectory.host.calls[number] = trajectory
        trajectory.host.outbox.put((number, message))

    def _fail(self, trajectory: _Trajectory, outcome: Outcome) -> None:
        """Records that a trajectory has failed, counts it, and logs the first failure of its kind. The lock is held."""
        if trajectory.lost is not None or outcome.failure is None:
            return
        trajectory.lost = outcome
        name = _COUNTED[outcome.failure]
        self._counts[name] += 1
        if self._counts[name] == 1:
            log.warning("environment %s, trajectory %s: %s", self._path, trajectory.key, outcome.message)

    def _serve(self, host: HostProcess) -> None:
        """Sends and handles the messages of a host process, and of its replacements, until ``close``."""
        try:
            while True:
                host.child.wait_until_ready()
                outbox = host.outbox
                sender = threading.Thread(target=_send_all, args=(host.child, outbox), daemon=True)
                sender.start()
                said, stuck = self._receive_all(host)
                host.child.kill()
                outbox.put(None)
                sender.join(_JOIN_S)
                running, _ = host.board.read()
                status = host.child.replace()
                self._bury(host, f"{said}, {status}" if said else status, stuck, running)
        except CancelledError:
            return
        except Exception as error:  # nobody else sees it, and a waiting caller must not wait for ever
            self._give_up(str(error) or type(error).__name__)

    def _receive_all(self, host: HostProcess) -> tuple[str, bool]:
        """Handles messages until the process has ended, is stuck or has sent something wrong.

        Returns a description of the wrong message, or "", and whether the process is stuck. Of a longer pause, such as
        one of the whole machine, only the time of two looks at the board counts.
        """
        frames = host.child.frames
        state, looked, stuck_s = host.board.read(), time.monotonic(), 0.0
        while True:
            try:
                number, body = frames.receive(_LOOK_S)
                self._take(host, number, decode(HOST_MESSAGE, body))
            except TimeoutError:
                pass
            except (EOFError, OSError):
                return "", False
            except FrameError as error:
                return f"it sent {error}", False
            seen, last, state, looked = state, looked, host.board.read(), time.monotonic()
            stuck_s = stuck_s + min(looked - last, 2 * _LOOK_S) if state == seen else 0.0
            if stuck_s > self._limits.busy_s:
                return "", True

    def _take(self, host: HostProcess, number: int, message: HostMessage) -> None:
        if isinstance(message, Outcome):
            self._settle(host, number, message)
        elif isinstance(message, ToolEnded):
            self._count_tool(message)
        else:
            with self._lock:
                self._counts[_TOOLS_COUNTED["died"]] += 1
            log.warning("a tool worker %s; the next call went to a new one", printable(message.said))

    def _count_tool(self, ended: ToolEnded) -> None:
        """Counts a call of a tool, and logs the first failure of a tool."""
        with self._lock:
            first = ended.failure and ended.path and not any(self._counts[name] for name in _TOOLS_COUNTED.values())
            self._counts["turns/tool_calls"] += 1
            self._counts["turns/tool_cut"] += ended.cut
            if ended.failure is not None:
                self._counts[_TOOLS_COUNTED[ended.failure]] += 1
        if first:
            log.warning(
                "a call of the tool %s failed: %s", printable(ended.path), printable(ended.text[:LONGEST_MESSAGE])
            )

    def _settle(self, host: HostProcess, number: int, outcome: Outcome) -> None:
        with self._lock:
            trajectory = host.calls.pop(number, None)
            if trajectory is None and not self._over:
                raise FrameError("the end of a call that nobody made")
            if trajectory is None or trajectory.future is None:
                return
            if outcome.failure is None:
                checked = check_outcome(trajectory.method, outcome.value)
                outcome = Outcome(checked.value, checked.failure, checked.message, checked.cut or outcome.cut)
            else:
                outcome = Outcome(None, outcome.failure, printable(outcome.message[:LONGEST_MESSAGE]))
            future, trajectory.future, trajectory.packed = trajectory.future, None, None
            self._counts[_CUT] += outcome.cut
            self._fail(trajectory, outcome)
        _resolve(future, outcome)

    def _bury(self, host: HostProcess, reason: str, stuck: bool, running: int) -> None:
        """Fails the trajectories of a process that has ended.

        If the failure was not due to a trajectory's ``reset``, that ``reset`` is sent to the next process.
        """
        told: list[tuple[Future[Outcome], Outcome]] = []
        with self._lock:
            host.outbox, host.calls = queue.SimpleQueue(), {}
            mine = [one for one in self._trajectories.values() if one.host is host and one.lost is None]
            culprit = next((one for one in mine if one.number == running), None)
            for trajectory in mine:
                if trajectory.packed is not None and trajectory is not culprit and (culprit or not trajectory.resent):
                    trajectory.resent = True
                    self._send(trajectory, trajectory.packed)
                    continue
                outcome = self._lost(trajectory, reason, stuck, culprit)
                self._fail(trajectory, outcome)
                if trajectory.future is not None:
                    told.append((trajectory.future, outcome))
                    trajectory.future = None
        for future, outcome in told:
            _resolve(future, outcome)

    def _lost(self, trajectory: _Trajectory, reason: str, stuck: bool, culprit: _Trajectory | None) -> Outcome:
        if trajectory is not culprit:
            how = "was stuck" if stuck else f"died ({reason})"
            whose = f" in code of trajectory {culprit.key!r}" if culprit is not None else ""
            return Outcome(None, "died", f"the process of the environment {how}{whose}")
        if stuck:
            said = f"ran for more than {self._limits.busy_s:g} s without awaiting, so its process was ended"
            return Outcome(None, "timeout", f"{trajectory.method} {said}")
        return Outcome(None, "died", f"the process died in {trajectory.method} ({reason})")

    def _give_up(self, reason: str) -> None:
        """Makes every call from now on raise RuntimeError, because no process can be started."""
        with self._lock:
            self._over = reason
            futures = [one.future for one in self._trajectories.values() if one.future is not None]
        for future in futures:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(RuntimeError(reason))


def _resolve(future: Future[Outcome], outcome: Outcome) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_result(outcome)


def _send_all(child: Child, outbox: Outbox) -> None:
    """Sends the messages of an outbox to the present process."""
    frames = child.frames
    while (message := outbox.get()) is not None:
        try:
            frames.send(*message)
        except OSError:  # the thread that receives sees the end, too
            return
