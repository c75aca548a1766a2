"""Replays a training log through the surge tracker and prints what the length-triggered schedule would have done.

    rljax replay runs/my_run/metrics.jsonl --png surge.png --sweep

It prints the step at which the tracker reports the surge of the response length, the decay period that follows from it,
and every change of the learning rate. LOG is a JSONL, JSON or CSV file, console output (.log or .txt), a TensorBoard
event file, or a directory that contains one of them. The event files of a run that was resumed are read as one log. The
program knows the name of the length column in the logs of verl, TRL, prime-rl, NeMo-RL, slime, Miles, SkyRL, tunix and
rljax; with ``--column`` you choose any other column of positive numbers. A step that is missing in the log counts as a
step without a length.
"""

import dataclasses
import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro
from google.protobuf.message import DecodeError
from matplotlib.figure import Figure
from tensorboardX.proto import event_pb2

from rljax.errors import ConfigError, caller_errors
from rljax.record import training_logs
from rljax.record.training_logs import Rows, columns_of, number_of
from rljax.run.options import parse_arguments
from rljax.schedule import LengthTriggeredLR, SurgeConfig, SurgeTracker

# The formats of a number in the bytes of a tensor, by the number of its dtype.
TENSOR_FORMATS = {1: "<f", 2: "<d", 3: "<i", 4: "<B", 5: "<h", 6: "<b", 9: "<q", 17: "<H", 19: "<e", 22: "<I", 23: "<Q"}
BFLOAT16 = 14
SWEEP = {"ratio": (2.0, 2.5, 3.0, 3.5, 4.0), "window": (60, 80, 100, 150, 200), "persistence": (1, 3, 6, 9, 12)}


class Replay(NamedTuple):
    """The result of a replay."""

    lengths: list[float]  # of steps 1, 2, ...
    rates: list[float]  # the learning rates of the same steps
    controller: LengthTriggeredLR  # after the last step


def read_log(path: Path, column: str | None, truncated_column: str | None) -> tuple[Rows, str, str | None]:
    """Reads a log; returns its rows, its length column, and the column with the share of truncated responses or None.

    In a directory, the first kind of log that has a length is read: metrics.jsonl, TensorBoard, metrics.jsonl in a
    folder, trainer_state.json, other text files. Several folders are one log if each starts after the one before it.
    """
    reason: ConfigError | None = None
    for kind in find_logs(path) if path.is_dir() else iter([[[path]]]):
        logs = []
        for files in kind:
            rows = [row for file in files for row in read_rows(file)]
            try:
                logs.append((files[0], rows, *training_logs.choose_columns(columns_of(rows), column, truncated_column)))
            except ConfigError as error:
                reason = reason or (error if rows else ConfigError(f"{files[0]}: the log is empty"))
        if logs:
            starts = [first_step(rows, chosen) for _, rows, chosen, _ in logs]
            same = len({chosen for _, _, chosen, _ in logs}) == 1
            if not same or any(later <= earlier for earlier, later in itertools.pairwise(starts)):
                names = ", ".join(str(file) for file, *_ in logs)
                raise ConfigError(f"{path} has the logs of several runs; choose one: {names}")
            return [row for _, rows, _, _ in logs for row in rows], logs[0][2], logs[-1][3]
    raise reason or ConfigError(f"{path}: neither metrics.jsonl nor a TensorBoard event file in it")


def first_step(rows: Rows, column: str) -> float:
    """Returns the lowest step with a value of the column, in the log's own numbers; 0 without a step column."""
    name = training_logs.choose_step_column(rows, column)
    steps = [number_of(row.get(name or "")) for row in rows if column in row]
    return min((step for step in steps if math.isfinite(step)), default=0.0)


def find_logs(directory: Path) -> Iterator[list[list[Path]]]:
    """Yields the logs of each kind in a directory. Each log is a list of files."""

    def files(pattern: str) -> list[Path]:
        return [path for path in sorted(directory.rglob(pattern)) if path.is_file()]

    top = directory / "metrics.jsonl"
    yield [[top]] if top.is_file() else []
    folders: dict[Path, list[Path]] = {}
    for path in sorted(files("*tfevents*"), key=lambda path: (first_time(path), path.name)):
        if training_logs.NOT_TRAINING.isdisjoint(path.parent.relative_to(directory).parts):
            folders.setdefault(path.parent, []).append(path)
    yield list(folders.values())
    yield [[path] for path in files("metrics.jsonl") if path != top]
    states = sorted(files("trainer_state.json"), key=lambda path: (path.parent == directory, path.stat().st_mtime))
    yield [states[-1:]] if states else []
    texts = [path for path in directory.iterdir() if path.suffix in (".jsonl", ".csv") and path.is_file()]
    yield [[path] for path in sorted(texts) if path != top]


def read_rows(path: Path) -> Rows:
    """Reads one dictionary for each record of a log file, in the order of the file."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    if "tfevents" in path.name:
        return list(tensorboard_rows(path))
    return training_logs.read_text_log(path)


def events_of(path: Path) -> Iterator[event_pb2.Event]:
    """Yields the events of an event file, in which a record is a length, a checksum, the event and a checksum."""
    data, start = path.read_bytes(), 0
    while start + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, start)
        record = data[start + 12 : start + 12 + size]
        if len(record) < size:
            return  # the program that wrote the file ended inside the last record
        try:
            yield event_pb2.Event.FromString(record)
        except DecodeError as error:
            raise ConfigError(f"{path}: not a TensorBoard event file, or a damaged one") from error
        start += 12 + size + 4


def first_time(path: Path) -> float:
    """Returns the time of the first event of an event file; 0 for an empty file."""
    return next((event.wall_time for event in events_of(path)), 0.0)


def tensorboard_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields each scalar of an event file, with its step, as one row."""
    for event in events_of(path):
        for value in event.summary.value:
            if (number := scalar_of(value)) is not None:
                yield {"step": event.step, value.tag: number}


def scalar_of(value: Any) -> float | None:
    """Returns the number in a summary value, which is either a plain number or a tensor with one element."""
    if value.HasField("simple_value"):
        return value.simple_value
    tensor = value.tensor
    if not value.HasField("tensor") or any(dim.size != 1 for dim in tensor.tensor_shape.dim):
        return None
    numbers = [*tensor.float_val, *tensor.double_val, *tensor.int_val, *tensor.int64_val]
    if numbers:
        return numbers[0]
    content = tensor.tensor_content or b"".join(struct.pack("<H", bits & 0xFFFF) for bits in tensor.half_val)
    form = TENSOR_FORMATS.get(tensor.dtype)
    if tensor.dtype == BFLOAT16:
        form, content = "<f", bytes(2) + content
    return struct.unpack(form, content)[0] if form and len(content) == struct.calcsize(form) else None


def replay(lengths: list[float], truncated: list[float], config: SurgeConfig, rate: dict[str, float]) -> Replay:
    """Gives the steps to the host controller, one after the other."""
    controller = LengthTriggeredLR(tracker=SurgeTracker(config), **rate)
    rates = [controller.step(length, fraction) for length, fraction in zip(lengths, truncated, strict=True)]
    return Replay(lengths, rates, controller)


def verdict(result: Replay) -> str:
    """Returns the step at which the tracker reported the surge, in one line."""
    controller = result.controller
    if controller.surge_step is None:
        return f"no surge in {len(result.lengths)} steps"
    called = f"surge called at step {controller.surge_step} (crossing since step {controller.tracker.crossing_step})"
    return f"{called}, decay period {controller.decay_period}"


def step_note(step_column: str | None, columns: Sequence[str]) -> str:
    """Returns what the first line says of the steps: nothing if ``step`` is the only known name in the log."""
    if step_column is None:
        return ", each row with a length is a step"
    others = set(training_logs.STEP_COLUMNS).intersection(columns) - {step_column}
    return f", steps by {step_column!r}" if others or step_column != "step" else ""


def report(result: Replay, column: str, truncated_column: str | None, note: str) -> list[str]:
    """Returns the printed report: the columns, the unused steps, the surge, and every change of the rate."""
    tracker, rates = result.controller.tracker, result.rates
    also = (f", truncated fraction {truncated_column!r}" if truncated_column else "") + note
    lines = [f"{len(result.lengths)} steps of {column!r}{also}"]
    if tracker.ignored:
        lines.append(
            f"{tracker.ignored} of them have no finite, positive length: they count as steps, but are not used"
        )
    if tracker.held_out:
        lines.append(f"{tracker.held_out} of them have a truncated fraction above max_truncated: not used")
    lines.append(verdict(result))
    for step, (before, rate) in enumerate(zip([None, *rates], rates, strict=False), 1):
        if rate != before:
            lines.append(f"  from step {step:>5}: learning rate {rate:.6g}")
    return lines


def sweep(lengths: list[float], truncated: list[float], config: SurgeConfig, rate: dict[str, float]) -> list[str]:
    """Returns the step of the surge when one rule at a time has another value; * marks the value in use."""
    lines = []
    for rule, values in SWEEP.items():
        for value in sorted({*values, getattr(config, rule)}):
            try:
                said = verdict(replay(lengths, truncated, dataclasses.replace(config, **{rule: value}), rate))
            except ValueError as error:
                said = str(error)
            lines.append(f"{'*' if value == getattr(config, rule) else ' '} {rule} {value:g}: {said}")
    return lines


def plot(result: Replay, column: str, path: Path) -> None:
    """Plots the length and the learning rate over the steps, and marks the step of the surge."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps = range(1, len(result.lengths) + 1)
    top.plot(steps, result.lengths, color="tab:blue", linewidth=1)
    top.set_ylabel(column, parse_math=False)
    bottom.step(steps, result.rates, where="mid", color="tab:orange")
    bottom.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    if result.controller.surge_step is not None:
        for axis in (top, bottom):
            axis.axvline(result.controller.surge_step, color="tab:red", linewidth=1, label="surge called")
        top.legend()
    top.set_title(verdict(result))
    figure.savefig(path, dpi=120)


@dataclass(frozen=True)
class Arguments:
    """The arguments of the replay."""

    log: tyro.conf.Positional[Path]
    """The log file of a run, or the directory that contains it."""
    column: str | None = None
    """The length column, where its name is not known."""
    truncated_column: str | None = None
    """The column with the share of truncated responses."""
    png: Path = Path("surge.png")
    """The file for the figure."""
    sweep: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show how ratio, window and persistence change the result."""
    learning_rate: float = 1e-6
    """The initial rate."""
    multiplier: float = 1.8
    """The decay period divided by the step of the surge."""
    decay_factor: float = 0.5
    """The factor of the rate at each decay."""
    floor_ratio: float = 0.1
    """The lowest rate divided by the initial one."""
    surge: Annotated[SurgeConfig, tyro.conf.arg(name="")] = field(default_factory=SurgeConfig)
    """The rules of the surge tracker."""


def main(argv: Sequence[str]) -> int:
    """Replays a log, prints the report and plots it; returns the exit status."""
    given = parse_arguments(Arguments, argv, prog="rljax replay", description=__doc__ or "")
    rate = {name: getattr(given, name) for name in ("multiplier", "decay_factor", "floor_ratio")}
    rate["init_value"] = given.learning_rate
    with caller_errors():
        rows, column, truncated_column = read_log(given.log, given.column, given.truncated_column)
        step_column = training_logs.choose_step_column(rows, column)
        lengths, truncated = training_logs.series(rows, column, truncated_column, step_column)
        result = replay(lengths, truncated, given.surge, rate)
    print("\n".join(report(result, column, truncated_column, step_note(step_column, columns_of(rows)))))
    if given.sweep:
        print("\n".join(sweep(lengths, truncated, given.surge, rate)))
    with caller_errors():
        plot(result, column, given.png)
    print(f"figure: {given.png}")
    return 0
