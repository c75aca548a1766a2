"""Counts the numbers of the early studies again from the rows, by other means than the programs that printed them."""

import json
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from scipy import stats
from study_pages import PAGE, fate, section_of, sign_p, table

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
    for cells in table("arm | seeds | end well", "An engine of 8 bits"):
        fates = [fate(series) for (name, _), series in rewards.items() if name == cells[0]]
        peaks, finals, fell = map(np.array, zip(*fates, strict=True))
        share = stats.binomtest(int(sum(finals > 0.3)), len(fates)).proportion_ci(0.95, "exact")
        assert cells[1:] == [
            *(str(len(fates)), str(sum(finals > 0.3)), f"{share.low:.2f} to {share.high:.2f}"),
            *(str(sum(peaks < 0.3)), str(sum(fell & (peaks >= 0.3))), f"{peaks.mean():.2f}", f"{finals.mean():.2f}"),
        ]


def test_the_planned_comparisons(rewards):
    finals = {run: fate(series)[1] for run, series in rewards.items()}
    for cells in table("compared", "An engine of 8 bits"):
        one, other = cells[0].split(" - ")
        pairs = [(finals[one, seed], finals[other, seed]) for seed in range(8)]
        differences = [a - b for a, b in pairs]
        p = float(sign_p(differences))
        well = [sum(value > 0.3 for value in arm) for arm in zip(*pairs, strict=True)]
        signs = [sum(difference > 0 for difference in differences), sum(difference == 0 for difference in differences)]
        assert cells[1] == f"{np.mean(differences):+.2f}"
        # The interval leaves out the first and the last of 256 parts of the line. 99.2% is the first step above 99%.
        assert cells[2] == f"{min(differences):+.2f} to {max(differences):+.2f}"
        assert cells[3] == f"{signs[0]}/{signs[1]}/{8 - sum(signs)}"
        assert cells[4:7] == [f"{p:.2g}", f"{min(1, 5 * p):.2g}", f"{well[0]}, {well[1]} of 8"]


def test_the_other_arms_in_the_text(rewards):
    page = section_of("An engine of 8 bits")
    for arm in ("sixteen_bits", "by_mismatch", "linear_short"):
        ends = [f"{fate(rewards[arm, seed])[1]:.2f}" for seed in range(3)]
        assert f"{ends[0]}, {ends[1]} and {ends[2]}" in page, arm


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
    assert f"255 runs, 235 of them different: {never} never learn, and {len(collapses)} collapse" in PAGE
    assert (f"{min(collapses):.2f}", f"{max(collapses):.2f}") == ("0.31", "0.57")


def finals(name, *arms):
    """Returns the final accuracy of each seed of some arms of a file."""
    file = json.loads((ROOT / f"benchmarks/{name}.json").read_text())["arms"]
    return [run["final"] for arm in arms for run in file[arm].values()]


def test_the_accuracies_with_old_rollouts():
    page = section_of("Old rollouts")
    for arm in ("ahead_1_triggered", "stale_2_triggered", "stale_4_triggered"):
        ends = [f"{final:.2f}" for final in finals("study_staleness", arm)]
        assert f"{ends[0]}, {ends[1]} and {ends[2]}" in page, arm
    assert max(finals("study_staleness", "ahead_1", "stale_2", "stale_4")) < 0.3
    for arms in (("ahead_0",), ("ahead_1",), ("ahead_2", "ahead_4")):
        ends = finals("study_ahead", *arms)
        assert f"{min(ends):.2f} to {max(ends):.2f}" in page, arms
    for age in range(5):
        if age != 3:
            ends = finals("study_ahead", f"ahead_{age}_triggered")
            assert f"{min(ends):.2f} to {max(ends):.2f}" in page, age
    well = [
        sum(final > 0.3 for final in finals("study_ahead_6e-4", *(f"ahead_{age}{end}" for age in (0, 1, 2, 4))))
        for end in ("", "_triggered")
    ]
    assert well == [0, 1]


def test_the_runs_with_random_noise():
    weights = ("token_tis", "token_mis", "sequence_tis", "sequence_mis")
    constant = finals("study_toy", "constant", *weights, "fp16")
    assert (sum(final > 0.3 for final in constant), len(constant)) == (1, 18)
    triggered = [f"{arm}_triggered" for arm in (*weights, "fp16")]
    decayed = finals("study_toy", "length_triggered", "period_1.1", "period_2.3", *triggered)
    assert (sum(final > 0.3 for final in decayed), len(decayed)) == (16, 24)
    assert sum(final > 0.3 for final in finals("study_toy", *triggered)) == 10
    for arm, well in (("constant_tenth", 3), ("uninjected", 3), ("uninjected_fp16", 2), ("exact", 2)):
        assert sum(final > 0.3 for final in finals("study_toy", arm)) == well, arm
    assert "With the decay 16 of 24 end well" in section_of("Random noise")


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
