"""The trainer's side of the process that runs the environments of ``verifiers``."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from rljax.distributed.frames import FrameError, Frames
from rljax.errors import describe, printable
from rljax.rollout.episodes.verifiers.join import Answered, Branch
from rljax.rollout.turns import TurnQueue, TurnRequest
from rljax.rollout.types import Response

log = logging.getLogger(__name__)

T = TypeVar("T")

PYTHON = "RLJAX_VERIFIERS_PYTHON"
"""The environment variable that names the Python with ``verifiers``. Without it the trainer's own Python is taken."""

_PROGRAM = Path(__file__).with_name("program.py")
_START_S = 600.0  # The longest start: verifiers takes 3 to 7 s to import, and a download of a data set minutes.
_POLL_S = 0.25
_END_S = 10.0  # the longest time that the process may take to end its tools by itself
_LONGEST = 1 << 30  # bytes of a message, which may hold the first prompts of all tasks

_SAID = 2000  # the number of characters from the end of the process's output that an error quotes


class Ended(NamedTuple):
    """The end of one trajectory."""

    failure: str | None  # the kind of failure (timeout, provider, unscored, environment, process), or None
    error: str  # the message about the failure
    reward: float | None  # the reward, or None if the trajectory failed
    branches: list[Branch]  # the branches that the library kept
    is_full: bool = False  # whether no token was left for a further turn
    tools: Mapping[str, int] = {}  # the counts of calls of tools, of errors and of timeouts among them


_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Ask(msgspec.Struct):
    ask: int
    key: int
    turn: int
    tokens: list[_Id]
    max_tokens: int


class _Ending(msgspec.Struct):
    episode: int
    failure: str | None
    error: str
    reward: float | None
    is_full: bool
    rows: list[tuple[list[_Id], list[bool]]]
    tools: dict[str, int]


def _convert(message: Mapping[str, Any], form: type[T]) -> T:
    try:
        return msgspec.convert(message, form)
    except msgspec.ValidationError as error:
        raise FrameError(f"a message of a wrong form, {describe(error)}") from error


class VerifiersHost:
    """The process that runs the environments. One batch of trajectories runs at a time.

    After a crash the next batch starts the process again.
    """

    def __init__(self, settings: Mapping[str, Any], silence_s: float) -> None:
        """Starts the process with ``settings`` as the first message, and waits until it has loaded the environment.

        After ``silence_s`` seconds between two messages while trajectories run, the process is ended.

        Raises:
          ValueError: The environment cannot be loaded.
        """
        self._settings, self._silence_s = dict(settings), silence_s
        self._process: _Process | None = _Process(self._settings)
        self._asked: dict[tuple[int, int], tuple[int, np.ndarray]] = {}
        self.answered: dict[int, list[Answered]] = {}
        self.ended: dict[int, Ended] = {}
        self._lock = threading.Lock()

    def begin(self, tasks: Mapping[int, int], room: Mapping[str, Any], queue: TurnQueue) -> None:
        """Starts the trajectories of a batch. A thread puts their turns into ``queue``, and ends each of them there.

        ``tasks`` has the position in the taskset of each trajectory's task, by the number of the trajectory. ``room``
        has the limits, with the names of the fields of ``shim.Room``.
        """
        self._asked, self.ended = {}, {}
        self.answered = {key: [] for key in tasks}
        if self._process is None or not self._process.is_alive:
            self._process = _Process(self._settings)
        self._process.send({"run": list(tasks.items()), "room": dict(room)})
        threading.Thread(target=self._read, args=(self._process, set(tasks), queue), daemon=True).start()

    def answer(self, response: Response) -> None:
        """Keeps a turn that the engine sampled, and sends its tokens to the process."""
        key, turn = response.prompt_index, response.sample_index + 1
        with self._lock:
            number, tokens = self._asked.pop((key, turn))
        self.answered[key].append(Answered(tokens, response))
        told = {
            "answer": number,
            "token_ids": response.response.tolist(),
            "logprobs": response["rollout_logprobs"].tolist(),
            "truncated": response.truncated,
        }
        with contextlib.suppress(OSError):  # The thread sees that the process has died.
            assert self._process is not None
            self._process.send(told)

    def stop(self) -> None:
        """Ends the process and the trajectories that still run in it."""
        if self._process is not None:
            self._process.close()

    def _read(self, process: _Process, running: set[int], queue: TurnQueue) -> None:
        heard = time.monotonic()
        try:
            while running:
                message = process.receive(_POLL_S)
                if message is None:
                    if time.monotonic() - heard > self._silence_s:
                        raise ConnectionError(f"it sent no message for {self._silence_s:g} s")
                    continue
                heard = time.monotonic()
                if "unfit" in message:
                    raise RuntimeError(f"rollout.environment cannot be trained on: {message['unfit']}")
                self._take(message, running, queue)
        except (OSError, EOFError, FrameError) as error:
            why = f"it sent {error}" if isinstance(error, FrameError) else str(error)
            said = process.close()
            log.warning("the process of verifiers ended while %d trajectories ran: %s%s", len(running), why, said)
            for key in running:
                self.ended[key] = Ended("process", f"the process of verifiers ended: {why}", None, [])
                queue.end(key)
        except BaseException as error:
            queue.fail(error)

    def _take(self, message: Mapping[str, Any], running: set[int], queue: TurnQueue) -> None:
        """Takes a turn to ask for, or the end of a trajectory."""
        if "ask" in message:
            asked = _convert(message, _Ask)
            place, tokens = (asked.key, asked.turn), np.asarray(asked.tokens, np.int32)
            with self._lock:
                if asked.key not in running or place in self._asked:
                    raise FrameError(f"turn {asked.turn} of trajectory {asked.key}, which nobody waits for")
                self._asked[place] = asked.ask, tokens
            queue.put(TurnRequest(*place, tokens, asked.max_tokens))
        elif "episode" in message:
            told = _convert(message, _Ending)
            if told.episode not in running:
                raise FrameError(f"the end of trajectory {told.episode}, which does not run")
            branches = [Branch(np.asarray(ids, np.int32), np.asarray(own, bool)) for ids, own in told.rows]
            error = printable(told.error[:_SAID])
            self.ended[told.episode] = Ended(told.failure, error, told.reward, branches, told.is_full, told.tools)
            running.discard(told.episode)
            queue.end(told.episode)


def read_tasks(settings: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
    """Returns the text of the first prompt (``text``) and the ``identity`` of each task.

    ``templated`` says whether the chat template wrote the text. An endless taskset gives its first ``limit`` tasks.
    Raises ValueError if the environment cannot be loaded.
    """
    process = _Process({**settings, "tasks": limit}, is_told="tasks")
    process.close()
    return list(process.told)


class _Process:
    def __init__(self, settings: Mapping[str, Any], is_told: str = "ready") -> None:
        """Starts the process and waits for the message with the key ``is_told``.

        Raises ValueError if the process reports an error, ends, or takes too long.
        """
        python = os.environ.get(PYTHON) or sys.executable
        ours, theirs = socket.socketpair()
        self._frames = Frames(ours, _LONGEST)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - the process writes to it until it ends
        loopback = ",".join([*filter(None, [os.environ.get("NO_PROXY")]), "127.0.0.1", "localhost"])
        with theirs:
            # Without -P the files beside the program would hide other modules of the same names.
            self._process = subprocess.Popen(
                [python, "-P", str(_PROGRAM)],
                stdin=theirs.fileno(),
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
                env={**os.environ, "NO_PROXY": loopback, "no_proxy": loopback},
            )
        self.send(settings)
        self.told: Any = None
        try:
            message = self.receive(_START_S)
        except (EOFError, OSError):
            message = {"error": "the process ended"}
        except FrameError as error:
            message = {"error": f"the process sent {error}"}
        if message is not None and not {"error", is_told} & set(message):
            message = {"error": "the process sent something else"}
        if message is None:
            message = {"error": f"not ready within {_START_S:g} s"}
        if "error" in message:
            said = self.close()
            raise ValueError(
                f"the environment of verifiers cannot be loaded by {python}: {message['error']}{said}; "
                f"{PYTHON} names a Python with the extra verifiers"
            )
        self.told = message[is_told]

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message. Raises OSError if the process has ended."""
        self._frames.send(0, json.dumps(message).encode())

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Returns the next message, or None if none came within ``timeout_s`` seconds.

        Raises EOFError or OSError if the process has ended, and FrameError if the message is not JSON with names.
        """
        try:
            return dict(json.loads(self._frames.receive(timeout_s)[1]))
        except TimeoutError:
            return None
        except (TypeError, ValueError, RecursionError) as error:
            raise FrameError(f"a message of a wrong form, {describe(error)}") from error

    def close(self) -> str:
        """Ends the process and its children.

        Returns the end of the process's output in parentheses, to be added to a message, or "" without any output.
        """
        self._frames.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._output.closed:
            return ""
        with self._output:
            self._output.seek(0, os.SEEK_END)
            self._output.seek(max(0, self._output.tell() - _SAID))
            said = self._output.read().decode(errors="replace").strip()
        return f" ({said})" if said else ""
