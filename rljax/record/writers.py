"""Writes the record of a run: one row each step to metrics.jsonl, TensorBoard and the console."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from rljax.distributed.files import write_durably
from rljax.errors import NotWrittenError, writing
from rljax.mismatch.metrics import bin_edges
from rljax.record.rows import NONFINITE_KEYS, Row, cell, is_accuracy, read_lines

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter

PLAIN_EVERY_STEPS = 10
PLAIN_EVERY_SECONDS = 30.0

_CONSOLE = (
    ("reward", "reward/mean", ".3f"),
    ("length", "response_length/mean", ".1f"),
    ("lr", "schedule/learning_rate", ".2e"),
    ("mismatch", "mismatch/log_ppl_abs_diff", ".2e"),
    ("mean abs", "mismatch/logprob_abs_diff_mean", ".2e"),
)


Report = Callable[[Row, Mapping[str, np.ndarray]], None]
"""A function that takes the row of a step, and its histograms by name, for a form of the record beside the file."""


class Recorder:
    """A writer of one row each step into ``run_dir``, which is made if it is missing.

    ``metrics.jsonl`` has strict JSON: ``step`` first, then the other keys by name. A number that is not finite is
    written as null, and its key is listed under ``nonfinite_keys``. TensorBoard, in ``tb/``, groups the keys by the
    part before the ``/``. On a terminal a progress bar shows reward, length, rate and mismatch. Elsewhere a plain line
    is printed every 10 steps or 30 seconds, at the first and the last step, and at every evaluation.

    With ``compiles`` a line says that the first step compiles, and a second line how long that step took. ``more`` are
    further functions that get each row.

    Rows on disk of the step ``first_step`` (1-based) and later are removed. Raises RuntimeError if the record on disk
    is damaged, or its earlier steps are not exactly 1 .. first_step - 1.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        total_steps: int,
        *,
        first_step: int = 1,
        tensorboard: bool = True,
        progress: bool = True,
        compiles: bool = False,
        more: Sequence[Report] = (),
    ) -> None:
        directory = Path(run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "metrics.jsonl"
        _keep_steps_before(self._path, first_step)
        self._next_step = first_step
        self._open()
        self._closing = contextlib.ExitStack()
        self._reports: list[Report] = [*more]
        if tensorboard:
            board = _TensorBoard(directory / "tb", first_step)
            self._reports.append(board)
            self._closing.callback(board.close)
        if compiles and first_step <= total_steps:
            self._reports.append(_first_step(first_step))
        if progress:
            # disable=None: without a terminal there is no bar, and its methods do nothing.
            form: dict[str, Any] = {"unit": "step", "file": sys.stderr, "dynamic_ncols": True, "disable": None}
            bar = tqdm(total=total_steps, initial=first_step - 1, **form)
            self._reports.append(_Console(self._closing.enter_context(bar), total_steps, first_step))

    def write(self, row: Mapping[str, Any], histograms: Mapping[str, np.ndarray] | None = None) -> None:
        """Records the row of the next step.

        Args:
          row: The values by key: None, strings, bools, or numbers, which may be scalars of numpy or jax.
          histograms: The counts by name, in the bins of ``rljax.mismatch.metrics.bin_edges``. Only TensorBoard gets
            them.

        Raises:
          ValueError: The row belongs to another step, or has the key ``nonfinite_keys``.
          TypeError: A value is not a scalar.
          OSError: The row cannot be written. The file then has nothing of it, and the caller may try again.
          NotWrittenError: Somebody removed, replaced or changed the file. A file that was removed is written again,
            without the row, and the caller may try again.
        """
        values = {key: _to_python(key, value) for key, value in row.items()}
        if values.get("step") != self._next_step:
            raise ValueError(f"expected the row of step {self._next_step}, got step {values.get('step')}")
        self._append(f"{_encode(values)}\n".encode())
        self._next_step += 1
        for report in self._reports:
            with contextlib.suppress(OSError):  # a terminal that is gone, or a full disk of its log; the row is written
                report(values, histograms or {})

    def sync(self) -> None:
        """Waits until every row is on the disk, so that a checkpoint can rely on it. Raises NotWrittenError."""
        self._check_file()
        os.fsync(self._file.fileno())

    def _open(self) -> None:
        self._file = self._path.open("a+b", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size

    def _append(self, line: bytes) -> None:
        """Writes a line in one call, so that a killed process leaves at most one incomplete line, the last."""
        self._check_file()
        try:
            with writing(self._file.name):
                if self._file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += len(line)

    def _check_file(self) -> None:
        """Raises NotWrittenError if the file is no longer the one that this recorder wrote."""
        own, last = os.fstat(self._file.fileno()), self._next_step - 1
        try:
            is_own = os.path.samestat(os.stat(self._path), own)
        except FileNotFoundError:
            self._file.seek(0)
            write_durably(self._path, self._file.read())
            self._file.close()
            self._open()
            said = f"was removed while the run went on; its rows up to step {last} are written again"
            raise NotWrittenError(f"{self._path} {said}") from None
        if not is_own or own.st_size != self._size:
            changed = f"has {own.st_size} bytes, {self._size} were written"
            said = f"{self._path} {changed if is_own else 'was replaced by another file'} while the run went on"
            raise NotWrittenError(f"{said}: rows up to step {last} may be lost")

    def close(self) -> None:
        """Flushes and closes everything; a second call does nothing."""
        self._file.close()
        self._closing.close()


class _TensorBoard:
    """A TensorBoard event file, which is opened at the first row.

    It is written without the thread of a SummaryWriter. On a full disk that thread ends, and its queue blocks the run.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        _import_without_torch()
        self._directory, self._first_step = directory, first_step
        self._file: EventsWriter | None = None
        self._failed = False

    def __call__(self, row: Row, histograms: Mapping[str, np.ndarray]) -> None:
        """Writes the row. After an error it prints a warning and writes no more."""
        if self._failed:
            return
        try:
            self._write(row, histograms)
        except OSError as error:
            self._failed = True
            print(f"\nwarning: {self._directory} is not written any more: {error}", file=sys.stderr)

    def _write(self, row: Row, histograms: Mapping[str, np.ndarray]) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import histogram_raw

        if self._file is None:
            self._directory.mkdir(exist_ok=True)
            # Event files are named by the second. Without the suffix, a quick resume would overwrite the last file.
            self._file = EventsWriter(str(self._directory / "events"), f".{self._first_step:08d}")
            start = SessionLog(status=SessionLog.START)  # hides rows of an earlier process from this step on
            for event in (Event(file_version="brain.Event:2"), Event(session_log=start)):
                event.step = self._first_step
                self._file.write_event(event)
        numbers = {k: float(v) for k, v in row.items() if isinstance(v, (bool, int, float)) and k != "step"}
        # tensorboardX.summary.scalar would replace characters of the keys.
        scalars = [Summary.Value(tag=key, simple_value=number) for key, number in numbers.items()]
        shapes = [_histogram(name, counts) for name, counts in histograms.items() if counts.any()]
        for summary in (Summary(value=scalars), *(histogram_raw(**shape) for shape in shapes)):
            self._file.write_event(Event(summary=summary, step=row["step"], wall_time=time.time()))
        self._file.flush()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None and not self._failed:
            with contextlib.suppress(OSError):  # the error that ends a run on a full disk is reported already
                file.close()


def _import_without_torch() -> None:
    """Imports tensorboardX without torch, which takes two seconds to import and is only needed for torch tensors."""
    hidden: dict[str, Any] = {} if "torch" in sys.modules else {"torch": None}
    sys.modules.update(hidden)
    try:
        import tensorboardX  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]


def _histogram(name: str, counts: np.ndarray) -> dict[str, Any]:
    """Returns the arguments of tensorboardX's ``histogram_raw`` for counts in log-spaced bins.

    The moments use the middle of each bin, because only counts are known.
    """
    edges = bin_edges()
    uppers = np.append(edges, edges[-1] ** 2 / edges[-2])
    middles = np.concatenate([[0.0], np.sqrt(edges[:-1] * edges[1:]), edges[-1:]])
    filled = np.flatnonzero(counts)
    part = slice(filled[0], filled[-1] + 1)
    extremes = {"min": float(middles[filled[0]]), "max": float(middles[filled[-1]]), "num": int(counts.sum())}
    sums = {"sum": float(counts @ middles), "sum_squares": float(counts @ middles**2)}
    buckets = {"bucket_limits": uppers[part].tolist(), "bucket_counts": counts[part].tolist()}
    return {"name": name, **extremes, **sums, **buckets}


def _encode(values: Row) -> str:
    bad = sorted(key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value))
    ordered = {"step": values["step"]} | {key: values[key] for key in sorted(values) if key != "step"}
    ordered |= dict.fromkeys(bad) | ({NONFINITE_KEYS: bad} if bad else {})
    return json.dumps(ordered, allow_nan=False)


def _to_python(key: str, value: Any) -> Any:
    if key == NONFINITE_KEYS:
        raise ValueError(f"the key {NONFINITE_KEYS} is reserved for the recorder")
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{key}: expected a scalar, got {type(value).__name__}")


def _keep_steps_before(path: Path, first_step: int) -> None:
    """Cuts the record down to the steps 1 .. first_step - 1. The shorter file replaces the old one by a rename.

    Raises RuntimeError if the record is damaged, or lacks one of these steps.
    """
    lines = read_lines(path) if path.exists() else []
    kept = [(row["step"], line) for row, line in lines if row["step"] < first_step]
    got = [step for step, _ in kept]
    if got != list(range(1, first_step)):
        found = f"got {len(got)} up to step {max(got, default=0)}"
        raise RuntimeError(f"{path}: expected the rows of steps 1 to {first_step - 1} in order, {found}")
    if path.exists():
        write_durably(path, b"".join(line + b"\n" for _, line in kept))


def _first_step(step: int) -> Report:
    """Prints that the first step compiles, and returns a function that prints how long it took."""
    start = time.monotonic()
    print(f"compiling step {step}; the steps after it are faster", file=sys.stderr, flush=True)

    def show(row: Row, _: Mapping[str, np.ndarray]) -> None:
        if row["step"] == step:
            tqdm.write(f"compiled; step {step} took {time.monotonic() - start:.1f} s", file=sys.stderr)

    return show


class _Console:
    def __init__(self, bar: tqdm[Any], total_steps: int, first_step: int) -> None:
        self._bar, self._total_steps, self._first_step = bar, total_steps, first_step
        self._last_time, self._last_step = time.monotonic(), first_step - 1

    def __call__(self, row: Row, _: Mapping[str, np.ndarray]) -> None:
        parts = [f"{label} {cell(row.get(key), form)}" for label, key, form in _CONSOLE]
        if self._bar.disable:
            self._print_line(row, parts)
        else:
            self._bar.set_postfix_str("  ".join(parts), refresh=False)
            self._bar.update(1)

    def _print_line(self, row: Row, parts: list[str]) -> None:
        step, now = row["step"], time.monotonic()
        evaluations = [key for key in row if key.startswith("eval/")]
        is_due = step % PLAIN_EVERY_STEPS == 0 or now - self._last_time >= PLAIN_EVERY_SECONDS
        if not (is_due or evaluations or step in (self._first_step, self._total_steps)):
            return
        pace = (now - self._last_time) / (step - self._last_step)
        self._last_time, self._last_step = now, step
        accuracies = [f"{key} {cell(row[key], '.3f')}" for key in evaluations if is_accuracy(key)]
        counted = f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"
        print("  ".join([counted, *parts, *accuracies, f"{pace:.2f} s/step"]), file=sys.stderr, flush=True)
