"""The signals of a training log under one name each: mismatch, entropy, gradient norm, reward, length, rate, staleness.

A column matches if its name ends in a known name, whatever prefix a logger adds.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rljax.errors import ConfigError
from rljax.mismatch.names import NAME_TABLE, NOT_TRAINING, RUN_COLUMNS, SIGNAL_NAMES
from rljax.record.training_logs import (
    Rows,
    cells_by_step,
    choose_columns,
    choose_step_column,
    columns_of,
    matching,
    number_of,
)

MISMATCH = (
    *("logprob_abs_diff_mean", "logprob_abs_diff_max", "k3_kl", "kl", "log_ppl_abs_diff", "log_ppl_diff"),
    *("prob_abs_diff_mean", "prob_abs_diff_max", "pearson_corr", "slope_per_1k", "extreme_rate", "nonfinite_count"),
    *("token_mult_prob_error", "training_log_ppl", "chi2_token"),
    *("logprob_abs_diff_p99", "logprob_abs_diff_p999", "logprob_abs_diff_std"),
    *("ratio_mean", "ratio_max", "ratio_min"),
)
"""The mismatch signals: metrics of ``rljax.mismatch`` with these names, and those that only other projects log.

The latter are ``token_mult_prob_error``, ``logprob_abs_diff_std`` (the standard deviation of abs(lr)), and the mean,
the largest and the smallest exp(lr). lr is the log-ratio of trainer to engine of a token.
"""

FEWEST_LOST = 3
"""A signal is lost if its log ends with at least so many numbers that are not finite."""
PROJECTS = tuple(SIGNAL_NAMES)
"""The projects whose logs are known."""
BUCKETED = ("mismatch_position", "mismatch_entropy", "mismatch_staleness", "turns")
"""The groups of rljax's rows that split the mismatch by bucket. ``turns`` has two splits: ``turn`` and ``after``."""
PARTS = ("mismatch_numerics", "mismatch_drift", "mismatch_self")
"""The groups of rljax's rows that have a part of the mismatch, or the trainer's mismatch with itself."""


@dataclass(frozen=True)
class Log:
    """The signals of a training log by step. A number that a step lacks is NaN."""

    project: str  # one of PROJECTS
    steps: np.ndarray  # int64 [n], increasing
    signals: Mapping[str, np.ndarray]  # float64 [n] each, by the name of the signal
    columns: Mapping[str, str]  # the column of the log that each signal is read from
    # rljax's buckets, by group and label, in the order of the edges: the metrics of the bucket, float64 [n] each.
    buckets: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)  # the first step from which a signal is never finite again

    def get(self, name: str) -> np.ndarray:
        """Returns a signal, float64 [n]; NaN everywhere if the log lacks it."""
        return self.signals.get(name, np.full(len(self.steps), np.nan))

    def has(self, *names: str) -> bool:
        """Returns whether the log has a finite number of each of these signals."""
        return all(bool(np.isfinite(self.get(name)).any()) for name in names)


def names_of(project: str) -> dict[str, tuple[str, ...]]:
    """Returns a project's names of each signal, the best first. A "-" before a name says that its sign is turned."""
    metrics = NAME_TABLE.get(project, ())
    table = [(ours, (name,)) for name, _, ours in metrics if isinstance(ours, str) and ours in MISMATCH]
    table += [(name, (f"mismatch/{name}",)) for name in MISMATCH if project == "rljax"]
    known: dict[str, tuple[str, ...]] = {}
    for signal, names in (*table, *SIGNAL_NAMES[project].items()):
        known[signal] = (*known.get(signal, ()), *names)
    return known


def choose_signals(columns: list[str], projects: Sequence[str] = PROJECTS) -> tuple[str, dict[str, str]]:
    """Finds the one of ``projects`` whose names fit a log best; returns it and the column of each signal.

    Raises ConfigError if the log has neither a mismatch nor a reward or gradient norm of a known name.
    """
    fits = {project: _fitting(project, columns) for project in projects}
    # Long names of a project's own count more than "reward" or "kl". Of equal projects the first is taken.
    words = {name: sum(one.count("/") + one.count("_") + 1 for one in fit.values()) for name, fit in fits.items()}
    project = max(projects, key=lambda name: words[name])
    found = fits[project]
    if not {*MISMATCH, "reward", "grad_norm"} & set(found):
        known = f"no mismatch, reward or gradient norm of a known name in the log ({', '.join(PROJECTS)})"
        raise ConfigError(f"{known}; it has: {', '.join(columns[:20])}")
    return project, found


def _fitting(project: str, columns: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for signal, endings in names_of(project).items():
        matches = (column for ending in endings for column in matching(columns, ending.removeprefix("-")))
        if (column := next(matches, None)) is not None:
            found[signal] = column
    with contextlib.suppress(ConfigError):
        found["length"], truncated = choose_columns(columns, None, None)
        found |= {"truncated": truncated} if truncated else {}
    return found


def read_signals(rows: Rows, projects: Sequence[str] = PROJECTS) -> Log:
    """Reads the signals of a log's rows, which one of ``projects`` wrote.

    Raises ConfigError if the log has no known signal, or no step.
    """
    rows = [{name: cell for name, cell in row.items() if cell is not None} for row in rows]
    columns = columns_of(rows)
    project, found = choose_signals(columns, projects)
    split = tuple(f"{group}/" for group in (*BUCKETED, *PARTS)) if project == "rljax" else ()
    wanted = found | {name: name for name in columns if name.startswith(split)}
    dated = next((found[name] for name in ("length", *MISMATCH, *found) if name in found), "")
    step_column = choose_step_column(rows, dated)
    by_step = dict(sorted(cells_by_step(rows, wanted, step_column).items()))
    if not by_step:
        raise ConfigError("the log has no row with a step and a signal of a known name")
    table = {name: np.array([cells.get(name, math.nan) for cells in by_step.values()]) for name in wanted}
    buckets: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    for name in [name for name in table if name.partition("/")[0] in BUCKETED]:
        values, (group, label, *metric) = table.pop(name), name.split("/", 2)
        if group == "turns":
            kind, _, label = label.partition("_")
            group = f"turns/{kind}"
        if metric:
            buckets.setdefault(group, {}).setdefault(label, {})[metric[0]] = values
    ordered = {group: dict(sorted(each.items(), key=lambda item: _edge(item[0]))) for group, each in buckets.items()}
    for signal, endings in names_of(project).items():
        if any(ending.startswith("-") and found.get(signal, "").endswith(ending[1:]) for ending in endings):
            table[signal] = -table[signal]
    # A step with numbers of an evaluation alone is none of the training.
    evaluated = {name: name for name in columns if re.split(r"[/_.-]", name)[0] in NOT_TRAINING}
    others = cells_by_step(rows, evaluated, step_column)
    only = {at for at in others if _any_finite(others[at], evaluated) and not _any_finite(by_step.get(at, {}), found)}
    held = {at: cells for at, cells in by_step.items() if at not in only}
    lost = {name: _last_finite([(at, cells[name]) for at, cells in held.items() if name in cells]) for name in found}
    lost_at = {name: at for name, at in lost.items() if at is not None}
    return Log(project, np.array([*by_step]), table | _derived(table), found, ordered, lost_at)


def _any_finite(cells: Mapping[str, float], names: Iterable[str]) -> bool:
    return any(math.isfinite(cells.get(name, math.nan)) for name in names)


def _derived(plain: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the signals that follow from those of a log, and the ratios without those after a cap or a mask."""
    new: dict[str, np.ndarray] = {}
    if "filtered" in plain:
        kl, ratio = (plain.get(name, np.array(math.nan)) for name in ("kl", "ratio_mean"))
        # AReaL's ratio may be exp of the mean lr of a response. Then ratio - 1 + kl is not k3, but about 0.
        is_other = (plain["filtered"] > 0) | (np.abs(1.0 - ratio - kl) < 0.1 * np.abs(kl))
        new = {name: np.where(is_other, math.nan, plain[name]) for name in plain if name.startswith("ratio_")}
        plain = {**plain, **new}
    if "stale_count" in plain and "staleness" not in plain:  # the count of all steps so far
        known = np.isfinite(plain["stale_count"])
        grown = np.diff(plain["stale_count"][known], prepend=math.nan)
        new["staleness"] = np.full(len(known), math.nan)
        new["staleness"][known] = np.where(np.isnan(grown), math.nan, grown > 0)
    if "token_mult_prob_error" in plain and "logprob_abs_diff_mean" not in plain:
        # The mean of exp(abs(lr)) is at least exp of the mean.
        new["logprob_abs_diff_mean"] = np.log(np.maximum(plain["token_mult_prob_error"], 1.0))
    if "zero_std" in plain and "signal" not in plain:
        new["signal"] = 1.0 - plain["zero_std"]
    if "kl" in plain and "k3_kl" in plain and "ratio_mean" not in plain:
        new["ratio_mean"] = 1.0 + plain["k3_kl"] - plain["kl"]
    if "kl" in plain and "ratio_mean" in plain and "k3_kl" not in plain:
        new["k3_kl"] = np.maximum(plain["ratio_mean"] - 1.0 + plain["kl"], 0.0)
    return new


def _last_finite(numbers: list[tuple[int, float]]) -> int | None:
    """Returns the first step of the last numbers if they are not finite; None if fewer than ``FEWEST_LOST`` are not."""
    lost = list(itertools.takewhile(lambda pair: not math.isfinite(pair[1]), reversed(numbers)))
    return lost[-1][0] if len(lost) >= FEWEST_LOST else None


def _edge(label: str) -> float:
    """Returns the lower edge of a bucket's label: lt_64, 64_to_256, ge_256, or a number."""
    word = label.removeprefix("ge_").partition("_to_")[0]
    return -math.inf if word.startswith("lt_") else number_of(word)


def split_runs(rows: Rows) -> dict[str, Rows]:
    """Returns the rows of each run in one export, by the run's name; empty if the log has one run.

    W&B's export of a chart names the columns ``RUN - NAME``. A table of several runs names them in a column.
    """
    columns = columns_of(rows)
    pairs = [column.rsplit(" - ", 1) for column in columns if " - " in column]
    names = list(dict.fromkeys(run for run, _ in pairs))
    if len(names) > 1 and len({name for _, name in pairs}) < len(pairs):
        ours = {run: [name for name in columns if " - " not in name or name.startswith(f"{run} - ")] for run in names}
        return {
            run: [{name.removeprefix(f"{run} - "): row[name] for name in ours[run] if name in row} for row in rows]
            for run in names
        }
    for column in RUN_COLUMNS:
        named = [(str(row[column]), row) for row in rows if type(row.get(column)) in (str, int)]
        if len(runs := dict.fromkeys(run for run, _ in named)) > 1:
            return {run: [row for name, row in named if name == run] for run in runs}
    return {}
