"""Checkpoints of a run: asynchronous, atomic, checked when read, restored onto any mesh (orbax).

Each holds a checksum of every array and of its host state. One that does not read back as it was saved is damaged: the
one before it is used, and it is kept aside, never deleted.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from rljax.distributed.processes import is_of_devices
from rljax.errors import NotWrittenError, StartAgainError, check_at_least
from rljax.run.fingerprint import array_checksums, array_forms, json_checksum

BEST = "best"  # folder of the run directory
DAMAGED = "damaged"  # likewise
ACCURACY = "best_accuracy"  # in the host state of what is in BEST
ARRAYS, SELF = "array_checksums", "sha256"  # in a host state on disk: of the arrays, and of all of it but this

# What an error says when a whole checkpoint cannot be read just now.
NOT_DAMAGE = ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAVAILABLE")
_LOGGERS = ("absl", "asyncio", "concurrent.futures")  # that orbax and its event loops log to
_GIVEN_UP_S = 0.2  # that reads which were given up have to end in their own threads (seconds)

# What a host state raises that is not one of a run: one without checksums may hold anything.
NOT_OF_A_RUN = (LookupError, TypeError, AttributeError, ArithmeticError)


class DamagedCheckpointError(RuntimeError):
    """A checkpoint does not read back as it was saved."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved."""

    every: int = 20
    """Steps between checkpoints. 0: save only the last step, and the step at which the run is stopped."""
    keep: int = 2
    """Number of newest checkpoints to keep."""
    keep_best: bool = False
    """Also keep the step with the best mean accuracy over the evaluation datasets (``eval``), in ``best/`` of the run
    directory."""
    upload: str = ""
    """Object store URL under which complete checkpoints are copied, as s3://BUCKET/PREFIX (needs the extra ``store``),
    gs://BUCKET/PREFIX (gcsfs), or any other that fsspec knows. One run has it for itself. A run whose directory is gone
    goes on from there. Empty: none."""
    upload_wait_s: float = 600.0
    """Longest time that the end of a run waits for its newest checkpoint to be uploaded (seconds); after a request to
    stop, at most what is left of ``run.grace_s``."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "every", "upload_wait_s")
        check_at_least(self, 1, "keep")
        if self.upload and "://" not in self.upload:
            raise ValueError(f"upload must be a URL, as s3://BUCKET/PREFIX, got {self.upload!r}")


class Checkpointer:
    """Saves and restores the device state and a small JSON of host state; a checkpoint has both."""

    def __init__(self, directory: str | Path, *, keep: int = 2, read_only: bool = False):
        """Opens ``directory``. Unless ``read_only``, makes it if missing and deletes incomplete checkpoints in it.

        With ``read_only`` nothing in it changes, and ``save`` must not be called.
        """
        import orbax.checkpoint as ocp  # a third of a second, which the start of a command does not wait for

        self._ocp, self._directory = ocp, Path(directory).absolute()
        self._best: Checkpointer | None = None
        if not read_only:
            # Orbax would do so in a thread that its close() does not wait for, and that fails when the process ends.
            self._clear_incomplete()
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep,
            enable_async_checkpointing=not read_only,
            create=not read_only,
        )
        self._manager = ocp.CheckpointManager(self._directory, options=self._options)

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, or None. One that is being saved counts."""
        return self._manager.latest_step()

    def all_steps(self) -> list[int]:
        """Steps of all checkpoints, oldest first. One that is being saved counts."""
        return sorted(self._manager.all_steps())

    def last_save_s(self) -> float | None:
        """Seconds from the start of the newest complete save to its last file; None where that is not known."""
        for step in reversed(self.all_steps()):
            # The newest may still be under way.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
                times = json.loads((self._directory / str(step) / "_CHECKPOINT_METADATA").read_text())
                return (times["commit_timestamp_nsecs"] - times["init_timestamp_nsecs"]) / 1e9
        return None

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Starts saving and returns; the run goes on, and may donate ``state``, while files are written.

        Older checkpoints are deleted once this one is complete.

        Args:
          step: last step done.
          state: pytree of arrays on the devices.
          host: JSON-serialisable.

        Raises:
          NotWrittenError: the one before this could not be written.
        """
        self.wait()
        self._clear_incomplete()  # what threads of a save that failed wrote after its error
        place = self._directory / str(step)
        if place.is_symlink() or place.is_file():
            self._set_aside(step, self._damaged(step, "it is no folder"))
        frozen = jax.tree.map(_kept, state)
        content = host | {ARRAYS: array_checksums(frozen)}
        content[SELF] = json_checksum(content)
        args = self._ocp.args
        with self._written(step):
            self._manager.save(step, args=args.Composite(state=args.StandardSave(frozen), host=args.JsonSave(content)))

    def save_best(self, step: int, accuracy: float, state: Any, host: dict[str, Any]) -> bool:
        """Saves into ``best/`` beside this directory if no accuracy there is as high; returns whether it did.

        A run that continues from an earlier step than that of the best checkpoint keeps it until a better one is found.

        Args:
          step, state, host: as for ``save``.
          accuracy: larger is better.
        """
        if self._best is None:
            self._best = Checkpointer(self._directory.with_name(BEST), keep=1)
        best = self._best
        best.wait()
        for taken in best.all_steps():
            try:
                if best.restore_host(taken)[ACCURACY] >= accuracy:
                    return False
            except DamagedCheckpointError as error:
                best._set_aside(taken, error)
        for later in [taken for taken in best.all_steps() if taken >= step]:
            best._manager.delete(later)
        best.save(step, state, host | {ACCURACY: accuracy})
        return True

    def restore_host(self, step: int) -> dict[str, Any]:
        """The host state alone. Raises DamagedCheckpointError."""
        return self._read_host(step)[0]

    def restore(
        self, step: int, abstract_state: Any, load_host: Callable[[dict[str, Any]], object] = lambda host: None
    ) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint onto the shardings of ``abstract_state`` and compares every checksum.

        A checkpoint of an older rljax has none: a line on stderr says that it was not checked.

        Args:
          step: of a checkpoint there is.
          abstract_state: ``jax.ShapeDtypeStruct`` with a sharding at each leaf.
          load_host: called with the host state before the arrays are read. A LookupError, TypeError, AttributeError or
            ArithmeticError means that it is no host state of a run; anything else that it raises is not caught.

        Raises:
          DamagedCheckpointError: it does not read back as it was saved; the message says which step and what differs.
          RuntimeError: it is whole, but a state of another form.
        """
        host, saved = self._read_host(step)
        try:
            load_host(host)
        except NOT_OF_A_RUN as error:
            raise self._damaged(step, "its host state is not one of a run") from error
        here = array_forms(abstract_state)
        there = {path: text.rpartition(" ")[0] for path, text in saved.items()}
        if saved and there != here:
            path = next(path for path in {**there, **here} if there.get(path) != here.get(path))
            forms = f"{path} is {there.get(path, 'missing')} there, {here.get(path, 'missing')} here"
            raise RuntimeError(f"{self._place(step)} does not fit this run: {forms}")
        state = self._read(step, "state", self._ocp.args.StandardRestore(abstract_state))
        if not saved:
            print(f"warning: {self._place(step)} has no checksums to check: an older rljax saved it", file=sys.stderr)
            return state, host
        differing = [path for path, text in array_checksums(state).items() if text != saved[path]]
        if differing:
            more = f" and {len(differing) - 3} more arrays" if len(differing) > 3 else ""
            raise self._damaged(step, f"other values than were saved in {', '.join(differing[:3])}{more}")
        return state, host

    def restore_newest(
        self, abstract_state: Any, load_host: Callable[[dict[str, Any]], object] = lambda host: None
    ) -> tuple[Any, dict[str, Any]] | None:
        """Reads the newest checkpoint that is whole; None where there is no checkpoint.

        Each damaged one after it is named in a line on stderr and moved to ``damaged/<step>`` of the run directory.

        Args:
          abstract_state, load_host: as for ``restore``; the last call is with the host state that is returned.

        Raises:
          RuntimeError: as ``restore``, or all are damaged; then nothing is moved.
          StartAgainError: one of several processes found the newest one damaged, and moved it.
        """
        damaged: dict[int, DamagedCheckpointError] = {}
        for step in reversed(self.all_steps()):
            try:
                found = self.restore(step, abstract_state, load_host)
            except DamagedCheckpointError as error:
                damaged[step] = error
                if jax.process_count() > 1 and step != self.all_steps()[0]:
                    self._start_again_without(step, error)
                continue
            for other, why in damaged.items():
                self._set_aside(other, why)
            return found
        if damaged:
            raise RuntimeError(f"no checkpoint is whole: {'; '.join(map(str, damaged.values()))}")
        return None

    def wait(self) -> None:
        """Returns when the files of what is being saved are complete. Raises NotWrittenError when they will not be."""
        with self._written(self.latest_step()):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the files to be complete and releases the directory."""
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
        """One item of a checkpoint. Whatever orbax raises on damaged files becomes a DamagedCheckpointError."""
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
                if isinstance(cause, ValueError) and not isinstance(cause, UnicodeError):  # says what the file lacks
                    why = " ".join(str(cause).split())[:160]
                what = f"its {item} cannot be read: {why}"
                del cause
            time.sleep(_GIVEN_UP_S)
            gc.collect()  # the reads that were given up say so when they are collected
        raise self._damaged(step, what)

    def _read_host(self, step: int) -> tuple[dict[str, Any], dict[str, str]]:
        """The host state, checked, and the checksums of the arrays; {} in a checkpoint without."""
        host = self._read(step, "host", self._ocp.args.JsonRestore())
        if not isinstance(host, dict):
            raise self._damaged(step, "its host state is no object")
        if host.get("step", step) != step:  # a folder under another's name, which saves after it would run into
            raise self._damaged(step, f"it is that of step {host['step']!r:.60}")
        if SELF not in host and ARRAYS not in host:
            return host, {}
        recorded = host.pop(SELF, None)
        if recorded != json_checksum(host):
            raise self._damaged(step, "another host state than was saved")
        return host, host.pop(ARRAYS)

    def _set_aside(self, step: int, error: DamagedCheckpointError) -> None:
        """Moves a damaged checkpoint out of the way and says so."""
        folder = self._directory.with_name(DAMAGED)
        name = f"{step}" if self._directory.name != BEST else f"{BEST}-{step}"
        names = [name, *(f"{name}.{again}" for again in range(1, 1000))]
        target = next(folder / each for each in names if not (folder / each).exists())
        print(f"warning: {error}; moved to {target}", file=sys.stderr)
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process of the run moved it
            (self._directory / str(step)).rename(target)
        self._manager.reload()

    def _start_again_without(self, step: int, error: DamagedCheckpointError) -> NoReturn:
        """Which process finds damage depends on the shards that it reads: they agree by starting again."""
        self._set_aside(step, error)
        raise StartAgainError(f"{error}; it is moved away, and the same command goes on from the one before") from error

    def _clear_incomplete(self) -> None:
        if jax.process_index() == 0:
            for cut_short in self._ocp.utils.tmp_checkpoints(self._directory):
                shutil.rmtree(cut_short.get(), ignore_errors=True)

    @contextlib.contextmanager
    def _written(self, step: int | None) -> Iterator[None]:
        """What cannot be written is said in one line and takes no room; the next save starts afresh."""
        try:
            with _quiet():
                yield
        except Exception as error:
            if jax.process_count() > 1:  # the others are at another place: nothing is saved together any more
                if is_of_devices(error):
                    raise
                raise NotWrittenError(f"{self._place(step)} could not be written: {_one_line(error)}") from error
            # The manager has already struck off what the failed save would have replaced, and repeats its error.
            with _quiet(), contextlib.suppress(Exception):
                self._manager.close()
            self._clear_incomplete()
            self._manager = self._ocp.CheckpointManager(self._directory, options=self._options)
            said = f"{self._place(step)} could not be written, those before it are kept: {_one_line(error)}"
            raise NotWrittenError(said) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _kept(array: jax.Array) -> jax.Array:
    """An array that orbax may read for as long as it writes, whatever happens to ``array``, which a step may donate.

    Orbax copies what is on an accelerator to the host before its ``save`` returns, so that the memory there needs no
    room for a second state. On a CPU its copy is a view of the array's own memory.
    """
    return jnp.copy(array) if any(device.platform == "cpu" for device in array.devices()) else array


@functools.cache
def _drop_reads_given_up() -> None:
    """Keeps off stderr the reads that orbax gave up after an error: tensorstore ends them, even much later."""
    hook = sys.excepthook

    def filtered(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not (kind is RuntimeError and str(error) == "Event loop is closed"):
            hook(kind, error, trace)

    sys.excepthook = filtered


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps off stderr what orbax logs of an error that it also raises, and its reads that are given up with it."""
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
