"""Counts the numbers of the studies' pages again from the rows, by other means than the programs that printed them."""

import json
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from study_pages import PAGES, fate, sign_p, table

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rewards():
    """Returns the mean reward of each step, by arm and seed, in the study of 8 bits."""
    rows = pyarrow.parquet.read_table(ROOT / "benchmarks/study_slow.parquet").to_pydict()
    found = {}
    for arm, seed, step, reward in zip(rows["arm"], rows["seed"], rows["step"], rows["reward/mean"], strict=True):
        found.setdefault((arm, seed), {})[step] = reward
    return {run: [by_step[step] for step in sorted(by_step)] for run, by_step in found.items()}


def runs_of_files():
    """Yields the peak, the final accuracy and the fall of each run of the four other studies with a schedule."""
    for name in ("study_toy", "study_staleness", "study_ahead", "study_ahead_6e-4"):
        for arm, seeds in json.loads((ROOT / f"benchmarks/{name}.json").read_text())["arms"].items():
            for seed, run in seeds.items():
                yield (name, arm, seed), run


def test_each_arm_of_the_engine_of_8_bits(rewards):
    rows = table("study_tables", "arm | seeds | end well")
    assert sum(len(row[0].split(", ")) * int(row[1]) for row in rows) == len(rewards) == 110
    for cells in rows:
        for arm in cells[0].split(", "):
            fates = [fate(series) for (name, _), series in rewards.items() if name == arm]
            peaks, finals, fell = map(np.array, zip(*fates, strict=True))
            counts = [len(fates), sum(finals > 0.3), sum(peaks < 0.3), sum(fell & (peaks >= 0.3)), sum(fell)]
            assert [cells[1], cells[2], *cells[4:7]] == list(map(str, counts)), arm
            assert cells[8:] == [f"{peaks.mean():.2f}", f"{finals.mean():.2f}"], arm
    for cells in table("study_eight_bits", "arm | seeds | end well"):
        assert cells in rows


def test_the_planned_comparisons(rewards):
    finals = {run: fate(series)[1] for run, series in rewards.items()}
    for cells in table("study_eight_bits", "compared"):
        one, other = cells[0].split(" - ")
        pairs = [(finals[one, seed], finals[other, seed]) for seed in range(8)]
        differences = [a - b for a, b in pairs]
        p = float(sign_p(differences))
        well = [sum(value > 0.3 for value in arm) for arm in zip(*pairs, strict=True)]
        signs = [sum(difference > 0 for difference in differences), sum(difference == 0 for difference in differences)]
        assert cells[1] == f"{np.mean(differences):+.2f}"
        # The interval leaves out the first and the last of 256 parts of the line. 99.2% is the first step above 99%.
        assert cells[2] == f"{min(differences):+.2f} to {max(differences):+.2f}"
        assert cells[3] == f"{signs[0]} / {signs[1]} / {8 - sum(signs)}"
        assert cells[4:7] == [f"{p:.2g}", f"{min(1, 5 * p):.2g}", f"{well[0]}, {well[1]} of 8"]


def test_no_run_of_8_bits_collapses_and_copies_are_told(rewards):
    assert not any(fell and peak >= 0.3 for peak, _, fell in map(fate, rewards.values()))
    assert len({(seed, tuple(series)) for (_, seed), series in rewards.items()}) == 94
    assert all(rewards["by_mismatch", seed] == rewards["by_kl", seed] for seed in range(3))


def test_the_counts_of_all_studies(rewards):
    fates = {(run[1], tuple(series)): fate(series) for run, series in rewards.items()}
    for (name, arm, seed), run in runs_of_files():
        key = (name, seed, run["peak_step"], run["peak"], run["final"], str(run["at_end"]))
        # Only in the study of noise can two arms be one run.
        key += () if name == "study_toy" else (arm,)
        fates[key] = (run["peak"], run["final"], run["fall_step"] is not None)
    engines = json.loads((ROOT / "benchmarks/mismatch_growth.json").read_text())["runs"]
    for name, run in engines.items():
        peak, last = run["accuracy_peak"], run["accuracy_last"]
        fates[name] = (peak, last, last < peak / 2)
    collapses = [peak for peak, _, fell in fates.values() if fell and peak >= 0.3]
    never = sum(peak < 0.3 for peak, _, _ in fates.values())
    assert (len(fates), never, len(collapses), sum(peak > 0.5 for peak in collapses)) == (235, 99, 6, 1)
    assert "255 runs, and 235 of them are different" in PAGES["study"]
    assert f"These are {never} of the 235 different runs" in PAGES["study"]
    assert f"These are {len(collapses)} of the 235, and one of them" in PAGES["study"]
    assert (f"{min(collapses):.2f}", f"{max(collapses):.2f}") == ("0.31", "0.57")


def test_what_grows_from_peak_to_collapse():
    collapsed = [run for _, run in runs_of_files() if run["fall_step"] is not None and run["peak"] >= 0.3]
    assert [run["collapse_step"] for run in collapsed] == [run["fall_step"] for run in collapsed]
    growth = {
        name: sorted(run["at_end"][name] / run["at_peak"][name] for run in collapsed)
        for name in ("log_ppl_abs_diff", "grad_norm")
    }
    assert [f"{ratio:.2f}" for ratio in growth["log_ppl_abs_diff"]] == ["0.43", "0.44", "0.56", "1.06", "1.46", "1.51"]
    assert "(1.06 to 1.5 times), and falls in three (to 0.43 to 0.56 times)" in PAGES["study"]
    assert [ratio > 1 for ratio in growth["grad_norm"]] == [False] + [True] * 5
    p = sign_p(np.log(growth["grad_norm"]))
    assert f"{float(p):.2g}" == "0.062"
    assert "five of the six collapses, at most 1.7 times (p 0.062" in PAGES["study"]


@pytest.mark.parametrize(
    ("page", "name", "head"),
    [
        ("study_tables", "study_toy", "arm | seeds | peak"),
        ("study_servers", "study_ahead", "arm | seeds | s a step"),
        ("study_tables", "study_ahead_6e-4", "arm | seeds | s a step"),
        ("study_staleness", "study_staleness", "versions old"),
    ],
)
def test_the_counts_of_the_other_tables(page, name, head):
    """The columns are finals, runs that never learned, collapses and falls. The arms are in the order of the file."""
    lines = PAGES[page].splitlines()
    names = [
        cell.strip() for cell in next(line for line in lines if line.startswith(f"| {head}")).strip("|").split("|")
    ]
    arms = json.loads((ROOT / f"benchmarks/{name}.json").read_text())["arms"]
    rows = table(page, head)
    assert len(rows) == len(arms)
    for cells, (arm, seeds) in zip(rows, arms.items(), strict=True):
        row = dict(zip(names, cells, strict=True))
        runs = list(seeds.values())
        finals = row["final of each"] if "final of each" in row else row["final accuracy of each seed"]
        assert finals == " ".join(f"{run['final']:.2f}" for run in runs), arm
        fallen = [run for run in runs if run["fall_step"] is not None]
        assert int(row["fell"].split()[0]) == len(fallen), arm
        assert int(row["collapsed"]) == sum(run["peak"] >= 0.3 for run in fallen), arm
        if "never learned" in row:
            assert int(row["never learned"]) == sum(run["peak"] < 0.3 for run in runs), arm


def test_the_verdicts_of_the_search_for_a_subject():
    columns = pyarrow.parquet.read_table(ROOT / "benchmarks/subject_search.parquet").to_pydict()
    series = {}
    for arm, seed, reward in zip(columns["arm"], columns["seed"], columns["reward/mean"], strict=True):
        series.setdefault(f"{arm}-{seed}", []).append(reward)
    found = json.loads((ROOT / "benchmarks/subject_search.json").read_text())["runs"]
    rows = {cells[0]: cells for cells in table("study_subject", "run | changed")}
    assert list(series) == list(found) == list(rows)
    for name, rewards in series.items():
        peak, final, fell = fate(rewards)
        level = "never learned" if peak < 0.3 else "collapsed" if fell else "learned"
        above = {"collapsed": " from above 0.6", "learned": " above 0.6"}.get(level, "") if peak > 0.6 else ""
        assert found[name]["verdict"] == rows[name][7] == level + above, name
        assert [rows[name][2], rows[name][5]] == [str(len(rewards)), f"{final:.2f}"], name
        assert rows[name][3].split(" ")[0] == f"{peak:.2f}", name
        assert (rows[name][6] == "-") is not fell, name


def test_the_later_bases_at_the_rate_of_the_study():
    columns = pyarrow.parquet.read_table(ROOT / "benchmarks/subject_bases.parquet").to_pydict()
    series = {}
    for arm, seed, reward in zip(columns["arm"], columns["seed"], columns["reward/mean"], strict=True):
        if arm.endswith("_4e-4"):
            series.setdefault((arm, seed), []).append(reward)
    peaks = sorted(peak for peak, _, fell in map(fate, series.values()) if fell and peak >= 0.3)
    assert (len(series), len(peaks), f"{peaks[0]:.3f}") == (12, 9, "0.598")
    assert peaks[1] > 0.6
    assert "9 of the 12 runs collapse between steps 137 and 392: eight from a peak above 0.6" in PAGES["study_subject"]


def test_the_errors_of_the_logits_in_the_page_of_diagnose():
    engines = json.loads((ROOT / "benchmarks/engine_mismatch.json").read_text())["engines"]
    error = {one["engine"]: f"{one['k3_kl'] / one['logprob_abs_diff_mean']:.2g}" for one in engines}
    named = ["bfloat16", "int8 weights", "fp8 weights", "fp8_e4m3 cache", "fp8_e5m2 cache"]
    assert [error[name] for name in named] == ["0.012", "0.018", "0.046", "0.065", "0.16"]
    page = " ".join((ROOT / "docs/diagnose.md").read_text(encoding="utf-8").split())
    assert "int8 weights 0.018, fp8 weights 0.046, fp8 caches 0.065 (e4m3) and 0.16 (e5m2)" in page


def test_the_sum_of_signs_by_hand():
    assert sign_p([0.5, 0.25, 0.25]) == Fraction(2, 8)
    assert sign_p([-0.25, 0.25, 0.5]) == Fraction(6, 8)  # the sums of 1 and 0.5 (twice), and their opposites, reach 0.5
    assert all(a > b for a, b in pairwise([sign_p([1.0] * n) for n in range(1, 6)]))
