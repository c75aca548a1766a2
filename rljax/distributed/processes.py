"""The processes of one run: which one leads, what they do together, and how they end.

Process 0 runs the program. It announces each piece of work that takes the devices of all processes. The others wait for
announcements and do the same work. If process 0 fails between two announcements, the others still wait for the next
one, so all processes together can save the newest state. Announcements go through the key-value store of
``jax.distributed``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from rljax.distributed.liveness import WAITING, Liveness
from rljax.distributed.messages import Request, pack_request, send_large, unpack_request
from rljax.errors import ConfigError, StartAgainError, exit_status, print_end

PACK, UPDATE, SAVE = "pack", "update", "save"
TIMED = (PACK, UPDATE, SAVE)
"""The names of the work whose duration is compared between processes."""
STOP = "stop"
"""The name of the act that ends the run."""

_REQUESTS = "rljax/act/"
_KEPT = 8  # Announcements in the store. No process is further behind, because each step waits for all of them.
_LISTEN_MS = 500  # One wait for an announcement lasts so long, and signals are handled between two waits.
_COLLECTIVE_FAILED = re.compile("[A-Z_]+: .*(Gloo|NCCL|RCCL)")


class Processes:
    """The processes of a run, or its only process. A context manager: an error that leaves it ends all of them.

    Attributes:
      index: The number of this process, from 0.
      count: The number of processes.
    """

    def __init__(self, index: int = 0, count: int = 1, *, heartbeat_s: float = 30.0, stuck_s: float = 0.0):
        """Prepares one process. If there are several, ``jax.distributed`` must be initialised.

        Args:
          index: The number of this process, from 0.
          count: The number of processes.
          heartbeat_s: The longest time from the last sign of life of a process to the end of the others, in seconds.
          stuck_s: The longest time that a process may stay in one place, in seconds; 0 for no limit.
        """
        self.index, self.count = index, count
        self._heartbeat_s, self._number, self._failed = heartbeat_s, 0, ""
        self._store: Any = _store() if count > 1 else None
        self._seconds = dict.fromkeys(TIMED, 0.0)
        limits = {"heartbeat_s": heartbeat_s, "stuck_s": stuck_s}
        is_watched = count > 1 or stuck_s > 0
        self._liveness = Liveness(self._store, index, count, **limits) if is_watched else None

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0, which talks to servers, decides, and writes rows and figures."""
        return self.index == 0

    @property
    def coordinator(self) -> str:
        """The ``HOST:PORT`` at which this process reaches process 0; "" for a single process."""
        return _coordinator() if self.count > 1 else ""

    @property
    def are_together(self) -> bool:
        """Whether everything that the processes did together has succeeded."""
        return not self._failed

    def at(self, place: str) -> None:
        """Notes that this process is now at ``place``, a phase of a step."""
        if self._liveness is not None:
            self._liveness.at(place)

    def signal(self) -> int | None:
        """Returns the signal that another process received, or None. Only process 0 knows it."""
        return self._liveness.signal if self._liveness is not None else None

    # ---- both sides of an act ----

    @contextlib.contextmanager
    def together(self, request: Request) -> Iterator[None]:
        """Announces work to the other processes; process 0 does its side in the block.

        An error in the block leaves the processes at different places, so they do nothing together after it.

        Raises:
          StartAgainError: Earlier work that the processes did together has failed.
        """
        if self.count == 1:
            yield
            return
        if self._failed:
            raise StartAgainError(f"the processes are at different places because {self._failed} failed")
        self._announce(request)
        try:
            yield
        except GeneratorExit:  # A stream whose caller stopped early was still computed to its end (acts.to_the_end).
            raise
        except BaseException as error:
            self._failed = request.place
            if is_of_devices(error):
                self._wait_for_heartbeat()
            raise

    def listen(self) -> Request:
        """Waits for the next announcement of process 0 and returns it. The other processes call it."""
        self._number += 1
        self.at(WAITING)
        while True:
            try:
                message = self._store.blocking_key_value_get_bytes(f"{_REQUESTS}{self._number}", _LISTEN_MS)
                break
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    self._wait_for_heartbeat()
                    raise
        request = unpack_request(message)
        self.at(request.place)
        return request

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """A process other than 0 does announced work in the block. If a collective fails, the lost process is named."""
        try:
            yield
        except Exception as error:
            if is_of_devices(error):
                self._wait_for_heartbeat()
            raise

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the duration of the block to those that ``compare`` compares under ``name``, one of ``TIMED``."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] += time.monotonic() - start

    def compare(self) -> dict[str, float]:
        """Finds the slowest process at each timed kind of work since the last call. All processes call it.

        All processes leave an update at the same time. Its slowest process is therefore the one that entered it last,
        and its duration is the time from the first process to the last one.

        Returns:
          ``perf/<name>_slowest_s`` and ``perf/<name>_slowest_process`` for each of ``TIMED`` that was done; {} for a
          single process.
        """
        if self.count == 1:
            return {}
        own = np.asarray([self._seconds[name] for name in TIMED], np.float32)
        self._seconds = dict.fromkeys(TIMED, 0.0)
        by_process = np.asarray(multihost_utils.process_allgather(own)).reshape(self.count, len(TIMED))
        row: dict[str, float] = {}
        for name, seconds in zip(TIMED, by_process.T, strict=True):
            behind = seconds.max() - seconds if name == UPDATE else seconds
            if seconds.any():
                row[f"perf/{name}_slowest_s"] = float(behind.max())
                row[f"perf/{name}_slowest_process"] = int(behind.argmax())
        return row

    def gather(self, value: Any) -> list[Any]:
        """Returns the JSON values of all processes in the order of the processes. All of them call it."""
        if self.count == 1:
            return [value]
        own = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = np.asarray(multihost_utils.process_allgather(np.int32(own.size))).reshape(-1).tolist()
        padded = np.zeros(max(sizes), np.uint8)
        padded[: own.size] = own
        rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(self.count, -1)
        return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    # ---- the end ----

    @contextlib.contextmanager
    def reported_signals(self) -> Iterator[None]:
        """In the block, a process other than 0 reports SIGTERM and SIGINT to process 0 and goes on; a second ends it.

        A thread reads the signals from a pipe, because the main thread may wait in a collective.
        """
        liveness = self._liveness
        assert liveness is not None
        reading, writing = os.pipe()
        os.set_blocking(writing, False)

        def report() -> None:
            for reported, byte in enumerate(iter(lambda: os.read(reading, 1), b"")):
                if reported:
                    os._exit(128 + byte[0])
                liveness.report_signal(byte[0])

        numbers = (signal.SIGINT, signal.SIGTERM)
        handlers = [signal.signal(number, lambda *_: None) for number in numbers]
        before_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=report, name="rljax-signals", daemon=True).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before_fd)
            for number, handler in zip(numbers, handlers, strict=True):
                signal.signal(number, handler)
            os.close(writing)

    def end(self, status: int) -> None:
        """Ends the run: process 0 announces its exit status, and all processes call this and leave together."""
        if self._liveness is None:
            return
        if self.count == 1:
            self._liveness.stop()
        else:
            if self.is_leader:
                self._announce(Request(STOP, fields={"status": status}))
            self.at("ending")
            multihost_utils.sync_global_devices("rljax end")
            self._liveness.stop()
            jax.distributed.shutdown()
        self._liveness = None

    def __enter__(self) -> Processes:
        if self._liveness is not None:
            self._liveness.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._liveness is None or error is None:
            return
        if self.count == 1:
            self._liveness.stop()
            return
        status = exit_status(error)
        line = " ".join(str(error).split())[:300]
        reason = line if isinstance(error, (ConfigError, StartAgainError)) else f"{type(error).__name__}: {line}"
        if not self.is_leader:  # Printed first: process 0, and with it the store, may be gone in a moment.
            print_end(error)
        self._liveness.end_all(status, f"{self._liveness.name(self.index)} ended: {reason}")
        if not self.is_leader:
            os._exit(status)
        self._liveness.stop()
        # The exit handler of jax.distributed waits for processes that are gone; the error is printed before this one.
        _leave_without_waiting(status)

    def _announce(self, request: Request) -> None:
        self._number += 1
        self.at(request.place)
        self._store.key_value_set_bytes(f"{_REQUESTS}{self._number}", pack_request(request))
        if self._number > _KEPT:
            self._store.key_value_delete(f"{_REQUESTS}{self._number - _KEPT}")
        send_large(request)

    def _wait_for_heartbeat(self) -> None:
        """A collective fails at once where a process died; the heartbeat finds which one, and ends this process."""
        time.sleep(self._heartbeat_s + 5.0)


ALONE = Processes()
"""The only process of a run, which nobody watches."""


def is_of_devices(error: BaseException) -> bool:
    """Whether an error, or one of its causes, came from a computation, such as a collective that lost a process.

    JAX raises a plain ValueError where a small collective on CPUs fails at the call.
    """
    while not (
        isinstance(error, jax.errors.JaxRuntimeError)
        or (isinstance(error, ValueError) and _COLLECTIVE_FAILED.match(str(error)))
    ):
        cause = error.__cause__ or error.__context__
        if cause is None:
            return False
        error = cause
    return True


def _store() -> Any:
    from jax._src.distributed import global_state  # JAX has no public way to its key-value store.

    return global_state.client


def _coordinator() -> str:
    from jax._src.distributed import global_state  # JAX has no public way to the coordinator's address.

    return str(global_state.coordinator_address or "")


def _leave_without_waiting(status: int) -> None:
    """Ends the process as soon as Python has printed the error that ended it."""
    import atexit

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    atexit.register(leave)
