"""The processes of one run: their start, their leader, their common work, and their end.

Process 0 runs the program. It announces each piece of work that takes the devices of all processes. The others wait for
announcements and do the same work. If process 0 fails between two announcements, the others still wait for the next
one, so all processes together can save the newest state. Announcements go through the key-value store of
``jax.distributed``.
"""

from __future__ import annotations

import atexit
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

from rljax.distributed.files import free_memory
from rljax.distributed.liveness import WAITING, Liveness
from rljax.distributed.messages import SMALL_BYTES, Announcement, broadcast, pack, unpack
from rljax.errors import ConfigError, StartAgainError, exit_status, print_end

PACK, UPDATE, SAVE = "pack", "update", "save"
TIMED = (PACK, UPDATE, SAVE)
"""The names of the work whose duration is compared between processes."""
STOP = "stop"
"""The name in the announcement that ends the run."""

PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""XLA's limit on pinned memory of the host, 64 by default (GiB). A checkpoint on a GPU goes through such memory."""
_PINNED_SHARE = 0.8  # of the free memory

_REQUESTS = "rljax/act/"
_KEPT = 8  # The announcements in the store. No process is further behind, because each step waits for all processes.
_LISTEN_MS = 500  # The longest single wait for an announcement. Signals are handled between two waits.
_INIT_S = 300
_JAX_HEARTBEAT_FACTOR = 4  # The run's own heartbeat comes first, and its message says more.
_COLLECTIVE_FAILED = re.compile("[A-Z_]+: .*(Gloo|NCCL|RCCL)")


class Processes:
    """The processes of a run, or its only process. If its ``with`` block raises, all processes end."""

    def __init__(self, index: int = 0, count: int = 1, *, heartbeat_s: float = 30.0, stuck_s: float = 0.0):
        """Prepares process ``index`` (from 0) of ``count``. Several processes need an initialised ``jax.distributed``.

        ``heartbeat_s`` is the longest time from the last sign of life of a process to the end of the others (seconds).
        ``stuck_s`` is the longest time that a process may stay in one phase (seconds); 0 means no limit.
        """
        self.index, self.count = index, count
        self._heartbeat_s, self._number, self._failed, self._has_ended = heartbeat_s, 0, "", False
        self._store: Any = _state().client if count > 1 else None
        self._seconds = dict.fromkeys(TIMED, 0.0)
        self._liveness = Liveness(self._store, index, count, heartbeat_s=heartbeat_s, stuck_s=stuck_s)
        self._is_watched = count > 1 or stuck_s > 0

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0, which talks to servers, decides, and writes rows and figures."""
        return self.index == 0

    @property
    def coordinator(self) -> str:
        """The ``HOST:PORT`` at which this process reaches process 0; "" for a single process."""
        return str(_state().coordinator_address or "") if self.count > 1 else ""

    @property
    def are_together(self) -> bool:
        """Whether all work that this process has announced so far has succeeded. Only process 0 announces work."""
        return not self._failed

    def at(self, place: str) -> None:
        """Records that this process is now at ``place``, a phase of a step."""
        self._liveness.at(place)

    def signal(self) -> int | None:
        """Returns the signal that another process received, or None. Only process 0 knows it."""
        return self._liveness.signal

    @contextlib.contextmanager
    def together(self, announced: Announcement) -> Iterator[None]:
        """Announces work to the other processes; process 0 does its side in the ``with`` block.

        After an error in the block the processes are at different points of the program and cannot work together. Every
        later call raises StartAgainError.
        """
        if self.count == 1:
            yield
            return
        if self._failed:
            raise StartAgainError(f"the processes are at different points of the program because {self._failed} failed")
        self._announce(announced)
        try:
            with self.following():
                yield
        except GeneratorExit:  # A stream whose caller stopped early was still computed to its end (acts.to_the_end).
            raise
        except BaseException:
            self._failed = announced.place
            raise

    def listen(self) -> Announcement:
        """Waits for the next announcement of process 0 and returns it. Every process but process 0 calls it."""
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
        if message.isdigit():
            message = broadcast(b"", int(message))
        announced: Announcement = unpack(message, Announcement)
        self.at(announced.place)
        return announced

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """If a collective fails in the ``with`` block, waits until the heartbeat has named the lost process."""
        try:
            yield
        except Exception as error:
            if is_of_devices(error):
                self._wait_for_heartbeat()
            raise

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the duration of the ``with`` block to the time of ``name``, a work of ``TIMED``, for ``compare``."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] += time.monotonic() - start

    def compare(self) -> dict[str, float]:
        """Returns ``perf/<name>_slowest_s`` and ``perf/<name>_slowest_process`` of each timed work since the last call.

        All processes call it; a single process gets an empty dict. All processes leave an update at the same time. So
        the slowest process of an update is the last to enter it. Then ``_slowest_s`` is the delay between the first
        entry and the last.
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
        """Gathers a JSON value from every process, in the order of the processes. All processes call it."""
        if self.count == 1:
            return [value]
        own = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = np.asarray(multihost_utils.process_allgather(np.int32(own.size))).reshape(-1).tolist()
        padded = np.zeros(1 << (max(sizes) - 1).bit_length(), np.uint8)  # The gathering compiles once per length.
        padded[: own.size] = own
        rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(self.count, -1)
        return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    @contextlib.contextmanager
    def reported_signals(self) -> Iterator[None]:
        """During a ``with`` block, reports the first SIGTERM or SIGINT of this process to process 0.

        A second signal ends this process. It must not be process 0, which handles its signals itself.
        """
        # A thread reads the signals from a pipe, because the main thread may wait in a collective.
        reading, writing = os.pipe()
        os.set_blocking(writing, False)

        def report() -> None:
            for reported, byte in enumerate(iter(lambda: os.read(reading, 1), b"")):
                if reported:
                    os._exit(128 + byte[0])
                self._liveness.report_signal(byte[0])

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
        if self._has_ended:
            return
        if self.count > 1:
            if self.is_leader:
                self._announce(Announcement(STOP, arguments=pack(status)))
            self.at("ending")
            multihost_utils.sync_global_devices("rljax end")
        self._liveness.stop()
        if self.count > 1:
            jax.distributed.shutdown()
        self._has_ended = True

    def __enter__(self) -> Processes:
        if self._is_watched:
            self._liveness.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._has_ended or error is None:
            return
        if self.count > 1:
            self._end_all(error)
        self._liveness.stop()

    def _end_all(self, error: BaseException) -> None:
        status = exit_status(error)
        line = " ".join(str(error).split())[:300]
        reason = line if isinstance(error, (ConfigError, StartAgainError)) else f"{type(error).__name__}: {line}"
        if not self.is_leader:  # Printed first: process 0, and with it the store, may be gone in a moment.
            print_end(error)
        self._liveness.end_all(status, f"{self._liveness.name(self.index)} ended: {reason}")
        if not self.is_leader:
            os._exit(status)

        def leave() -> None:
            """Ends the process as soon as Python has printed the error that ended it."""
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

        atexit.register(leave)  # The exit handler of jax.distributed would wait for processes that are gone.

    def _announce(self, announced: Announcement) -> None:
        self._number += 1
        self.at(announced.place)
        message = pack(announced)
        is_small = len(message) <= SMALL_BYTES
        self._store.key_value_set_bytes(f"{_REQUESTS}{self._number}", message if is_small else b"%d" % len(message))
        if self._number > _KEPT:
            self._store.key_value_delete(f"{_REQUESTS}{self._number - _KEPT}")
        if not is_small:
            broadcast(message, len(message))

    def _wait_for_heartbeat(self) -> None:
        """Waits until the heartbeat finds the process that died and ends this one.

        A collective fails at once if a process dies, before the heartbeat knows which one it was.
        """
        time.sleep(self._heartbeat_s + 5.0)


ALONE = Processes()
"""The only process of a run. No thread watches over it."""


def is_of_devices(error: BaseException) -> bool:
    """Returns whether an error or one of its causes came from a computation, such as a collective that lost a process.

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


def _state() -> Any:
    from jax._src.distributed import global_state  # JAX has no public way to its store and coordinator.

    return global_state


def start_processes(
    count: int = 0, index: int = -1, coordinator: str = "", *, heartbeat_s: float = 30.0, stuck_s: float = 3600.0
) -> Processes:
    """Returns the processes of this run, after starting ``jax.distributed`` if there are several.

    It also sets XLA's limit on the pinned memory of the host to a share of the free memory, unless the environment has
    one. Call it before anything asks for devices. By default JAX finds the first three values in the cluster's
    environment.

    Args:
      count: The number of processes; 0 means as the cluster says, and 1 a single process.
      index: The number of this process, from 0; -1 means as the cluster says.
      coordinator: The HOST:PORT of process 0; empty means as the cluster says.
      heartbeat_s: The longest time from the last sign of life of a process to the end of the others (seconds).
      stuck_s: The longest time that a process may stay in one phase (seconds); 0 means no limit.

    Raises:
      ConfigError: The options do not fit each other, or the environment has several processes that JAX does not find.
      StartAgainError: The other processes did not connect in time.
      RuntimeError: The three options are given, but this program uses its devices already.
    """
    if free := free_memory():
        os.environ.setdefault(PINNED_LIMIT, str(max(1, int(_PINNED_SHARE * free / 2**30))))
    is_set = (count > 1, index >= 0, bool(coordinator))
    limits: dict[str, Any] = {"heartbeat_s": heartbeat_s, "stuck_s": stuck_s}
    alone = count == 1 or (count == 0 and _is_only_task())
    if alone and not any(is_set):
        return Processes(**limits)
    if any(is_set) and not all(is_set):
        raise ConfigError("run.processes (above 1), run.process_id and run.coordinator must be given together, or none")
    if all(is_set) and index >= count:
        raise ConfigError(f"run.process_id = {index} must be below run.processes = {count}")
    if all(is_set) and not coordinator.rpartition(":")[2].isdecimal():
        raise ConfigError(f"run.coordinator must be HOST:PORT of process 0, got {coordinator!r}")
    place = {"coordinator_address": coordinator, "num_processes": count, "process_id": index}
    where: dict[str, Any] = place if all(is_set) else {}
    # The preemption notifier of JAX would take SIGTERM until Python installs a handler.
    jax.config.update("jax_enable_preemption_service", False)
    timeouts: dict[str, Any] = {"heartbeat_timeout_seconds": int(_JAX_HEARTBEAT_FACTOR * heartbeat_s) + 10}
    try:
        with _without_proxies():
            jax.distributed.initialize(**where, **timeouts, initialization_timeout=_INIT_S)
    except ValueError as error:
        if any(is_set) or "coordinator_address" not in str(error):
            raise ConfigError(f"the processes of this run cannot be started: {error}") from error
        if several := _several_by_environment():
            line = f"{several}, but jax.distributed finds no cluster; run.processes = 1 trains alone"
            raise ConfigError(line) from error
        return Processes(**limits)
    except jax.errors.JaxRuntimeError as error:
        raise StartAgainError(f"the processes of this run did not find each other: {error}") from error
    except RuntimeError:
        if any(is_set):
            raise
        return Processes(**limits)  # The devices of this program are in use already.
    return Processes(jax.process_index(), jax.process_count(), **limits)


@contextlib.contextmanager
def _without_proxies() -> Iterator[None]:
    """Hides the proxies that the environment names. A gRPC client would reach process 0 through them."""
    names = ("grpc_proxy", "https_proxy", "http_proxy")
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.lower() in names}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _is_only_task() -> bool:
    """Returns whether this is the only task of a step of Slurm or Open MPI, to which JAX would give one GPU."""
    return any(os.environ.get(name) == "1" for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))


def _several_by_environment() -> str:
    """Returns a phrase that tells which variable says that there are several processes; empty if none does."""
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        if os.environ.get(name, "1") not in ("", "0", "1"):
            return f"{name} is {os.environ[name]}"
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= os.environ.keys():
        return "this is a pod of an Indexed Job (is the package kubernetes installed?)"
    return ""
