"""Child processes that answer, serve or run a user's code: bounded, killed with their children, and replaced.

The parent sends pickles. A child sends msgpack, which is decoded into a given type, so nothing that it writes is
executed here. A reply repeats the random number of its request. A child that sends another number is replaced.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from msgspec import MsgspecError
from msgspec.msgpack import Decoder

from rljax.distributed.child_program import end_followers
from rljax.distributed.frames import FrameError, Frames
from rljax.errors import describe, printable

LONGEST = 1 << 20
"""The longest reply of a child (bytes), unless a ``Child`` is made with another limit."""

_PROGRAM = Path(__file__).with_name("child_program.py")
_START_S, _STARTS = 60.0, 3  # A start may fail while memory is short.
# OpenMP binds the first thread by these as soon as it is loaded, which LD_PRELOAD does in every process of vLLM.
_BINDINGS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
_SHOWN = 2000  # characters of a child's text in a message
_END_S = 0.2  # A process may end shortly after its connection.

T = TypeVar("T")
_READY: Decoder[str | None] = Decoder(str | None)


class LostError(Exception):
    """An error of a child that was replaced during a request. The message says how the child ended."""


class Child:
    """A process that answers requests. It is replaced if it dies, is too slow, or sends something unasked.

    Only one thread at a time may call ``ask``, and any thread may call ``kill`` and ``stop``. ``frames`` is the
    parent's end of the connection. It changes when the process is replaced.
    """

    def __init__(
        self,
        title: str,
        program: str,
        settings: tuple[Any, ...],
        memory_gib: float | None = None,
        *,
        longest: int = LONGEST,
        files: Sequence[int] = (),
        processors: Collection[int] = (),
        on_unasked: Callable[[str], None] = lambda said: None,
    ):
        """Starts the process without waiting for it.

        Args:
          title: The words for such a process in messages, such as "reward worker".
          program: The function ``module:name(frames, *settings)`` that it runs. It must call ``tell_ready``.
          settings: The further arguments of the function. They are pickled.
          memory_gib: The memory limit of the process, in GiB. None: no limit.
          longest: The longest reply (bytes).
          files: The file descriptors that the process inherits.
          processors: The processors that it may use, whatever OpenMP's variables say. Empty: those of this thread.
          on_unasked: A function that ``ask`` calls if the process sent something before the request, or a second reply
            to the request before it. The new process then gets the request. The argument says what happened.
        """
        self._title, self._files, self._longest, self._on_unasked = title, files, longest, on_unasked
        self._processors = processors
        memory_bytes = None if memory_gib is None else int(memory_gib * 2**30)
        self._setup = pickle.dumps((sys.path, memory_bytes, program, pickle.dumps(settings)))
        self._lock = threading.Lock()
        self._stopped = self._ready = False
        self._last: int | None = None  # the number of the last request to this process
        self.frames: Frames
        self._process: subprocess.Popen[bytes]
        self._start()

    def ask(self, request: tuple[Any, ...], limit_s: float, decoder: Decoder[T]) -> T:
        """Returns the reply to a request, which ``decoder`` decodes. ``limit_s`` does not include the process's start.

        Raises:
          TimeoutError: There is no reply within ``limit_s``. The process is replaced.
          LostError: The process died or sent something else. It is replaced.
          RuntimeError: No process can be started.
        """
        self.wait_until_ready()
        body = pickle.dumps((request, limit_s))
        last, self._last = self._last, new_number()
        deadline = time.monotonic() + limit_s
        try:
            self.frames.send(self._last, body, limit_s)
            answered, reply = self.frames.receive(deadline - time.monotonic())
            if answered == self._last:
                return decode(decoder, reply)
            if answered != last:
                raise FrameError("a reply to no request")
        except TimeoutError:
            self.replace()
            raise TimeoutError(f"no answer within {limit_s:g} s") from None
        except (EOFError, OSError):
            raise LostError(f"died ({self.replace()})") from None
        except FrameError as error:
            raise LostError(self.refuse(error)) from None
        self._on_unasked(self.refuse("a second reply to a request"))
        return self.ask(request, limit_s, decoder)  # A new process has no last request, so this is no loop.

    def wait_until_ready(self) -> None:
        """Waits until the process can answer. A process that died or spoke while idle is replaced first.

        Raises:
          RuntimeError: No process can be started.
        """
        if self._ready and (state := self.frames.look()) != "quiet":
            if state == "unread":
                self._on_unasked(self.refuse("a message that nobody asked for"))
            else:
                self.replace()
        if self._ready:
            return
        for _ in range(_STARTS):
            try:
                number, body = self.frames.receive(_START_S)
                complaint = decode(_READY, body) if number == 0 else "the process sent a reply while it started"
            except TimeoutError:
                complaint = f"not ready within {_START_S:g} s"
            except (EOFError, OSError):
                complaint = "the process died while it started"
            except FrameError as error:
                complaint = f"the process sent {error} while it started"
            if complaint is None:
                self._ready = True
                return
            complaint = f"{printable(complaint[:_SHOWN])} ({self.replace()})"
        raise RuntimeError(f"a {self._title} cannot be started: {complaint}")

    def keep(self, on_end: Callable[[str], None]) -> None:
        """Replaces the process whenever it ends, until :meth:`stop`. This is for a program that answers no requests.

        ``on_end`` is called after each end. Its argument says what happened, as the end of a sentence. Raises
        RuntimeError if no process can be started.
        """
        with contextlib.suppress(CancelledError):
            while True:
                self.wait_until_ready()
                try:
                    self.frames.receive()
                    end = self.refuse("a message that nobody asked for")
                except (EOFError, OSError):
                    end = f"died ({self.replace()})"
                except FrameError as error:
                    end = self.refuse(error)
                on_end(end)

    def replace(self) -> str:
        """Ends the process and starts another, or raises RuntimeError. Returns the exit status of the first."""
        self.frames.close()
        deadline = time.monotonic() + _END_S
        while not _has_ended(self._process) and time.monotonic() < deadline:
            time.sleep(_END_S / 20)
        self.kill()
        status = self._process.returncode
        try:
            self._start()
        except OSError as error:
            raise RuntimeError(f"a {self._title} cannot be started: {error}") from error
        return f"exit status {status}"

    def refuse(self, sent: object) -> str:
        """Replaces a process that sent something wrong (``sent``). Returns the end of a sentence that says so."""
        self.kill()
        self.replace()
        return f"sent {sent} and was ended"

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
        """Ends the process with everything that it has started."""
        if self._process.returncode is None:
            # The id is not used again before the process is waited for. Without the others it ends by itself.
            end_followers(self._process.pid)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:  # It has just started another. A stopped process starts no more.
                os.kill(self._process.pid, signal.SIGSTOP)
                end_followers(self._process.pid)
                self._process.kill()
                self._process.wait()

    def _start(self) -> None:
        with self._lock:
            if self._stopped:
                raise CancelledError
            environment = dict(os.environ)
            if self._processors:
                for name in _BINDINGS:
                    environment.pop(name, None)
            ours, theirs = socket.socketpair()
            self.frames, self._ready, self._last = Frames(ours, self._longest), False, None
            with theirs:
                # Without -P the files beside the program would hide other modules of the same names.
                # The session is new so that only the trainer gets Ctrl-C of the terminal.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_PROGRAM)],
                    pass_fds=self._files,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,  # a person's code may print a gigabyte for each response
                    start_new_session=True,
                    env=environment,
                )
        with contextlib.suppress(OSError):  # Its end is noticed later.
            if self._processors:
                os.sched_setaffinity(self._process.pid, self._processors)
            self.frames.send(0, self._setup, _START_S)


class ChildPool:
    """Several children, and as many threads that wait for their replies. They start with the first requests."""

    def __init__(self, make: Callable[[], Child], count: int | None):
        """Starts ``count`` children, each made by ``make``. None: ``default_count()``."""
        count = default_count() if count is None else count
        self._children: list[Child] = []
        try:
            for _ in range(count):
                self._children.append(make())
        except BaseException:
            self._stop()
            raise
        self._threads = ThreadPoolExecutor(max(count, 1))
        self._idle: queue.SimpleQueue[Child] = queue.SimpleQueue()
        for child in self._children:
            self._idle.put(child)

    def __len__(self) -> int:
        return len(self._children)

    def submit(self, use: Callable[[Child], T]) -> Future[T]:
        """Runs ``use`` in a thread, with a child that no other call uses meanwhile."""
        return self._threads.submit(self._lend, use)

    def close(self) -> None:
        """Ends every child at once and cancels the waiting calls; a second call does nothing."""
        self._stop()
        self._threads.shutdown(cancel_futures=True)

    def _lend(self, use: Callable[[Child], T]) -> T:
        child = self._idle.get()
        try:
            return use(child)
        finally:
            self._idle.put(child)

    def _stop(self) -> None:
        for child in self._children:
            child.stop()


def default_count() -> int:
    """Returns the default number of children: one less than the number of CPU cores, but at least 1 and at most 8."""
    return max(1, min(8, (os.cpu_count() or 2) - 1))


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Returns whether a process has ended. Its id is not released, if the system allows that."""
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.poll() is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # another thread has just taken its status
        return True


def decode(decoder: Decoder[T], body: bytes) -> T:
    """Returns the decoded message of a child. Raises FrameError if it is not of the type that ``decoder`` reads."""
    try:
        return decoder.decode(body)
    except (MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"a message of a wrong form, {describe(error)},") from None


def new_number() -> int:
    """Returns a random number for a request, which a child cannot guess before it gets the request."""
    return secrets.randbits(63) + 1
