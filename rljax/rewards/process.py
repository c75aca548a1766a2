"""The trainer's side of one worker process, which is replaced when it dies or is too slow."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

from rljax.rewards.resolve import Verdict, describe

_WORKER = Path(__file__).with_name("worker.py")
_START_S = 60.0
_STARTS = 3  # a start may fail while memory is short


class RewardProcess:
    """A worker process that is replaced when it dies or is too slow. One thread scores; any thread may stop it."""

    def __init__(self, path: str, memory_bytes: int | None):
        self._setup = (path, memory_bytes)
        self._lock = threading.Lock()
        self._stopped = False
        self._start()

    def score(self, problem: Mapping[str, Any], response: str, truncated: bool, timeout_s: float) -> Verdict:
        """Scores a response; returns (reward, None), or (None, reason) if there is none.

        Raises:
          TimeoutError: There is no answer within ``timeout_s``; the start of the process does not count.
          RuntimeError: No process can be started that imports the reward.
          CancelledError: ``stop`` was called.
        """
        self._wait_until_ready()
        try:
            self._connection.send((problem, response, truncated, timeout_s))
            verdict: Verdict | None = self._connection.recv() if self._connection.poll(timeout_s) else None
        except (EOFError, ConnectionError):
            return None, f"the worker died ({self._replace()})"
        except Exception as error:  # a problem that cannot be pickled
            return None, describe(error)
        # After a memory error the memory may stay full, and the next response would fail, too.
        if verdict is None or (verdict[1] or "").startswith(MemoryError.__name__):
            self._replace()
        if verdict is None:
            raise TimeoutError(f"no reward within {timeout_s:g} s")
        return verdict

    def stop(self) -> None:
        """Ends the process; no other process is started."""
        with self._lock:
            self._stopped = True
            self._kill()
            self._process.wait()

    def _kill(self) -> None:
        """Ends the process, if it still runs, and the processes that the reward has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _start(self) -> None:
        with self._lock:
            if self._stopped:
                raise CancelledError
            self._connection, theirs = multiprocessing.Pipe()
            self._ready = False
            with theirs:
                # Without -P the files beside worker.py would hide other modules of the same names.
                # The session is new so that only the trainer gets Ctrl-C of the terminal.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_WORKER), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # a reward may print a gigabyte for each response
                    start_new_session=True,
                )
        self._connection.send((sys.path, *self._setup))

    def _wait_until_ready(self) -> None:
        """Waits until the process has imported the reward; a process that died while idle is replaced first."""
        if self._ready and self._process.poll() is not None:
            self._replace()
        if self._ready:
            return
        for _ in range(_STARTS):
            try:
                ready = self._connection.poll(_START_S)
                complaint = self._connection.recv() if ready else f"not ready within {_START_S:g} s"
            except (EOFError, ConnectionError):
                complaint = "the process died while it started"
            if complaint is None:
                self._ready = True
                return
            complaint = f"{complaint} ({self._replace()})"
        raise RuntimeError(f"a reward worker cannot be started: {complaint}")

    def _replace(self) -> str:
        """Ends the process, if it still runs, and starts another; returns the exit status of the first."""
        self._connection.close()
        try:
            # The process may end shortly after its connection.
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            self._kill()
        status = self._process.wait()
        self._start()
        return f"exit status {status}"
