"""Worker processes that run a person's code: bounded in time and memory, killed with their children, and replaced."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rljax.rewards.resolve import describe

_WORKER = Path(__file__).with_name("worker.py")
_START_S = 60.0
_STARTS = 3  # a start may fail while memory is short
_END_S = 0.2  # a process may end shortly after its connection
_SWEEPS = 10  # processes of a session may start others while they are being killed

T = TypeVar("T")


class WorkerDiedError(Exception):
    """An error of a worker process that ended during a request. The message has its exit status."""


class NotSentError(Exception):
    """An error of a request that cannot be sent to a process, for example because it cannot be pickled."""


class WorkerProcess:
    """A process that answers requests and is replaced when it dies or is too slow.

    Only one thread at a time may call ``ask``; any thread may call ``kill`` and ``stop``. ``connection`` is the
    parent's end of the pipe to the process. It changes when the process is replaced.
    """

    def __init__(
        self,
        title: str,
        program: str,
        settings: tuple[Any, ...],
        memory_gib: float,
        files: Sequence[int] = (),
    ):
        """Starts the process without waiting for it.

        Args:
          title: The words for such a process in messages, such as "reward worker".
          program: The function ``module:name(connection, *settings)`` that it runs. It sends None once it is ready, or
            a text that says why it cannot start.
          memory_gib: The memory limit of the process, in GiB.
          files: The file descriptors that the process inherits.
        """
        setup = (int(memory_gib * 2**30), program, settings)
        self._title, self._setup, self._files = title, setup, files
        self._lock = threading.Lock()
        self._stopped = self._ready = False
        self._process: subprocess.Popen[bytes]
        self._start()

    def ask(self, request: tuple[Any, ...], limit_s: float) -> Any:
        """Returns the answer to a request; the start of the process does not count as time.

        Raises:
          TimeoutError: There is no answer within ``limit_s``; the process is replaced.
          WorkerDiedError: The process died, and is replaced.
          NotSentError: The request cannot be sent.
          RuntimeError: No process can be started.
        """
        self.wait_until_ready()
        try:
            self.connection.send((request, limit_s))
            if self.connection.poll(limit_s):
                return self.connection.recv()
        except (EOFError, ConnectionError):
            raise WorkerDiedError(self.replace()) from None
        except Exception as error:  # pickling runs a person's code
            raise NotSentError(describe(error)) from error
        self.replace()
        raise TimeoutError(f"no answer within {limit_s:g} s")

    def wait_until_ready(self) -> None:
        """Waits until the process can answer. A process that died while idle is replaced first.

        Raises:
          RuntimeError: No process can be started.
        """
        if self._ready and _has_ended(self._process):
            self.replace()
        if self._ready:
            return
        for _ in range(_STARTS):
            try:
                ready = self.connection.poll(_START_S)
                complaint = self.connection.recv() if ready else f"not ready within {_START_S:g} s"
            except (EOFError, ConnectionError):
                complaint = "the process died while it started"
            if complaint is None:
                self._ready = True
                return
            complaint = f"{complaint} ({self.replace()})"
        raise RuntimeError(f"a {self._title} cannot be started: {complaint}")

    def replace(self) -> str:
        """Ends the process, if it still runs, and starts another; returns the exit status of the first."""
        self.connection.close()
        _wait_for_end(self._process, _END_S)
        self.kill()
        status = self._process.returncode
        self._start()
        return f"exit status {status}"

    def kill(self) -> None:
        """Ends the process, so that a thread that waits for it goes on. ``replace`` starts another."""
        with self._lock:
            self._kill()

    def stop(self) -> None:
        """Ends the process; no other process is started."""
        with self._lock:
            self._stopped = True
            self._kill()

    def _kill(self) -> None:
        """Ends the process and every other process of its session, which a person's code has started."""
        if self._process.returncode is None:
            # The id is not used again before the process is waited for.
            _end_session(self._process.pid)
            self._process.wait()

    def _start(self) -> None:
        with self._lock:
            if self._stopped:
                raise CancelledError
            self.connection, theirs = multiprocessing.Pipe()
            self._ready = False
            with theirs:
                # Without -P the files beside worker.py would hide other modules of the same names.
                # The session is new so that only the trainer gets Ctrl-C of the terminal.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_WORKER), str(theirs.fileno())],
                    pass_fds=[theirs.fileno(), *self._files],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # a person's code may print a gigabyte for each response
                    start_new_session=True,
                )
        self.connection.send((sys.path, *self._setup))


class WorkerPool:
    """Several worker processes, each with a thread that waits for it. The threads start with the first requests."""

    def __init__(self, make: Callable[[], WorkerProcess], count: int | None):
        """Starts ``count`` processes, each made by ``make``. None: one less than the number of CPU cores, at most 8."""
        count = max(1, min(8, (os.cpu_count() or 2) - 1)) if count is None else count
        self._processes: list[WorkerProcess] = []
        try:
            for _ in range(count):
                self._processes.append(make())
        except BaseException:
            self._stop()
            raise
        self._threads = ThreadPoolExecutor(max(count, 1))
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)

    def __len__(self) -> int:
        return len(self._processes)

    def submit(self, use: Callable[[WorkerProcess], T]) -> Future[T]:
        """Runs ``use`` in a thread, with a process that no other call uses meanwhile."""
        return self._threads.submit(self._lend, use)

    def close(self) -> None:
        """Ends every process at once and cancels the waiting calls; a second call does nothing."""
        self._stop()
        self._threads.shutdown(cancel_futures=True)

    def _lend(self, use: Callable[[WorkerProcess], T]) -> T:
        process = self._idle.get()
        try:
            return use(process)
        finally:
            self._idle.put(process)

    def _stop(self) -> None:
        for process in self._processes:
            process.stop()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Returns whether a process has ended. Its id is not released, if the system allows that."""
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.poll() is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # another thread has just taken its status
        return True


def _wait_for_end(process: subprocess.Popen[bytes], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not _has_ended(process) and time.monotonic() < deadline:
        time.sleep(limit_s / 20)


def _end_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    end_followers(leader)


def end_followers(leader: int) -> None:
    """Kills the processes of a session, except its leader."""
    for _ in range(_SWEEPS):
        left = _session(leader)
        if not left:
            return
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def _session(leader: int) -> list[int]:
    """Returns the ids of the living processes of a session, without its leader; none if the system has no /proc."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # it has ended meanwhile
            continue
        if session == str(leader) and state != "Z" and stat.parent.name != str(leader):
            members.append(int(stat.parent.name))
    return members
