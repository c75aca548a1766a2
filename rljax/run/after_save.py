"""The command that a run calls after each save (``checkpoint.after_save``), such as a copy into an object store."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rljax.errors import OwnedError
from rljax.run.directory import saved_steps
from rljax.run.stop import StopRequest

_LOOK_S = 1.0  # the time between two looks for a new checkpoint
_FINISH_S = 3.0  # the part of the grace that a run needs after the command


class AfterSave:
    """A context manager around the steps that calls the command for each newest complete checkpoint, one at a time.

    A thread calls the command, so a slow command delays no step. A checkpoint that is there at the start gets a call.
    """

    def __init__(
        self, command: str, run_dir: Path, grace_s: float, check_owner: Callable[[], None], stop: StopRequest
    ) -> None:
        """Prepares the thread. Without a ``command`` nothing is ever called.

        Leaving the context waits for the command at most ``grace_s`` seconds, and then kills it. After a request to
        ``stop`` it waits at most until 3 s before the grace ends. ``check_owner`` raises OwnedError once another
        process owns the directory: nothing is called then. Raises ValueError if the command's program is not found.
        """
        self._words = shlex.split(command)
        if self._words and shutil.which(self._words[0]) is None:
            raise ValueError(f"checkpoint.after_save: there is no program {self._words[0]} on the PATH: install it")
        self._run_dir, self._grace_s, self._check_owner, self._stop = run_dir, grace_s, check_owner, stop
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="rljax-after-save", daemon=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False

    def __enter__(self) -> AfterSave:
        if self._words:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._ending.set()
        ends_at = time.monotonic() + (0.0 if kind is KeyboardInterrupt else self._grace_s)
        try:
            while self._thread.is_alive() and min(ends_at - time.monotonic(), self._stop.left_s() - _FINISH_S) > 0:
                self._stop.at("after_save")
                time.sleep(0.05)  # a join that Ctrl-C interrupts takes the thread for ended
        finally:  # also after a second Ctrl-C
            if self._thread.is_alive():
                self._is_over = True
                said = "had not ended within run.grace_s, and was killed"
                print(f"warning: checkpoint.after_save {said}", file=sys.stderr)
                if self._process is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self._process.pid, signal.SIGKILL)

    def _work(self) -> None:
        newest, is_last = None, False
        with contextlib.suppress(OwnedError):  # the loop of the run says so
            while not is_last and not self._is_over:
                is_last = self._ending.wait(_LOOK_S)
                try:
                    step = max(saved_steps(self._run_dir), default=None)
                except OSError as error:  # such as ESTALE of a network disk: the next look tries again
                    if is_last:
                        print(f"warning: checkpoint.after_save: {error}; call it for the last save", file=sys.stderr)
                    continue
                if step != newest and step is not None:
                    self._check_owner()
                    self._call(step)
                newest = step

    def _call(self, step: int) -> None:
        """Calls the command for the checkpoint of ``step``. The command's output goes to ``logs/after_save.log``."""
        log = self._run_dir / "logs" / "after_save.log"
        try:
            log.parent.mkdir(exist_ok=True)
            with log.open("wb") as file:
                words = [*self._words, str(self._run_dir / "checkpoints" / str(step))]
                self._process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
                )
            status = self._process.wait()
            lines = log.read_text(errors="replace").split("\n") if status else []
            said = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
            failure = f"status {status}: {said[:300]}" if status else ""
        except OSError as error:
            failure = str(error)
        if failure and not self._is_over:
            what = f"checkpoint.after_save failed for checkpoint {step}, {failure}"
            print(f"\nwarning: {what}; it is called again after the next save", file=sys.stderr)
