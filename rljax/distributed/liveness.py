"""Nobody waits for the dead: each process of a run shows that it lives, and ends soon after one that does not.

Every process writes a beat into the key-value store of ``jax.distributed``, which process 0 keeps, and looks there for
a word that ends the run. Process 0 watches the beats, and how long each process has been in one place; the others watch
whether the store answers. All of this happens in threads: the main thread may be in a collective that never returns.

A run that ends so leaves the last complete checkpoint, and ``START_AGAIN_STATUS`` says that the same command goes on.
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
"""The place of a process that may wait for as long as process 0 wants."""

_ROOT = "rljax/life/"  # of its own: a folder of the store is read whole
_BEATS, _WORDS, _SIGNAL = f"{_ROOT}beat/", f"{_ROOT}word/", f"{_ROOT}signal"
_WORD = f"{_WORDS}first"
_PARTS = 20  # beats in the time within which the others end
_SILENT = 0.7  # of that time, after which a process counts as lost; the rest is for telling the others


@dataclass
class Seen:
    """What process 0 has seen of another process.

    Attributes:
      beat: the newest one, as it was written.
      changed: when it last changed, by this process's monotonic clock (seconds).
      host: the machine that the process runs on.
      place: where that process was.
      moves: how often its place had changed.
      place_changed: when that last changed, by the clock of ``changed``.
    """

    beat: str
    changed: float
    host: str
    place: str
    moves: int
    place_changed: float


class Liveness:
    """The threads of one process of several. ``start`` begins, ``stop`` ends them.

    Attributes:
      signal: the first signal that any process was sent (process 0 alone), or None.
    """

    def __init__(self, store: Any, index: int, count: int, *, heartbeat_s: float, stuck_s: float):
        """Nothing happens before ``start``.

        Args:
          store: the client of ``jax.distributed``; None where there is one process, which is only watched.
          index: of this process, from 0.
          count: of processes.
          heartbeat_s: from the last sign of life of a process to the end of the others (seconds).
          stuck_s: how long a process may be in one place (seconds).
        """
        self._store, self._index, self._count = store, index, count
        self._heartbeat_s, self._stuck_s = heartbeat_s, stuck_s
        self._silent_s = _SILENT * heartbeat_s
        self._period_s = min(1.0, heartbeat_s / _PARTS)
        self._place, self._moves, self._number = "starting", 0, 0
        self._seen: dict[int, Seen] = {}
        self._answered = time.monotonic()
        self._leader_host = "an unknown machine"
        self._stopped = threading.Event()
        self.signal: int | None = None

    def start(self) -> None:
        """Starts the threads."""
        if self._index:
            self._die_with_process_0()
        self._answered = time.monotonic()
        for work in (self._beat, self._watch) if self._store is not None else (self._watch,):
            threading.Thread(target=work, name=f"rljax{work.__name__}", daemon=True).start()

    def stop(self) -> None:
        """Ends the threads: this process takes leave."""
        self._stopped.set()

    def at(self, place: str) -> None:
        """This process is now at ``place``, which is said of it when it stays there for too long."""
        self._place, self._moves = place, self._moves + 1

    def report_signal(self, number: int) -> None:
        """Tells process 0 of a signal that this process was sent; the first one counts."""
        with contextlib.suppress(Exception):
            self._store.key_value_set(_SIGNAL, str(number), allow_overwrite=True)

    def end_all(self, status: int, line: str) -> None:
        """Ends all other processes with this status and line; of process 0, returns when they have had time to read it.

        The first word counts. Where the store is gone, so are the processes soon.
        """
        with contextlib.suppress(Exception):
            self._store.key_value_set(_WORD, json.dumps({"status": status, "line": line, "by": self._index}))
            if self._index == 0:
                time.sleep(3 * self._period_s)

    def name(self, index: int) -> str:
        """``process 1 on HOST``."""
        if index == self._index:
            return f"process {index} on {socket.gethostname()}"
        if self._index:
            return f"process {index} on {self._leader_host}" if index == 0 else f"process {index}"
        return f"process {index} on {self._seen[index].host}" if index in self._seen else f"process {index}"

    # ---- the threads ----

    def _beat(self) -> None:
        """Writes beats and reads what the others say; whatever it waits for, ``_watch`` goes on."""
        while not self._stopped.is_set():
            self._number += 1
            beat = {"host": socket.gethostname(), "number": self._number, "place": self._place, "moves": self._moves}
            try:
                self._store.key_value_set(f"{_BEATS}{self._index}", json.dumps(beat), allow_overwrite=True)
                found = dict(self._store.key_value_dir_get(_ROOT if self._index == 0 else _WORDS))
                if self._index and self._number == 1:
                    self._leader_host = json.loads(self._store.blocking_key_value_get(f"{_BEATS}0", 60_000))["host"]
            except Exception:
                self._stopped.wait(self._period_s)  # the store may be gone, of which _watch tells
                continue
            self._answered = time.monotonic()
            self._read(found)
            self._stopped.wait(self._period_s)

    def _read(self, found: dict[str, str]) -> None:
        """Takes in what the store holds under ``_ROOT``."""
        now = time.monotonic()
        for index in range(1, self._count):
            beat = found.get(f"{_BEATS}{index}")
            before = self._seen.get(index)
            if beat is None or (before is not None and before.beat == beat):
                continue
            told = json.loads(beat)
            stayed = before is not None and before.moves == told["moves"]
            since = before.place_changed if before is not None and stayed else now
            self._seen[index] = Seen(beat, now, told["host"], told["place"], told["moves"], since)
        if _SIGNAL in found and self.signal is None:
            self.signal = int(found[_SIGNAL])
        word = json.loads(found[_WORD]) if _WORD in found else None
        if word is not None and word["by"] != self._index:
            if self._index == 0:  # which has the store: the others read the word, too
                time.sleep(3 * self._period_s)
            self._end(word["status"], word["line"], trace=word.get("trace", False))

    def _watch(self) -> None:
        """Ends this process, and all, when another is silent or one stands still; calls nothing that may wait."""
        place, since = self._moves, time.monotonic()
        while not self._stopped.wait(self._period_s):
            now = time.monotonic()
            if self._moves != place:
                place, since = self._moves, now
            silent_s = now - self._answered
            if self._store is not None and silent_s > self._silent_s and not self._stopped.is_set():
                self._end(START_AGAIN_STATUS, self._lost(0, silent_s))
            if self._index:
                continue
            for index, seen in list(self._seen.items()):
                if now - seen.changed > self._silent_s and not self._stopped.is_set():
                    self._end_everywhere(self._lost(index, now - seen.changed))
            standing = [since, *(seen.place_changed for seen in self._seen.values() if seen.place != WAITING)]
            if self._stuck_s and now - min(standing) > self._stuck_s:
                self._end_everywhere(self._stuck(since, now), trace=True)

    def _lost(self, index: int, silent_s: float) -> str:
        return (
            f"{self.name(index)} gave no sign of life for {silent_s:.0f} s (run.heartbeat_s = {self._heartbeat_s:g}): "
            "this run ends; the same command goes on from the last checkpoint"
        )

    def _stuck(self, since: float, now: float) -> str:
        """Where each process is."""
        places = [(0, self._place, since), *((i, seen.place, seen.place_changed) for i, seen in self._seen.items())]
        told = ", ".join(f"{self.name(index)}: {place} for {now - began:.0f} s" for index, place, began in places)
        return f"nothing moved for run.stuck_s = {self._stuck_s:g} s: {told}; this run ends"

    def _end_everywhere(self, line: str, *, trace: bool = False) -> NoReturn:
        """The word is written by another thread: this one must not wait for the store."""
        if self._store is None:
            self._end(START_AGAIN_STATUS, line, trace=trace)
        word = json.dumps({"status": START_AGAIN_STATUS, "line": line, "by": self._index, "trace": trace})
        writing = threading.Thread(target=self._store.key_value_set, args=(_WORD, word), daemon=True)
        writing.start()
        writing.join(self._period_s)
        time.sleep(2 * self._period_s)
        self._end(START_AGAIN_STATUS, line, trace=trace)

    def _end(self, status: int, line: str, *, trace: bool = False) -> NoReturn:
        """Ends this process at once, without what waits for other processes at an ordinary end."""
        with contextlib.suppress(Exception):
            if trace:
                faulthandler.dump_traceback(sys.stderr)
            print(f"\nerror: {line}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        os._exit(status)

    def _die_with_process_0(self) -> None:
        """The client of ``jax.distributed`` aborts the process when process 0 is gone; this gives that its line.

        A handler of Python would only be noted, and the process be gone before Python looks.
        """

        def aborted(number: int) -> None:
            del number
            if not self._stopped.is_set():
                line = f"{self.name(0)} is gone: this run ends; the same command goes on from the last checkpoint"
                os.write(2, f"\nerror: {line}\n".encode())
            os._exit(START_AGAIN_STATUS)

        self._abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
        ctypes.CDLL(None).signal(int(signal.SIGABRT), self._abort_handler)
