"""The checkpoints of a run (orbax): saved asynchronously and atomically, checked when read, restored onto any mesh.

A checkpoint holds a checksum of every array, and one of its host state, a small JSON. A checkpoint is damaged if it
does not read back as it was saved. It is then moved aside, never deleted, and the checkpoint before it is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import json
import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from rljax.distributed.processes import is_of_devices
from rljax.errors import NotWrittenError, StartAgainError, check_at_least, describe, printable
from rljax.run.fingerprint import array_checksums, array_forms, json_checksum

BEST = "best"  # the folder of the run directory for the best step
DAMAGED = "damaged"  # the folder of the run directory for damaged checkpoints
ACCURACY = "best_accuracy"  # the key of the accuracy in the host state of the best step
EVALUATION = "best_evaluation"  # the key of what was evaluated, and how
# The keys of a host state on disk for the checksums of the arrays, and for the checksum of everything else in it.
ARRAYS, SELF = "array_checksums", "sha256"

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN)
# These words stand in an error when a whole checkpoint cannot be read just now.
NOT_DAMAGE = ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAVAILABLE", *map(os.strerror, _PASSING))
_LOGGERS = ("asyncio", "concurrent.futures")  # the event loops of orbax log to these
_GIVEN_UP_S = 0.2  # the wait until reads that orbax abandoned have ended in their threads (seconds)


class DamagedCheckpointError(RuntimeError):
    """A checkpoint does not read back as it was saved."""


@dataclass(frozen=True)
class CheckpointConfig:
    """The settings of checkpoints."""

    every: int = 20
    """Steps between checkpoints. 0: only the last step is saved, or the step at which the run is stopped."""
    keep: int = 2
    """Number of newest checkpoints to keep."""
    keep_best: bool = False
    """Whether the step with the best mean accuracy over the datasets of ``eval`` is also kept, in ``best/`` of the run
    directory."""
    after_save: str = ""
    """Command that is called after each save, such as a copy of the run directory into an object store. It is split
    into words as a shell does, once, and the path of the checkpoint, RUN/checkpoints/STEP, is its last argument. The
    run goes on meanwhile, and its end waits for the command for up to ``run.grace_s``. A command that fails costs a
    warning, and is called again after the next save. Empty: no command."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "every")
        check_at_least(self, 1, "keep")
        try:
            shlex.split(self.after_save)
        except ValueError as error:
            raise ValueError(f"after_save must be the words of a command, got {self.after_save!r}: {error}") from error


class Checkpointer:
    """The checkpoints in one directory. Each holds the device state, a pytree of arrays, and the host state, a JSON."""

    def __init__(self, directory: str | Path, *, keep: int = 2, read_only: bool = False):
        """Opens the directory, makes it if it is missing, and deletes incomplete checkpoints in it.

        Args:
          keep: The number of newest checkpoints that are kept.
          read_only: Whether nothing is made or deleted in the directory. Then ``save`` must not be called.
        """
        import orbax.checkpoint as ocp  # takes a third of a second, so it is not imported at the start of a command

        self._ocp, self._directory = ocp, Path(directory).absolute()
        self._best: Checkpointer | None = None
        self.is_abandoned = False
        logging.getLogger("absl").addFilter(_is_not_of_orbax)  # it raises the errors that its threads log
        if not read_only:
            # Orbax would do this in a thread that its close() does not wait for; it fails when the process ends.
            self._clear_incomplete()
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep, enable_async_checkpointing=not read_only, create=not read_only
        )
        self._manager = ocp.CheckpointManager(self._directory, options=self._options)

    def latest_step(self) -> int | None:
        """Returns the step of the newest checkpoint, also if it is still being saved; None without a checkpoint."""
        return self._manager.latest_step()

    def all_steps(self) -> list[int]:
        """Returns the steps of all checkpoints, oldest first. A checkpoint that is still being saved is included."""
        return sorted(self._manager.all_steps())

    def last_save_s(self) -> float | None:
        """Returns the seconds from the start of the newest complete save to its last file; None if not known."""
        for step in reversed(self.all_steps()):
            # The newest save may still be under way.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
                times = json.loads((self._directory / str(step) / "_CHECKPOINT_METADATA").read_text())
                return (times["commit_timestamp_nsecs"] - times["init_timestamp_nsecs"]) / 1e9
        return None

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Starts a save and returns. The run goes on, and may donate ``state``, while files are written.

        On a CPU the files are complete when this method returns. ``host`` is the host state as JSON. Once this
        checkpoint is complete, only the ``keep`` newest stay. Raises NotWrittenError if this checkpoint or the one
        before could not be written.
        """
        self.wait()
        if self._best is not None:  # each save under way holds a copy of the state in pinned memory of the host
            self._best.wait()
        self._clear_incomplete()  # the threads of a failed save may write after its error
        place = self._directory / str(step)
        if place.is_symlink() or place.is_file():
            self._set_aside(step, self._damaged(step, "it is not a folder"))
        content = host | {ARRAYS: array_checksums(state)}
        content[SELF] = json_checksum(content)
        args = self._ocp.args
        with self._written(step):
            self._manager.save(step, args=args.Composite(state=args.StandardSave(state), host=args.JsonSave(content)))
        if is_on_cpu(state):
            self.wait()

    def save_best(self, step: int, accuracy: float, state: Any, host: dict[str, Any], of: str = "") -> bool:
        """Saves into ``best/`` beside this directory if ``accuracy`` is above that of the checkpoint there.

        ``of`` describes the evaluation. A checkpoint of another evaluation is replaced, whatever its accuracy.

        Returns whether it saved. A checkpoint there that cannot be read now stays, with a warning; with several
        processes that is an error. A run that continues from before the best step keeps it until a better one is found.
        """
        if self._best is None:
            self._best = Checkpointer(self._directory.with_name(BEST), keep=1)
        best = self._best
        best.wait()
        for other in best.all_steps():
            try:
                stored = best.read_host(other)[0]
                if stored[ACCURACY] >= accuracy and stored.get(EVALUATION, of) == of:
                    return False
            except DamagedCheckpointError as error:
                best._set_aside(other, error)
            except Exception as error:
                if jax.process_count() > 1:  # other processes may have read it
                    raise
                print(f"warning: {best._place(other)} cannot be read now and stays: {describe(error)}", file=sys.stderr)
                return False
        for later in [other for other in best.all_steps() if other >= step]:
            best._manager.delete(later)
        self.wait()  # as in save: one copy of the state at a time
        best.save(step, state, host | {ACCURACY: accuracy, EVALUATION: of})
        return True

    def restore(
        self, step: int, abstract_state: Any, load_host: Callable[[dict[str, Any]], object] = lambda host: None
    ) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint onto the shardings of ``abstract_state``, and compares every checksum.

        ``abstract_state`` has a ``jax.ShapeDtypeStruct`` with a sharding at each leaf. ``load_host`` is called with the
        host state before the arrays are read. Returns the device state and the host state.

        Raises:
          DamagedCheckpointError: The checkpoint does not read back as it was saved; the message names the difference.
          RuntimeError: The checkpoint is whole, but its arrays (names, shapes, dtypes) or host state do not fit.
        """
        host, saved = self.read_host(step)
        try:
            load_host(host)
        except (LookupError, TypeError, AttributeError) as error:
            raise RuntimeError(f"{self._place(step)} does not fit this run: {describe(error)}") from error
        here = array_forms(abstract_state)
        there = {path: text.rpartition(" ")[0] for path, text in saved.items()}
        if there != here:
            path = next(path for path in {**there, **here} if there.get(path) != here.get(path))
            forms = f"{path} is {there.get(path, 'missing')} there, {here.get(path, 'missing')} here"
            raise RuntimeError(f"{self._place(step)} does not fit this run: {forms}")
        state = self._read(step, "state", self._ocp.args.StandardRestore(abstract_state))
        _give_back()
        differing = [path for path, text in array_checksums(state).items() if text != saved[path]]
        if differing:
            more = f" and {len(differing) - 3} more arrays" if len(differing) > 3 else ""
            raise self._damaged(step, f"other values than were saved in {', '.join(differing[:3])}{more}")
        return state, host

    def restore_newest(
        self, abstract_state: Any, load_host: Callable[[dict[str, Any]], object] = lambda host: None
    ) -> tuple[Any, dict[str, Any]] | None:
        """Reads the newest checkpoint that is not damaged, by ``restore``. Returns None if there is no checkpoint.

        Newer ones, which are damaged, are moved to ``damaged/<step>`` of the run directory; lines on stderr say so.

        Raises:
          RuntimeError: The checkpoint does not fit this run. Or all checkpoints are damaged; then none is moved.
          StartAgainError: One of several processes found the newest checkpoint damaged, and moved it.
        """
        damaged: dict[int, DamagedCheckpointError] = {}
        for step in reversed(self.all_steps()):
            try:
                restored = self.restore(step, abstract_state, load_host)
            except DamagedCheckpointError as error:
                damaged[step] = error
                if jax.process_count() > 1 and step != self.all_steps()[0]:
                    # Other processes may not find the damage, so all start again.
                    self._set_aside(step, error)
                    advice = "it is moved away, and the same command goes on from the one before"
                    raise StartAgainError(f"{error}; {advice}") from error
                continue
            for other, why in damaged.items():
                self._set_aside(other, why)
            return restored
        if damaged:
            raise RuntimeError(f"no checkpoint is whole: {'; '.join(map(str, damaged.values()))}")
        return None

    def wait(self) -> None:
        """Waits until the files of the save under way are complete. Raises NotWrittenError if that save failed."""
        with self._written(self.latest_step()):
            self._manager.wait_until_finished()
        _give_back()

    def abandon(self) -> None:
        """Makes ``close`` do nothing; no save may follow. A single process first ends its save, and ignores errors.

        The method is for a directory that belongs to another process or is gone.
        """
        self.is_abandoned = True
        if jax.process_count() == 1:  # the end of a save of several processes needs all of them
            with _quiet(), contextlib.suppress(Exception):
                self._manager.close()

    def close(self) -> None:
        """Waits until the files of all saves are complete, and closes orbax's managers. Raises as ``wait`` does."""
        if self.is_abandoned:
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self._manager.close)
            stack.callback(self.wait)
            if self._best is not None:
                stack.callback(self._best.close)

    def _place(self, step: int | None) -> str:
        return f"checkpoint {step} in {self._directory}"

    def _damaged(self, step: int, what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self._place(step)} is damaged: {what}")

    def _read(self, step: int, item: str, wanted: Any) -> Any:
        """Reads one item of a checkpoint; any error of orbax on damaged files becomes a DamagedCheckpointError."""
        with _quiet():
            try:
                return self._manager.restore(step, args=self._ocp.args.Composite(**{item: wanted}))[item]
            except Exception as error:
                _drop_reads_given_up()
                cause: BaseException = error
                while cause.__cause__ is not None:
                    cause = cause.__cause__
                about_machine = isinstance(cause, (MemoryError, PermissionError)) or is_of_devices(cause)
                if about_machine or any(word in str(cause) for word in NOT_DAMAGE):
                    raise
                why = getattr(cause, "strerror", None) or type(cause).__name__
                if isinstance(cause, ValueError) and not isinstance(cause, UnicodeError):  # says what is missing
                    why = printable(str(cause))[:160]
                what = f"its {item} cannot be read: {why}"
                del cause
            time.sleep(_GIVEN_UP_S)
            gc.collect()  # abandoned reads report their errors when they are collected
        raise self._damaged(step, what)

    def read_host(self, step: int) -> tuple[dict[str, Any], dict[str, str]]:
        """Reads only the host state; returns it, and the checksums of the arrays by tree path.

        Raises DamagedCheckpointError if the host state does not read back as it was saved.
        """
        host = self._read(step, "host", self._ocp.args.JsonRestore())
        recorded = host.pop(SELF, None) if isinstance(host, dict) else None
        if recorded != json_checksum(host):
            raise self._damaged(step, "another host state than was saved")
        if host.get("step", step) != step:  # a folder with the name of another step would block later saves
            raise self._damaged(step, f"it is that of step {host['step']!r:.60}")
        return host, host.pop(ARRAYS)

    def _set_aside(self, step: int, error: DamagedCheckpointError) -> None:
        """Moves a damaged checkpoint aside, and says so on stderr."""
        folder = self._directory.with_name(DAMAGED)
        name = f"{step}" if self._directory.name != BEST else f"{BEST}-{step}"
        names = [name, *(f"{name}.{again}" for again in range(1, 1000))]
        target = next(folder / each for each in names if not (folder / each).exists())
        print(f"warning: {error}; moved to {target}", file=sys.stderr)
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process of the run moved it
            (self._directory / str(step)).rename(target)
        self._manager.reload()

    def _clear_incomplete(self) -> None:
        if jax.process_index() == 0:
            for cut_short in self._ocp.utils.tmp_checkpoints(self._directory):
                shutil.rmtree(cut_short.get(), ignore_errors=True)

    @contextlib.contextmanager
    def _written(self, step: int | None) -> Iterator[None]:
        """Turns an error in a ``with`` block into NotWrittenError, and removes incomplete files. Saves may go on."""
        try:
            with _quiet():
                yield
        except Exception as error:
            why = printable(str(error))[:200]
            if jax.process_count() > 1:  # the other processes are elsewhere, so nothing is saved together any more
                if is_of_devices(error):
                    raise
                raise NotWrittenError(f"{self._place(step)} could not be written: {why}") from error
            # The manager repeats its error, and no longer knows the checkpoints that the failed save was to replace.
            with _quiet(), contextlib.suppress(Exception):
                self._manager.close()
            self._clear_incomplete()
            if self._directory.parent.exists():
                self._manager = self._ocp.CheckpointManager(self._directory, options=self._options)
            said = f"{self._place(step)} could not be written, those before it are kept: {why}"
            raise NotWrittenError(said) from error


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def _give_back() -> None:
    """Returns freed memory to the system. Otherwise the C library keeps several bytes for each parameter."""
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such function
        ctypes.CDLL(None).malloc_trim(0)


def is_on_cpu(state: Any) -> bool:
    """Returns whether an array of ``state`` is on a CPU. Orbax reads its memory there after ``save`` has returned."""
    return any(device.platform == "cpu" for leaf in jax.tree.leaves(state) for device in leaf.devices())


@functools.cache
def _drop_reads_given_up() -> None:
    """Keeps the errors of reads that orbax abandoned off stderr; tensorstore may end such a read much later."""
    hook = sys.excepthook

    def filtered(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not (kind is RuntimeError and str(error) == "Event loop is closed"):
            hook(kind, error, trace)

    sys.excepthook = filtered


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps logs of orbax off stderr, because it also raises the errors that it logs."""
    hook, loggers = sys.unraisablehook, [logging.getLogger(name) for name in _LOGGERS]
    disabled = [logger.disabled for logger in loggers]
    sys.unraisablehook = lambda unraisable: None
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, before in zip(loggers, disabled, strict=True):
            logger.disabled = before
        sys.unraisablehook = hook
