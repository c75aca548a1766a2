"""Each process of a run shows that it lives. If one process dies or hangs, all others end soon after it.

Every process writes a beat to the key-value store of ``jax.distributed`` and reads there whether the run ends. Process
0 keeps the store. It watches the beats, and the time that each process spends in one phase. The others watch whether
the store answers. All of this happens in threads, because the main thread may wait in a collective that never returns.

A run that ends this way keeps its last complete checkpoint. Its exit status is ``START_AGAIN_STATUS``: the same command
continues from there.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from rljax.errors import START_AGAIN_STATUS

WAITING = "waiting for process 0"
"""The place of a process that waits for an announcement. It may stay there without a limit."""

_ROOT = "rljax/life/"  # The folder of these keys only, because a folder of the store is always read whole.
_BEATS, _WORDS, _SIGNAL = f"{_ROOT}beat/", f"{_ROOT}word/", f"{_ROOT}signal"
_WORD = f"{_WORDS}first"
_PARTS = 20  # The number of beats in ``heartbeat_s``.
_SILENT = 0.7  # The share of ``heartbeat_s`` after which a process counts as lost. The rest is for telling the others.


@dataclass
class _LastBeat:
    """The last beat of another process, as process 0 read it. Times are on its monotonic clock, in seconds."""

    content: str  # the beat as the other process wrote it, JSON
    changed: float  # the time when the beat last changed
    host: str
    place: str
    moves: int  # how often the place had changed
    place_changed: float  # the time when the place last changed


class Liveness:
    """The threads of one process that write and watch signs of life, from ``start`` to ``stop``."""

    def __init__(self, store: Any, index: int, count: int, *, heartbeat_s: float, stuck_s: float):
        """Prepares the threads of process ``index`` of ``count``.

        Args:
          store: The client of ``jax.distributed``, or None for a single process.
          heartbeat_s: The longest time from the last sign of life of a process to the end of the others (seconds).
          stuck_s: The longest time that a process may stay in one phase (seconds); 0 means no limit.
        """
        self._store, self._index, self._count = store, index, count
        self._heartbeat_s, self._stuck_s = heartbeat_s, stuck_s
        self._silent_s = _SILENT * heartbeat_s
        self._period_s = min(1.0, heartbeat_s / _PARTS)
        self._place, self._moves, self._number = "starting", 0, 0
        self._beats: dict[int, _LastBeat] = {}
        self._answered = time.monotonic()
        self._leader_host = "an unknown machine"
        self._stopped = threading.Event()
        self.signal: int | None = None  # the first signal of another process that process 0 has read

    def start(self) -> None:
        """Starts the threads."""
        if self._index:
            self._die_with_process_0()
        self._answered = time.monotonic()
        for work in (self._beat, self._watch) if self._store is not None else (self._watch,):
            threading.Thread(target=work, name=f"rljax{work.__name__}", daemon=True).start()

    def stop(self) -> None:
        """Ends the threads, because this process ends without a failure."""
        self._stopped.set()

    def at(self, place: str) -> None:
        """Records that this process is now in the phase ``place``. A message names the phase if it lasts too long."""
        self._place, self._moves = place, self._moves + 1

    def report_signal(self, number: int) -> None:
        """Tells process 0 about a signal that this process received. Process 0 keeps the first one that it reads."""
        with contextlib.suppress(Exception):
            self._store.key_value_set(_SIGNAL, str(number), allow_overwrite=True)

    def end_all(self, status: int, line: str) -> None:
        """Tells all other processes to print a line and end with ``status``. Process 0 gives them time to read it.

        If several processes call this, the first call counts. Without the store the other processes end by themselves.
        """
        with contextlib.suppress(Exception):
            self._store.key_value_set(_WORD, json.dumps({"status": status, "line": line, "by": self._index}))
            if self._index == 0:
                time.sleep(3 * self._period_s)

    def name(self, index: int) -> str:
        """Returns the name of a process for messages, such as ``process 1 on HOST``."""
        if index == self._index:
            return f"process {index} on {socket.gethostname()}"
        if self._index and index == 0:
            return f"process 0 on {self._leader_host}"
        return f"process {index} on {self._beats[index].host}" if index in self._beats else f"process {index}"

    def _beat(self) -> None:
        """Writes beats and reads the beats of other processes. It may wait for the store; ``_watch`` never does."""
        while not self._stopped.is_set():
            self._number += 1
            beat = {"host": socket.gethostname(), "number": self._number, "place": self._place, "moves": self._moves}
            try:
                self._store.key_value_set(f"{_BEATS}{self._index}", json.dumps(beat), allow_overwrite=True)
                found = dict(self._store.key_value_dir_get(_ROOT if self._index == 0 else _WORDS))
                if self._index and self._number == 1:
                    self._leader_host = json.loads(self._store.blocking_key_value_get(f"{_BEATS}0", 60_000))["host"]
            except Exception:
                self._stopped.wait(self._period_s)  # The store may be gone, which _watch finds.
                continue
            self._answered = time.monotonic()
            self._read(found)
            self._stopped.wait(self._period_s)

    def _read(self, found: dict[str, str]) -> None:
        """Reads the beats, the signal and the order to end the run from the keys under ``_ROOT``."""
        now = time.monotonic()
        for index in range(1, self._count):
            beat = found.get(f"{_BEATS}{index}")
            before = self._beats.get(index)
            if beat is None or (before is not None and before.content == beat):
                continue
            fields = json.loads(beat)
            stayed = before is not None and before.moves == fields["moves"]
            since = before.place_changed if before is not None and stayed else now
            self._beats[index] = _LastBeat(beat, now, fields["host"], fields["place"], fields["moves"], since)
        if _SIGNAL in found and self.signal is None:
            self.signal = int(found[_SIGNAL])
        word = json.loads(found[_WORD]) if _WORD in found else None
        if word is not None and word["by"] != self._index:
            if self._index == 0:  # The store ends with this process, so the others get time to read the word.
                time.sleep(3 * self._period_s)
            self._end(word["status"], word["line"], trace=word.get("trace", False))

    def _watch(self) -> None:
        """Ends all processes when one is silent, or stays in one phase for too long. It never waits for the store."""
        place, since = self._moves, time.monotonic()
        while not self._stopped.wait(self._period_s):
            now = time.monotonic()
            if self._moves != place:
                place, since = self._moves, now
            if self._store is not None and now - self._answered > self._silent_s and not self._stopped.is_set():
                self._end(START_AGAIN_STATUS, self._lost(0, now - self._answered))
            if self._index:
                continue
            for index, last in list(self._beats.items()):
                if now - last.changed > self._silent_s and not self._stopped.is_set():
                    self._end_everywhere(self._lost(index, now - last.changed))
            arrivals = [since, *(last.place_changed for last in self._beats.values() if last.place != WAITING)]
            if self._stuck_s and now - min(arrivals) > self._stuck_s:
                self._end_everywhere(self._stuck(since, now), trace=True)

    def _lost(self, index: int, silent_s: float) -> str:
        return (
            f"{self.name(index)} gave no sign of life for {silent_s:.0f} s (at most {self._heartbeat_s:g} s): "
            "this run ends; the same command goes on from the last checkpoint"
        )

    def _stuck(self, since: float, now: float) -> str:
        places = [(0, self._place, since), *((i, last.place, last.place_changed) for i, last in self._beats.items())]
        listed = ", ".join(f"{self.name(index)}: {place} for {now - began:.0f} s" for index, place, began in places)
        return f"nothing moved for run.stuck_s = {self._stuck_s:g} s: {listed}; this run ends"

    def _end_everywhere(self, line: str, *, trace: bool = False) -> NoReturn:
        """Ends all processes. Another thread writes the order, because this one must not wait for the store."""
        if self._store is None:
            self._end(START_AGAIN_STATUS, line, trace=trace)
        word = json.dumps({"status": START_AGAIN_STATUS, "line": line, "by": self._index, "trace": trace})
        writing = threading.Thread(target=self._store.key_value_set, args=(_WORD, word), daemon=True)
        writing.start()
        writing.join(self._period_s)
        time.sleep(2 * self._period_s)
        self._end(START_AGAIN_STATUS, line, trace=trace)

    def _end(self, status: int, line: str, *, trace: bool = False) -> NoReturn:
        """Ends this process at once. An ordinary exit would wait for the other processes."""
        with contextlib.suppress(Exception):
            if trace:
                faulthandler.dump_traceback(sys.stderr)
            print(f"\nerror: {line}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        os._exit(status)

    def _die_with_process_0(self) -> None:
        """Prints a line when ``jax.distributed`` aborts this process because process 0 is gone.

        The handler is a C function: a Python handler would run only after the abort.
        """

        def aborted(number: int) -> None:
            del number
            if not self._stopped.is_set():
                line = f"{self.name(0)} is gone: this run ends; the same command goes on from the last checkpoint"
                os.write(2, f"\nerror: {line}\n".encode())
            os._exit(START_AGAIN_STATUS)

        self._abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
        ctypes.CDLL(None).signal(int(signal.SIGABRT), self._abort_handler)
