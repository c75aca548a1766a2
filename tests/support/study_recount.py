"""The studies whose tables in docs/studies.md are counted again from the rows, without the programs of experiments/."""

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet
import pytest

ROOT = Path(__file__).parents[2]
PLANNED = ["constant", "untriggered", "fixed", "tenth", "linear"]


class Recounted(NamedTuple):
    """A study: its section, rows in benchmarks/, seeds, number of steps, and comparisons."""

    section: str
    rows: str
    seeds: range
    steps: int
    planned: int = 5  # the number of planned comparisons
    compared: tuple[tuple[str, str], ...] = tuple(("triggered", arm) for arm in PLANNED)
    arms: tuple[str, ...] = ("constant", "triggered", *PLANNED[1:])
    alone: tuple[tuple[str, int], ...] = ()  # the arms that have only one seed, and this seed

    def seeds_of(self, arm):
        only = dict(self.alone)
        return [only[arm]] if arm in only else [*self.seeds]

    def runs(self):
        return {(arm, seed) for arm in self.arms for seed in self.seeds_of(arm)}


REMEDIES = Recounted(
    *("Other remedies", "study_remedies", range(18, 22), 300),
    planned=9,
    compared=(
        ("triggered", "constant"),
        *((arm, "constant") for arm in ("token_tis", "region", "centering")),
        ("triggered_centering", "triggered"),
        ("sixteen_bits", "constant"),
        ("float16", "sixteen_bits"),
        ("float32", "float32_e5m2"),
        ("exact", "exact_noise"),
    ),
    arms=(
        *("constant", "triggered", "token_tis", "region", "centering", "triggered_centering"),
        *("sixteen_bits", "float16", "float32", "float32_e5m2", "exact", "exact_noise"),
    ),
    alone=(("exact", 18), ("exact_noise", 18)),
)
MAIN = Recounted("The main study", "study_collapse", range(9, 18), 300)
LATE = Recounted(
    *("A remedy from step 100", "study_late", range(9, 18), 300),
    planned=2,
    compared=(("decay", "constant"), ("sixteen_bits", "constant")),
    arms=("constant", "decay", "sixteen_bits"),
)
ISOLATION = Recounted(
    *("The mismatch alone", "study_isolation", range(41, 50), 300),
    planned=1,
    compared=(("constant", "noise"),),
    arms=("constant", "noise"),
)


def of(*studies):
    return pytest.mark.parametrize("study", studies, indirect=True, ids=lambda study: study.rows)


@functools.cache
def columns_of(study):
    """Returns eight metrics of each step in the order of ``keys``, as one array for each arm and seed."""
    rows = pyarrow.parquet.read_table(ROOT / f"benchmarks/{study.rows}.parquet").to_pydict()
    keys = ("reward/mean", "schedule/learning_rate", "schedule/surge_step", "schedule/decay_period")
    keys += ("mismatch/log_ppl_abs_diff", "policy/entropy", "mismatch/logprob_abs_diff_mean")
    keys += ("mismatch_self/log_ppl_abs_diff",)
    found = {}
    for place, run in enumerate(zip(rows["arm"], rows["seed"], strict=True)):
        values = [rows[key][place] if key in rows else None for key in keys]
        found.setdefault(run, []).append([np.nan if value is None else value for value in values])
    return {run: np.array(lines) for run, lines in found.items()}


def areas_of(study):
    """Returns the mean reward after the surge of the constant run, by arm and seed.

    Without a surge, the mean is over all steps.
    """
    columns = columns_of(study)
    surges = {seed: int(np.nan_to_num(np.nanmax(columns["constant", seed][:, 2], initial=0))) for seed in study.seeds}
    return {(arm, seed): float(lines[surges[seed] :, 0].mean()) for (arm, seed), lines in columns.items()}


def accuracy(lines):
    """Returns, for each step, the mean reward of the ten steps up to it."""
    return np.array([lines[max(0, i - 9) : i + 1, 0].mean() for i in range(len(lines))])


def fall_step(lines):
    """Returns the step after the last one at which the accuracy is at least half of the peak before it."""
    means = accuracy(lines)
    return int(np.flatnonzero(means >= np.maximum.accumulate(means) / 2)[-1]) + 2


def plateau_step(lines):
    """Returns the first step whose accuracy is at least 0.9 of the highest accuracy."""
    means = accuracy(lines)
    return int(np.argmax(means >= 0.9 * means.max())) + 1


def growth(lines, end, key=4):
    """Returns the mean of ten steps up to ``end`` over the mean of the ten steps before the plateau.

    The metric is the mismatch, or the column ``key``.
    """
    begin = plateau_step(lines)
    return np.nanmean(lines[end - 10 : end, key]) / np.nanmean(lines[begin - 10 : begin, key])


def spread(values, digits=".2g"):
    return " to ".join(format(value, digits) for value in (min(values), max(values)))
