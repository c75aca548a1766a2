"""Replays a training log through the surge tracker and prints what the length-triggered schedule would have done.

    rljax replay runs/my_run/metrics.jsonl --png surge.png --sweep

It prints the step at which the tracker reports the surge of the response length, the decay period that follows from it,
and every change of the learning rate. LOG is a JSONL file, a CSV file or a TensorBoard event file, or a directory that
contains one. The program knows the name of the length column in the logs of verl, TRL, prime-rl, NeMo-RL, slime,
SkyRL, tunix and rljax; with ``--column`` you choose any other column of positive numbers. A step that is missing in the
log counts as a step without a length.
"""

import csv
import dataclasses
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

from rljax.errors import ConfigError, caller_errors, parse_json
from rljax.run.options import parse_arguments
from rljax.schedule import LengthTriggeredLR, SurgeConfig, SurgeTracker

# Name of the mean response length, and names of the share of truncated responses in the same log. A column matches
# when it ends in such a name.
KNOWN_COLUMNS = (
    ("response_length/mean", ("response_length/truncated_fraction", "response_length/clip_ratio")),  # rljax, verl
    ("completions/mean_length", ("completions/clipped_ratio",)),  # TRL, tunix
    ("decode_len/all/mean", ("is_truncated/all/mean",)),  # prime-rl
    ("completion_len/mean", ("is_truncated/mean",)),  # prime-rl, older
    ("num_output_tokens/mean", ("is_truncated/mean",)),  # prime-rl, newer
    ("mean_gen_tokens_per_sample", ("truncation_rate",)),  # NeMo-RL
    ("gen_tokens_per_sample/mean", ("truncation_rate",)),  # NeMo-RL
    ("response_len/mean", ("truncated_ratio",)),  # slime
    ("generate/avg_num_tokens", ()),  # SkyRL
)
STEP_COLUMNS = ("training/global_step", "trainer/global_step", "train/global_step", "step", "global_step", "Step")
MAX_STEPS = 1_000_000
NOT_TRAINING = {"eval", "val", "validation", "test"}
SWEEP: dict[str, tuple[float, ...]] = {
    "ratio": (2.0, 2.5, 3.0, 3.5, 4.0),
    "window": (60, 80, 100, 150, 200),
    "persistence": (1, 3, 6, 9, 12),
}


class Replay(NamedTuple):
    """The result of a replay: lengths and learning rates of steps 1, 2, ..., and the controller after the last step."""

    lengths: list[float]
    rates: list[float]
    controller: LengthTriggeredLR


Rows = list[dict[str, Any]]


def read_rows(path: Path) -> Rows:
    """Reads one dictionary for each record of the log, in the order of the log."""
    if path.is_dir():
        path = find_log(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    if "tfevents" in path.name:
        rows = list(tensorboard_rows(path))
    elif path.suffix == ".csv":
        rows = csv_rows(path)
    else:
        rows = jsonl_rows(path)
    if not rows:
        raise ConfigError(f"{path}: the log is empty")
    return rows


def find_log(directory: Path) -> Path:
    """Returns the log in a run directory: metrics.jsonl if there is one, otherwise the largest event file."""
    if (directory / "metrics.jsonl").is_file():
        return directory / "metrics.jsonl"
    events = sorted(filter(Path.is_file, directory.rglob("*tfevents*")), key=lambda path: path.stat().st_size)
    if not events:
        raise ConfigError(f"{directory}: neither metrics.jsonl nor a TensorBoard event file in it")
    return events[-1]


def csv_rows(path: Path) -> Rows:
    """Reads the rows of a CSV file. Cells to the right of its header are left out."""
    with path.open(newline="", encoding="utf-8") as file:
        try:
            return [{name: cell for name, cell in row.items() if name} for row in csv.DictReader(file)]
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 text") from error
        except csv.Error as error:
            raise ConfigError(f"{path}: not CSV ({error})") from error


def jsonl_rows(path: Path) -> Rows:
    """Reads the rows of a JSONL file. Each line is one JSON object."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                row = parse_json(line)
            except ValueError as error:
                raise ConfigError(f"{path}: line {number} is {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}: line {number} is not a JSON object")
            rows.append(row)
    return rows


def tensorboard_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields each scalar of an event file, with its step, as one row.

    A record in the file consists of its length, a checksum, the event and a second checksum.
    """
    data, start = path.read_bytes(), 0
    while start + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, start)
        record = data[start + 12 : start + 12 + size]
        if len(record) < size:
            return  # the program that wrote the file ended inside the last record
        try:
            event = event_pb2.Event.FromString(record)
        except DecodeError as error:
            raise ConfigError(f"{path}: not a TensorBoard event file, or a damaged one") from error
        for value in event.summary.value:
            number = scalar_of(value)
            if number is not None:
                yield {"step": event.step, value.tag: number}
        start += 12 + size + 4


def scalar_of(value: Any) -> float | None:
    """Returns the number in a summary value, which is either a plain number or a tensor."""
    if value.HasField("simple_value"):
        return value.simple_value
    if value.HasField("tensor") and not value.tensor.tensor_shape.dim:
        tensor = value.tensor
        if tensor.float_val:
            return tensor.float_val[0]
        if len(tensor.tensor_content) == 4:
            return struct.unpack("<f", tensor.tensor_content)[0]
    return None


def columns_of(rows: Rows) -> list[str]:
    """Returns every column of the log, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def matching(columns: list[str], name: str) -> list[str]:
    """Returns the columns of training that end in ``name``, the shortest first."""
    found = [
        column
        for column in columns
        if (column == name or column.endswith(("/" + name, " - " + name)))
        and not NOT_TRAINING & set(column.lower().replace("-", "/").replace(" ", "").split("/"))
    ]
    return sorted(found, key=len)


def choose_columns(columns: list[str], column: str | None, truncated_column: str | None) -> tuple[str, str | None]:
    """Returns the length column and, if the log has one, the column with the share of truncated responses."""
    for wanted in (column, truncated_column):
        if wanted is not None and wanted not in columns:
            raise ConfigError(f"no column {wanted!r} in the log; it has: {', '.join(columns)}")
    if column is not None:
        return column, truncated_column
    for length_name, truncated_names in KNOWN_COLUMNS:
        lengths = matching(columns, length_name)
        if lengths:
            prefix = lengths[0].removesuffix(length_name)
            truncated = [prefix + name for name in truncated_names if prefix + name in columns]
            return lengths[0], truncated_column or (truncated[0] if truncated else None)
    raise ConfigError(
        f"no length column of a known name in the log; choose one with --column from: {', '.join(columns)}"
    )


def number_of(value: Any) -> float:
    """Returns a value of the log as a float; NaN if it is not a number."""
    if value is None or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def series(rows: Rows, column: str, truncated_column: str | None) -> tuple[list[float], list[float]]:
    """Returns lengths and truncated fractions of steps 1, 2, ...; NaN if a step has none. A repeated step overrides."""
    step_column = next((name for name in STEP_COLUMNS if any(name in row for row in rows)), None)
    by_step: dict[int, dict[str, float]] = {}
    for row in rows:
        cells = {name: number_of(row[name]) for name in (column, truncated_column) if name is not None and name in row}
        if not cells:
            continue
        step = number_of(row.get(step_column)) if step_column else len(by_step)
        if math.isfinite(step):
            by_step.setdefault(int(step), {}).update(cells)
    by_step = {step: cells for step, cells in by_step.items() if column in cells}
    if not by_step:
        raise ConfigError(f"column {column!r} has no row with a step")
    if max(by_step) > MAX_STEPS:
        raise ConfigError(f"column {step_column!r} has a step of {max(by_step):.3g}, beyond {MAX_STEPS:,}")
    first = 0 if min(by_step) == 0 else 1
    empty: dict[str, float] = {}
    ordered = [by_step.get(step, empty) for step in range(first, max(by_step) + 1)]
    lengths = [cells.get(column, math.nan) for cells in ordered]
    truncated = [cells.get(truncated_column or "", math.nan) for cells in ordered]
    if not any(math.isfinite(length) and length > 0 for length in lengths):
        raise ConfigError(f"column {column!r} has no positive number in any of its {len(lengths)} steps")
    return lengths, truncated


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
    return (
        f"surge called at step {controller.surge_step} (crossing since step {controller.tracker.crossing_step}), "
        f"decay period {controller.decay_period}"
    )


def report(result: Replay, column: str, truncated_column: str | None) -> list[str]:
    """Returns the printed report: the columns, the unused steps, the surge, and every change of the rate."""
    tracker = result.controller.tracker
    also = f", truncated fraction {truncated_column!r}" if truncated_column else ""
    lines = [f"{len(result.lengths)} steps of {column!r}{also}"]
    if tracker.ignored:
        lines.append(
            f"{tracker.ignored} of them have no finite, positive length: they count as steps, but are not used"
        )
    if tracker.held_out:
        lines.append(f"{tracker.held_out} of them have a truncated fraction above max_truncated: not used")
    lines.append(verdict(result))
    for step, rate in enumerate(result.rates, 1):
        if step == 1 or rate != result.rates[step - 2]:
            lines.append(f"  from step {step:>5}: learning rate {rate:.6g}")
    return lines


def sweep(lengths: list[float], truncated: list[float], config: SurgeConfig, rate: dict[str, float]) -> list[str]:
    """Returns the step of the surge when one rule at a time has another value; * marks the value in use."""
    lines = []
    for rule, values in SWEEP.items():
        for value in sorted({*values, getattr(config, rule)}):
            mark = "*" if value == getattr(config, rule) else " "
            try:
                changed = dataclasses.replace(config, **{rule: value})
            except ValueError as error:
                lines.append(f"{mark} {rule} {value:g}: {error}")
                continue
            lines.append(f"{mark} {rule} {value:g}: {verdict(replay(lengths, truncated, changed, rate))}")
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
    rate = {
        "init_value": given.learning_rate,
        "multiplier": given.multiplier,
        "decay_factor": given.decay_factor,
        "floor_ratio": given.floor_ratio,
    }
    with caller_errors():
        rows = read_rows(given.log)
        column, truncated_column = choose_columns(columns_of(rows), given.column, given.truncated_column)
        lengths, truncated = series(rows, column, truncated_column)
        result = replay(lengths, truncated, given.surge, rate)
    print("\n".join(report(result, column, truncated_column)))
    if given.sweep:
        print("\n".join(sweep(lengths, truncated, given.surge, rate)))
    with caller_errors():
        plot(result, column, given.png)
    print(f"figure: {given.png}")
    return 0
