"""The processes of one run: who leads, what all do together, and how they end.

Process 0 runs the program. Whatever takes the devices of all processes it announces first; the others wait for
announcements and do the same. So an error of process 0 between two announcements finds the others waiting, and the last
state can still be saved by all. Announcements go through the key-value store of ``jax.distributed``, large arrays
through the devices.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from rljax.distributed.liveness import WAITING, Liveness
from rljax.errors import ConfigError, StartAgainError, exit_status, print_end

Arrays = Mapping[str, np.ndarray]

UPDATE = "update"
COMPARED = ("pack", UPDATE, "save")
"""Acts of which processes are compared."""

_ACTS = "rljax/act/"
_END = "end"
_SMALL_BYTES = 256 * 1024  # that go through the key-value store
_KEPT = 8  # announcements: no process is further behind, because each of them waits for all in a step
_LISTEN_MS = 500  # of one wait for an announcement, after which signals are looked at
_INIT_S = 300
_JAX_HEARTBEAT_FACTOR = 4  # the run's own heartbeat says more, and comes first
_COLLECTIVE_FAILED = re.compile("[A-Z_]+: .*(Gloo|NCCL|RCCL)")


@dataclass(frozen=True)
class ProcessOptions:
    """What the configuration says of processes; see ``RunConfig``."""

    processes: int = 0
    process_id: int = -1
    coordinator: str = ""
    heartbeat_s: float = 30.0
    stuck_s: float = 3600.0


@dataclass(frozen=True)
class Act:
    """What process 0 announced.

    Attributes:
      name: of what is done.
      fields: JSON.
      arrays: numpy arrays by name.
    """

    name: str
    fields: dict[str, Any]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


class Processes:
    """The processes of this run, or the only one. A context manager: leaving it by an error ends all of them.

    Attributes:
      index: of this process, from 0.
      count: of processes.
    """

    def __init__(self, index: int = 0, count: int = 1, *, heartbeat_s: float = 30.0, stuck_s: float = 0.0):
        """Of several processes ``jax.distributed`` was initialised before."""
        self.index, self.count = index, count
        self._heartbeat_s, self._number, self._broken = heartbeat_s, 0, ""
        self._store: Any = _store() if count > 1 else None
        self._took = dict.fromkeys(COMPARED, 0.0)
        limits = {"heartbeat_s": heartbeat_s, "stuck_s": stuck_s}
        wanted = count > 1 or stuck_s > 0
        self._liveness = Liveness(self._store, index, count, **limits) if wanted else None

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0, which talks to servers, decides, and writes rows and figures."""
        return self.index == 0

    @property
    def coordinator(self) -> str:
        """``HOST:PORT`` by which this process reaches process 0; "" of a single one."""
        return _coordinator() if self.count > 1 else ""

    @property
    def are_together(self) -> bool:
        """Whether nothing that was done together has failed."""
        return not self._broken

    def at(self, place: str) -> None:
        """This process is at ``place`` (a phase of a step) now."""
        if self._liveness is not None:
            self._liveness.at(place)

    def signal(self) -> int | None:
        """The signal that another process was sent, when there is one (process 0 alone)."""
        return self._liveness.signal if self._liveness is not None else None

    @contextlib.contextmanager
    def together(
        self, name: str, fields: Mapping[str, Any] | None = None, arrays: Arrays | None = None
    ) -> Iterator[None]:
        """The block is done by all processes: the others hear of it first. Process 0 calls it.

        An error inside leaves the processes at different places: nothing is done together after it.

        Args:
          name: of what the others do.
          fields: JSON-serialisable.
          arrays: numpy arrays that the others need.

        Raises:
          StartAgainError: something that was done together failed before.
        """
        if self.count == 1:
            yield
            return
        if self._broken:
            raise StartAgainError(f"the processes stand at different places since {self._broken} failed")
        self._announce(name, fields or {}, arrays or {})
        try:
            with self._timed(name):
                yield
        except GeneratorExit:  # a stream that was taken to its end for one who had enough of it (run/lead.py)
            raise
        except BaseException as error:
            self._broken = name
            if is_of_devices(error):
                self._let_others_be_found_dead()
            raise

    def listen(self) -> Act:
        """Waits for the next announcement, as the processes other than 0 do."""
        self._number += 1
        self.at(WAITING)
        while True:
            try:
                content = self._store.blocking_key_value_get_bytes(f"{_ACTS}{self._number}", _LISTEN_MS)
                break
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    self._let_others_be_found_dead()
                    raise
        act = _unpacked(content)
        self.at(act.name)
        return act

    @contextlib.contextmanager
    def doing(self, name: str) -> Iterator[None]:
        """The block is what a process other than 0 heard of; where a collective fails, the dead is named first."""
        try:
            with self._timed(name):
                yield
        except Exception as error:
            if is_of_devices(error):
                self._let_others_be_found_dead()
            raise

    def compare(self) -> dict[str, float]:
        """Which process was slowest since the last call, at what each does for itself; all of them call it.

        Returns:
          ``perf/<act>_slowest_s`` and ``perf/<act>_slowest_process`` of the acts in ``COMPARED`` that were done; {} of
          a single process. All leave an update at the same time, so that the slowest one is that which came last to it,
          by so many seconds after the first.
        """
        if self.count == 1:
            return {}
        mine = np.asarray([self._took[name] for name in COMPARED], np.float32)
        self._took = dict.fromkeys(COMPARED, 0.0)
        all_of_them = np.asarray(multihost_utils.process_allgather(mine)).reshape(self.count, len(COMPARED))
        found: dict[str, float] = {}
        for name, seconds in zip(COMPARED, all_of_them.T, strict=True):
            own = seconds.max() - seconds if name == UPDATE else seconds
            if seconds.any():
                found[f"perf/{name}_slowest_s"] = float(own.max())
                found[f"perf/{name}_slowest_process"] = int(own.argmax())
        return found

    def gather(self, value: Any) -> list[Any]:
        """The values (JSON) of all processes in their order; all of them call it."""
        if self.count == 1:
            return [value]
        mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = np.asarray(multihost_utils.process_allgather(np.int32(mine.size))).reshape(-1).tolist()
        padded = np.zeros(max(sizes), np.uint8)
        padded[: mine.size] = mine
        rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(self.count, -1)
        return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            if name in self._took:
                self._took[name] += time.monotonic() - began

    @contextlib.contextmanager
    def reported_signals(self) -> Iterator[None]:
        """Inside it, a process other than 0 tells process 0 of SIGTERM and SIGINT and goes on; a second one ends it.

        The signal is read from a pipe by a thread: the main thread may be in a collective.
        """
        liveness = self._liveness
        assert liveness is not None
        reading, writing = os.pipe()
        os.set_blocking(writing, False)

        def tell() -> None:
            for told, byte in enumerate(iter(lambda: os.read(reading, 1), b"")):
                if told:
                    os._exit(128 + byte[0])
                liveness.report_signal(byte[0])

        wanted = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(each, lambda *_: None) for each in wanted]
        before_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=tell, name="rljax-signals", daemon=True).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before_fd)
            for each, handler in zip(wanted, before, strict=True):
                signal.signal(each, handler)
            os.close(writing)

    def end(self, status: int) -> None:
        """The run is over: the others leave with this exit status (process 0), or this one heard so."""
        if self._liveness is None:
            return
        if self.count == 1:
            self._liveness.stop()
        else:
            if self.is_leader:
                self._announce(_END, {"status": status}, {})
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
        told = line if isinstance(error, (ConfigError, StartAgainError)) else f"{type(error).__name__}: {line}"
        if not self.is_leader:  # said first: process 0, and with it the store, may be gone in a moment
            print_end(error)
        self._liveness.end_all(status, f"{self._liveness.name(self.index)} ended: {told}")
        if not self.is_leader:
            os._exit(status)
        self._liveness.stop()
        # What jax.distributed does at the end waits for processes that are gone; the error is printed before this.
        _leave_without_waiting(status)

    def _announce(self, name: str, fields: Mapping[str, Any], arrays: Arrays) -> None:
        self._number += 1
        self.at(name)
        size = sum(array.nbytes for array in arrays.values())
        whole = _packed(name, fields, arrays, inline=size <= _SMALL_BYTES)
        self._store.key_value_set_bytes(f"{_ACTS}{self._number}", whole)
        if self._number > _KEPT:
            self._store.key_value_delete(f"{_ACTS}{self._number - _KEPT}")
        if size > _SMALL_BYTES:
            multihost_utils.broadcast_one_to_all(_buffer(size, list(arrays.values())))

    def _let_others_be_found_dead(self) -> None:
        """A collective fails at once where a process died; the heartbeat finds which, and ends this process."""
        time.sleep(self._heartbeat_s + 5.0)


ALONE = Processes()
"""Where a run has one process, and nobody watches whether it stands still."""


def start_processes(options: ProcessOptions) -> Processes:
    """The processes of this run, as the options or the cluster say. Call it before anything asks for devices.

    Raises:
      ConfigError: the options do not go together.
      StartAgainError: the other processes did not come.
    """
    given = (options.processes > 1, options.process_id >= 0, bool(options.coordinator))
    limits: dict[str, Any] = {"heartbeat_s": options.heartbeat_s, "stuck_s": options.stuck_s}
    if options.processes == 1 and not any(given):
        return Processes(**limits)
    if any(given) and not all(given):
        raise ConfigError("run.processes (above 1), run.process_id and run.coordinator are given together, or none")
    if all(given) and options.process_id >= options.processes:
        raise ConfigError(f"run.process_id = {options.process_id} must be below run.processes = {options.processes}")
    if all(given) and not options.coordinator.rpartition(":")[2].isdecimal():
        raise ConfigError(f"run.coordinator must be HOST:PORT of process 0, got {options.coordinator!r}")
    where: dict[str, Any] = {}
    if all(given):
        where = {"coordinator_address": options.coordinator, "num_processes": options.processes}
        where["process_id"] = options.process_id
    # Signals are this program's: the notifier of jax.distributed takes SIGTERM until a handler of Python is installed.
    jax.config.update("jax_enable_preemption_service", False)
    heartbeat_s = int(_JAX_HEARTBEAT_FACTOR * options.heartbeat_s) + 10
    try:
        jax.distributed.initialize(**where, initialization_timeout=_INIT_S, heartbeat_timeout_seconds=heartbeat_s)
    except ValueError as error:
        if any(given) or "coordinator_address" not in str(error):
            raise ConfigError(f"the processes of this run cannot be started: {error}") from error
        if several := _several_by_environment():
            raise ConfigError(
                f"{several}, but jax.distributed finds no cluster; run.processes = 1 trains alone"
            ) from error
        return Processes(**limits)
    except jax.errors.JaxRuntimeError as error:
        raise StartAgainError(f"the processes of this run did not find each other: {error}") from error
    except RuntimeError:
        if any(given):
            raise
        return Processes(**limits)  # a program that used its devices before it called this one
    return Processes(jax.process_index(), jax.process_count(), **limits)


def _several_by_environment() -> str:
    """What in the environment says that there are several processes, where the cluster's own way was not found."""
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        if os.environ.get(name, "1") not in ("", "0", "1"):
            return f"{name} is {os.environ[name]}"
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= os.environ.keys():
        return "this is a pod of an Indexed Job (is the package kubernetes installed?)"
    return ""


def is_of_devices(error: BaseException) -> bool:
    """Whether an error, or what it came from, is one of a computation, as that of a collective without a process is.

    JAX raises the latter as a plain ValueError where it fails at the call, as small ones on CPUs do.
    """
    while not (
        isinstance(error, jax.errors.JaxRuntimeError)
        or (isinstance(error, ValueError) and _COLLECTIVE_FAILED.match(str(error)))
    ):
        before = error.__cause__ or error.__context__
        if before is None:
            return False
        error = before
    return True


def _store() -> Any:
    from jax._src.distributed import global_state  # there is no public way to the key-value store

    return global_state.client


def _coordinator() -> str:
    from jax._src.distributed import global_state  # nor to the address

    return str(global_state.coordinator_address or "")


def _leave_without_waiting(status: int) -> None:
    """Once Python has printed what ended it, the process is gone."""
    import atexit

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    atexit.register(leave)


def _packed(name: str, fields: Mapping[str, Any], arrays: Arrays, *, inline: bool) -> bytes:
    """A line of JSON, and the arrays' bytes where they are not sent otherwise."""
    forms = {key: [array.dtype.str, list(array.shape)] for key, array in arrays.items()}
    head = json.dumps({"name": name, "fields": dict(fields), "arrays": forms, "inline": inline}).encode()
    body = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values()) if inline else b""
    return head + b"\n" + body


def _unpacked(content: bytes) -> Act:
    """The inverse, on a process other than 0; large arrays come from the devices."""
    head, _, body = content.partition(b"\n")
    message = json.loads(head)
    forms = {key: (np.dtype(form), tuple(shape)) for key, (form, shape) in message["arrays"].items()}
    size = sum(form.itemsize * int(np.prod(shape)) for form, shape in forms.values())
    if not message["inline"]:
        body = np.asarray(multihost_utils.broadcast_one_to_all(_buffer(size, []))).tobytes()
    arrays, at = {}, 0
    for key, (form, shape) in forms.items():
        count = int(np.prod(shape))
        arrays[key] = np.frombuffer(body, form, count, at).reshape(shape)
        at += count * form.itemsize
    return Act(message["name"], message["fields"], arrays)


def _buffer(size: int, arrays: list[np.ndarray]) -> np.ndarray:
    """Uint32 words that hold ``size`` bytes; of few lengths, for each of which the broadcast is compiled once."""
    step = 1 << max(size.bit_length() - 3, 12)
    words = np.zeros(-(-size // step) * step // 4, np.uint32)
    view, at = words.view(np.uint8), 0
    for array in arrays:
        view[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at += array.nbytes
    return words
