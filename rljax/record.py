"""The record of a run: one row a step to metrics.jsonl, TensorBoard and the console, and the summary of those rows."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter
from tqdm import tqdm

from rljax.mismatch.histogram import GROWTH, bin_edges

Row = dict[str, Any]

NONFINITE_KEYS = "nonfinite_keys"
PLAIN_EVERY_STEPS = 10
PLAIN_EVERY_SECONDS = 30.0
EDGE_STEPS = 10  # steps at either end of a run that its first and last means are taken over
WINDOW_STEPS = 5  # trailing steps of the mean length whose tripling is reported

_CONSOLE = (
    ("reward", "reward/mean", "{:.3f}"),
    ("length", "response_length/mean", "{:.1f}"),
    ("lr", "schedule/learning_rate", "{:.2e}"),
    ("mismatch", "mismatch/log_ppl_abs_diff", "{:.2e}"),
)


class Recorder:
    """Writes one row a step.

    ``metrics.jsonl`` holds strict JSON: ``step`` first, then the keys by name; a number that is not finite is written
    as null and its key listed under ``nonfinite_keys``. TensorBoard groups the same keys by what stands before the
    ``/``. On a terminal a progress bar shows reward, length, rate and mismatch; elsewhere a plain line is printed every
    10 steps or 30 seconds, at the first and last step and at every evaluation.

    Args:
      run_dir: made if it is not there.
      total_steps: the run's last step.
      first_step: 1-based step of the first row to come. Rows from there on are dropped from an earlier record.
      tensorboard: whether to write ``tb/``.
      progress: whether to report on stderr.

    Raises:
      RuntimeError: the record on disk does not hold exactly the steps 1 .. first_step - 1 before that, or is damaged.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        total_steps: int,
        *,
        first_step: int = 1,
        tensorboard: bool = True,
        progress: bool = True,
    ) -> None:
        if first_step < 1:
            raise ValueError(f"first_step must be at least 1, got {first_step}")
        directory = Path(run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        _keep_steps_before(path, first_step)
        self._next_step = first_step
        self._file = path.open("a", encoding="utf-8")
        self._tensorboard = _make_tensorboard(directory / "tb", first_step) if tensorboard else None
        self._console = _make_console(total_steps, first_step) if progress else None

    def write(self, row: Mapping[str, Any], histograms: Mapping[str, np.ndarray] | None = None) -> None:
        """Records the row of the next step; the values are None, strings, bools or numbers (numpy and jax scalars too).

        ``histograms``: name -> counts in the bins of ``rljax.mismatch.bin_edges``, for TensorBoard alone.

        Raises:
          ValueError: ``row["step"]`` is not the next step.
          TypeError: a value that is none of the above.
        """
        values = {key: _to_python(key, value) for key, value in row.items()}
        if values.get("step") != self._next_step:
            raise ValueError(f"expected the row of step {self._next_step}, got step {values.get('step')}")
        # One write of a whole line: a kill leaves at most one torn line, at the end.
        self._file.write(_encode(values) + "\n")
        self._file.flush()
        self._next_step += 1
        if self._tensorboard is not None:
            for key, value in values.items():
                if isinstance(value, (bool, int, float)) and key != "step":
                    self._tensorboard.add_scalar(key, value, values["step"])
            for name, counts in (histograms or {}).items():
                _add_histogram(self._tensorboard, name, counts, values["step"])
        if self._console is not None:
            self._console.show(values)

    def close(self) -> None:
        """Flushes and closes everything; may be called twice."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._console is not None:
            self._console.close()


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a ``metrics.jsonl``; a torn last line, as a killed run leaves it, is left out.

    Raises:
      FileNotFoundError: there is no such file.
      RuntimeError: any other line is not a row.
    """
    return [row for row, _ in _read_lines(Path(path))]


def _make_tensorboard(directory: Path, first_step: int) -> SummaryWriter:
    # Event files are named by the second: without the suffix, a resume within it would overwrite the file before.
    return SummaryWriter(str(directory), purge_step=first_step, filename_suffix=f".{first_step:08d}")


def _add_histogram(writer: SummaryWriter, name: str, counts: np.ndarray, step: int) -> None:
    """One histogram of log-spaced bins; the values themselves are gone, so moments are taken at the bins' middles."""
    edges = bin_edges()
    uppers = np.append(edges, edges[-1] * GROWTH)
    middles = np.concatenate([[0.0], np.sqrt(edges[:-1] * edges[1:]), edges[-1:]])
    held = np.flatnonzero(counts)
    if not len(held):
        return
    part = slice(held[0], held[-1] + 1)
    writer.add_histogram_raw(
        name,
        min=float(middles[held[0]]),
        max=float(middles[held[-1]]),
        num=int(counts.sum()),
        sum=float(counts @ middles),
        sum_squares=float(counts @ middles**2),
        bucket_limits=uppers[part].tolist(),
        bucket_counts=counts[part].tolist(),
        global_step=step,
    )


def _encode(values: Row) -> str:
    bad = sorted(key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value))
    ordered = {"step": values["step"]} | {key: values[key] for key in sorted(values) if key != "step"}
    ordered |= dict.fromkeys(bad) | ({NONFINITE_KEYS: bad} if bad else {})
    return json.dumps(ordered, allow_nan=False)


def _to_python(key: str, value: Any) -> Any:
    if key == NONFINITE_KEYS:
        raise ValueError(f"the key {NONFINITE_KEYS} is the recorder's own")
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{key}: expected a scalar, got {type(value).__name__}")


def _read_lines(path: Path) -> list[tuple[Row, bytes]]:
    """Each row with its line as it stands in the file."""
    lines = path.read_bytes().splitlines()
    rows: list[tuple[Row, bytes]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise RuntimeError(f"{path}:{number}: not a row: {error}") from error
        if not isinstance(row, dict) or "step" not in row:
            raise RuntimeError(f"{path}:{number}: expected an object with a step, got {line[:60]!r}")
        rows.append((row, line))
    return rows


def _keep_steps_before(path: Path, first_step: int) -> None:
    """Cuts the record down to the steps 1 .. first_step - 1, in one rename."""
    lines = _read_lines(path) if path.exists() else []
    kept = [(row["step"], line) for row, line in lines if row["step"] < first_step]
    got, expected = [step for step, _ in kept], list(range(1, first_step))
    if got != expected:
        raise RuntimeError(f"{path}: expected {_span(expected)} before step {first_step}, got {_span(got)}")
    if not path.exists():
        return
    temporary = path.with_suffix(".jsonl.tmp")
    with temporary.open("wb") as file:
        file.writelines(line + b"\n" for _, line in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _span(steps: Sequence[int]) -> str:
    if not steps:
        return "no rows"
    breaks = [after for before, after in pairwise(steps) if after != before + 1]
    out_of_order = f" with a break before step {breaks[0]}" if breaks else ""
    return f"{len(steps)} rows from step {steps[0]} to {steps[-1]}{out_of_order}"


# --- the console ------------------------------------------------------------------------------------------------------


class _Bar:
    """A progress bar for a terminal."""

    def __init__(self, total_steps: int, first_step: int) -> None:
        self._bar = tqdm(total=total_steps, initial=first_step - 1, unit="step", file=sys.stderr, dynamic_ncols=True)

    def show(self, row: Row) -> None:
        self._bar.set_postfix_str("  ".join(_console_parts(row)), refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()


class _Lines:
    """Plain lines for a log."""

    def __init__(self, total_steps: int, first_step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total_steps, self._first_step, self._clock = total_steps, first_step, clock
        self._last_time, self._last_step = clock(), first_step - 1

    def show(self, row: Row) -> None:
        step, now = row["step"], self._clock()
        evaluations = [key for key in row if key.startswith("eval/")]
        is_due = step % PLAIN_EVERY_STEPS == 0 or now - self._last_time >= PLAIN_EVERY_SECONDS
        if not (is_due or evaluations or step in (self._first_step, self._total_steps)):
            return
        pace = (now - self._last_time) / (step - self._last_step)
        self._last_time, self._last_step = now, step
        parts = [f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}", *_console_parts(row)]
        parts += [f"{key} {_format('{:.3f}', row[key])}" for key in evaluations if is_accuracy(key)]
        print("  ".join([*parts, f"{pace:.2f} s/step"]), file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


def _make_console(total_steps: int, first_step: int) -> _Bar | _Lines:
    return _Bar(total_steps, first_step) if sys.stderr.isatty() else _Lines(total_steps, first_step)


def _console_parts(row: Row) -> list[str]:
    return [f"{label} {_format(form, row.get(key))}" for label, key, form in _CONSOLE]


def _format(form: str, value: Any) -> str:
    return "-" if value is None else form.format(value)


# --- the summary ------------------------------------------------------------------------------------------------------


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """What a run came to; None stands for what its rows do not tell. Steps are 1-based, lengths in tokens.

    ``length_tripled_step`` is the first step whose trailing 5-step mean length is at least three times the mean of the
    first 10 steps. ``wall_seconds`` adds up ``time/step_s``, or every ``time/*`` where there is none.

    Raises:
      ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("no rows to summarize")
    rewards, lengths = _series(rows, "reward/mean"), _series(rows, "response_length/mean")
    mismatch = [value for _, value in _series(rows, "mismatch/log_ppl_abs_diff")]
    first, last = _edge_mean(rewards, first=True), _edge_mean(rewards, first=False)
    return {
        "steps": rows[-1]["step"],
        "reward_first": first,
        "reward_last": last,
        "reward_gain": None if first is None or last is None else last - first,
        "response_length_first": _edge_mean(lengths, first=True),
        "response_length_last": _edge_mean(lengths, first=False),
        "length_tripled_step": _tripled_step(lengths),
        "surge_step": last_value(rows, "schedule/surge_step"),
        "decay_period": last_value(rows, "schedule/decay_period"),
        "learning_rate_final": last_value(rows, "schedule/learning_rate"),
        "evaluations": _evaluations(rows),
        "mismatch_mean": _mean(mismatch),
        "mismatch_max": max(mismatch, default=None),
        "skipped_updates": last_value(rows, "optimizer/skipped_updates"),
        "rows_with_nonfinite": sum(NONFINITE_KEYS in row for row in rows),
        "wall_seconds": sum(map(step_seconds, rows)),
    }


def write_summary(run_dir: str | os.PathLike[str], summary: Mapping[str, Any]) -> Path:
    """Writes ``summary.json`` in one rename and returns its path."""
    path = Path(run_dir) / "summary.json"
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def format_summary(summary: Mapping[str, Any]) -> str:
    """The summary as a table for a terminal."""

    def say(key: str, form: str = "{}") -> str:
        return _format(form, summary[key])

    gain = f"(gain {say('reward_gain', '{:+.3f}')})"
    lines = [
        ("steps", say("steps")),
        ("reward", f"{say('reward_first', '{:.3f}')} -> {say('reward_last', '{:.3f}')} {gain}"),
        (
            "response length",
            f"{say('response_length_first', '{:.1f}')} -> {say('response_length_last', '{:.1f}')} tokens",
        ),
        ("length tripled", _at_step(summary["length_tripled_step"])),
        ("surge called", f"{_at_step(summary['surge_step'])}; decay period {say('decay_period')}"),
        ("final learning rate", say("learning_rate_final", "{:.3e}")),
    ]
    for name, value in summary["evaluations"].items():
        last, best = _format("{:.3f}", value["last"]), _format("{:.3f}", value["best"])
        lines.append((f"accuracy on {name}", f"{last} (best {best} at step {value['best_step']})"))
    lines += [
        ("mismatch", f"mean {say('mismatch_mean', '{:.2e}')}, max {say('mismatch_max', '{:.2e}')} (log_ppl_abs_diff)"),
        ("skipped updates", say("skipped_updates")),
        ("rows with non-finite", say("rows_with_nonfinite")),
        ("wall time", _duration(summary["wall_seconds"])),
    ]
    width = max(len(label) for label, _ in lines)
    notes = f"first and last: means over {EDGE_STEPS} steps"
    rule = "-" * max(len(notes), *(width + 2 + len(text) for _, text in lines))
    return "\n".join([rule, *(f"{label:<{width}}  {text}" for label, text in lines), rule, notes])


def _at_step(step: int | None) -> str:
    return "never" if step is None else f"at step {step}"


def _series(rows: Iterable[Row], key: str) -> list[tuple[int, float]]:
    """(step, value) wherever the key has a value."""
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def last_value(rows: Sequence[Row], key: str) -> Any:
    """The last value recorded under the key; None without one."""
    return next((row[key] for row in reversed(rows) if row.get(key) is not None), None)


def is_accuracy(key: str) -> bool:
    """Whether a key is ``eval/<dataset>/accuracy``."""
    return key.startswith("eval/") and key.endswith("/accuracy")


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _edge_mean(series: Sequence[tuple[int, float]], *, first: bool) -> float | None:
    edge = series[:EDGE_STEPS] if first else series[-EDGE_STEPS:]
    return _mean([value for _, value in edge])


def _tripled_step(lengths: Sequence[tuple[int, float]]) -> int | None:
    start = _edge_mean(lengths, first=True)
    if start is None or len(lengths) < EDGE_STEPS:
        return None
    for end in range(EDGE_STEPS, len(lengths) + 1):
        window = lengths[end - WINDOW_STEPS : end]
        if math.fsum(value for _, value in window) / WINDOW_STEPS >= 3 * start:
            return window[-1][0]
    return None


def _evaluations(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Dataset -> last and best accuracy; of equal bests the first step counts."""
    keys = sorted({key for row in rows for key in row if is_accuracy(key)})
    found: dict[str, dict[str, Any]] = {}
    for key in keys:
        series = _series(rows, key)
        if series:
            best_step, best = max(series, key=lambda item: item[1])
            found[key[len("eval/") : -len("/accuracy")]] = {
                "last": series[-1][1],
                "best": best,
                "best_step": best_step,
            }
    return found


def step_seconds(row: Row) -> float:
    """``time/step_s`` of a row, or every ``time/*`` where there is none."""
    if row.get("time/step_s") is not None:
        return row["time/step_s"]
    return math.fsum(value for key, value in row.items() if key.startswith("time/") and value is not None)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:04.1f} s" if minutes else f"{rest:.1f} s"
