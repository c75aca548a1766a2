"""One worker process, seen from the trainer: started, asked, and replaced when it dies or is too slow."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rljax.rewards.resolve import Verdict, describe

_WORKER = Path(__file__).with_name("worker.py")
_START_S = 60.0
_STARTS = 3  # a start may fail while memory is short for a moment


class RewardProcess:
    """One process at a time, replaced when it dies or is too slow. One thread scores; any thread may call ``stop``."""

    def __init__(self, path: str, memory_bytes: int | None):
        self._path = path
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._stopped = False
        self._ready = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._start()

    def score(self, problem: Mapping[str, Any], response: str, truncated: bool, timeout_s: float) -> Verdict:
        """(reward, None) or (None, what went wrong).

        Raises:
          TimeoutError: no answer within ``timeout_s``; the start of the process does not count.
          RuntimeError: no process that imports the reward can be started, or ``stop`` was called.
        """
        for last in (False, True):
            connection = self._connected()
            try:
                connection.send((problem, response, truncated, timeout_s))
                break
            except OSError:  # it died while idle, so this response is not the cause
                self._end()
                if last:
                    return None, "two workers died before they could take the response"
            except Exception as error:  # a problem that cannot be pickled
                return None, describe(error)
        try:
            if not connection.poll(timeout_s):
                self._end()
                raise TimeoutError(f"no reward within {timeout_s:g} s")
            verdict: Verdict = connection.recv()
        except (EOFError, ConnectionError):
            return None, f"the worker died ({self._end()})"
        return verdict

    def stop(self) -> None:
        """Ends the process; no other is started."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _start(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        with theirs, self._lock:
            if self._stopped:
                ours.close()
                raise RuntimeError("the reward pool is closed")
            # -P: without it the files beside worker.py would hide other modules of the same names.
            # Own session: the trainer alone handles Ctrl-C in the terminal.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection, self._ready = ours, False
        ours.send((sys.path, self._path, self._memory_bytes))

    def _connected(self) -> Connection:
        """The connection to a process that has imported the reward."""
        if self._connection is not None and self._ready:
            return self._connection
        complaints = []
        for _ in range(_STARTS):
            if self._connection is None:
                self._start()
            connection = self._connection
            assert connection is not None
            try:
                complaint = connection.recv() if connection.poll(_START_S) else f"not ready within {_START_S:g} s"
            except (EOFError, ConnectionError):
                complaint = "the process died while it started"
            if complaint is None:
                self._ready = True
                return connection
            complaints.append(f"{complaint} ({self._end()})")
        raise RuntimeError(f"a reward worker cannot be started: {complaints[-1]}")

    def _end(self) -> str:
        """Ends the process if it still runs; returns its exit status."""
        process, connection = self._process, self._connection
        assert process is not None
        assert connection is not None
        self._connection = None
        connection.close()
        try:
            # The exit status comes a moment after the closed connection.
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            process.kill()
        return f"exit status {process.wait()}"
