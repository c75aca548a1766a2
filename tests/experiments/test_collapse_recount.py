"""Counts the tables of the studies of a late collapse again from the rows, by other means than the program."""

from itertools import combinations

import numpy as np
import pytest
from scipy import stats
from study_pages import PAGE, fate, section_of, sign_p, table
from study_recount import (
    ISOLATION,
    LATE,
    MAIN,
    REMEDIES,
    accuracy,
    areas_of,
    columns_of,
    fall_step,
    growth,
    of,
    spread,
)

EVERY = [MAIN, REMEDIES, LATE, ISOLATION]


@pytest.fixture(scope="module", params=EVERY, ids=lambda study: study.rows)
def study(request):
    return request.param


@pytest.fixture(scope="module")
def columns(study):
    return columns_of(study)


@pytest.fixture(scope="module")
def areas(study):
    return areas_of(study)


def test_all_runs_are_there(study, columns):
    assert set(columns) == study.runs()
    assert {len(lines) for lines in columns.values()} == {study.steps}
    assert not any(np.isnan(lines[:, [0, 4]]).any() for lines in columns.values())


def test_each_line_of_the_arms(study, columns, areas):
    rows = table("arm | seeds | area", study.section)
    assert tuple(row[0] for row in rows) == study.arms
    for arm, seeds, area, peak, final, collapsed, interval, *_ in rows:
        runs = [columns[arm, seed] for seed in study.seeds_of(arm)]
        fates = [fate(lines[:, 0]) for lines in runs]
        gone = sum(fell and top >= 0.3 for top, _, fell in fates)
        share = stats.binomtest(gone, len(runs)).proportion_ci(0.95, "exact")
        assert int(seeds) == len(runs)
        assert area == f"{np.mean([areas[arm, seed] for seed in study.seeds_of(arm)]):.2f}", arm
        assert [peak, final] == [f"{np.mean([one[place] for one in fates]):.2f}" for place in (0, 1)], arm
        assert [collapsed, interval] == [str(gone), f"{share.low:.2f} to {share.high:.2f}"], arm


def differences_of(study, areas, one, other):
    return np.array([areas[one, seed] - areas[other, seed] for seed in study.seeds_of(one)])


def signs_of(differences):
    return "/".join(str(int(sum(sign))) for sign in (differences > 0, differences == 0, differences < 0))


@of(REMEDIES)
def test_the_comparisons_beside_the_arms(study, areas):
    """A study whose corrected p values are all 1 has its comparisons in the table of the arms."""
    rows = {cells[0]: cells[7:] for cells in table("arm | seeds | area", study.section)}
    assert [(arm, cells[0]) for arm, cells in rows.items() if cells[0]] == list(study.compared)
    for one, other in study.compared:
        differences = differences_of(study, areas, one, other)
        p = float(sign_p(differences))
        assert rows[one] == [other, f"{differences.mean():+.2f}", signs_of(differences), f"{p:.2g}"]
        assert study.planned * p >= 1


@of(MAIN, LATE, ISOLATION)
def test_the_planned_comparisons(study, columns, areas):
    rows = table("compared | seeds", study.section)
    assert [row[0] for row in rows] == [f"{one} - {other}" for one, other in study.compared]
    for cells, (one, other) in zip(rows, study.compared, strict=True):
        seeds = study.seeds_of(one)
        count = len(seeds)
        differences = differences_of(study, areas, one, other)
        sizes = range(1, count + 1)
        means = sorted(differences[list(some)].mean() for size in sizes for some in combinations(range(count), size))
        # The five intervals together have 95%. One of them leaves out 2 of 512 parts at each end, and none of 16 parts.
        outside = 5 * 2**count // (200 * study.planned)
        interval = f"{means[outside - 1]:+.2f} to {means[-outside]:+.2f}" if outside else "-"
        p = float(sign_p(differences))
        fates = [[fate(columns[arm, seed][:, 0]) for seed in seeds] for arm in (one, other)]
        gone = [sum(fell and peak >= 0.3 for peak, _, fell in of_arm) for of_arm in fates]
        fisher = stats.fisher_exact([[gone[0], count - gone[0]], [gone[1], count - gone[1]]]).pvalue
        assert cells[1:4] == [str(count), f"{differences.mean():+.2f}", interval], other
        assert cells[4] == signs_of(differences), other
        assert cells[5:] == [f"{p:.2g}", f"{min(1, study.planned * p):.2g}", "{}, {}".format(*gone), f"{fisher:.2g}"], (
            other
        )


@of(MAIN)
def test_the_mismatch_of_the_last_ten_steps(study, columns):
    last = {run: lines[-10:, 4].mean() for run, lines in columns.items()}
    called = [seed for seed in study.seeds if not np.isnan(columns["constant", seed][-1, 2])]
    assert sum(last["triggered", seed] < last["constant", seed] for seed in called) == len(called) == 8
    ranges = [
        f"{min(values):.2g} to {max(values):.2g}"
        for arm, seeds in (("constant", called), ("triggered", called), ("tenth", study.seeds))
        for values in [[last[arm, seed] for seed in seeds]]
    ]
    assert ranges == ["0.035 to 0.06", "0.0031 to 0.025", "0.0056 to 0.02"]
    assert "0.035 to 0.060 at the constant rate and 0.0031 to 0.025 with the decay" in section_of(study.section)


@of(MAIN)
def test_the_mismatch_before_the_first_fall(columns):
    """The means cover the steps 61 to 115, and the last ten steps. The arms are compared pair by pair."""
    called = [9, 10, 11, 12, 13, 14, 16, 17]
    mean = {run: lines[60:115, 4:].mean(0) for run, lines in columns.items()}
    last = {run: lines[-10:, 4:].mean(0) for run, lines in columns.items()}
    assert min(fall_step(columns["constant", seed]) for seed in range(9, 18)) == 116
    for taken, pairs in ((mean, (8, 8)), (last, (8, 5))):
        lower = [
            (taken["triggered", s][0] < taken["constant", s][0], gap["triggered"] < gap["constant"])
            for s in called
            for gap in [{arm: taken[arm, s][2] / taken[arm, s][1] for arm in ("triggered", "constant")}]
        ]
        assert tuple(np.sum(lower, axis=0)) == pairs
    assert sum(mean["tenth", s][0] > mean["constant", s][0] for s in range(9, 18)) == 9
    texts = [
        f"{min(taken[arm, s][place] for s in seeds):.2g} to {max(taken[arm, s][place] for s in seeds):.2g}"
        for taken, arm, place, seeds in (
            (mean, "triggered", 0, called),
            (mean, "constant", 0, called),
            (mean, "tenth", 0, range(9, 18)),
            (last, "constant", 1, called),
            (last, "triggered", 1, called),
        )
    ]
    assert texts == ["0.0063 to 0.032", "0.016 to 0.033", "0.031 to 0.05", "0.082 to 0.44", "0.022 to 0.11"]
    assert "0.0063 to 0.032 against 0.016 to 0.033, lower in 8 of 8 pairs" in PAGE


@of(MAIN)
def test_the_decay_begins_before_the_policy_has_learned(columns):
    called = [9, 10, 11, 12, 13, 14, 16, 17]
    begins = {s: int(np.argmax(columns["triggered", s][:, 1] < 3.9e-4)) for s in called}
    before = {s: accuracy(columns["triggered", s])[step - 1] for s, step in begins.items()}
    share = [value / accuracy(columns["constant", s]).max() for s, value in before.items()]
    fixed = [accuracy(columns["fixed", s])[73] for s in range(9, 18)]
    assert (min(begins.values()) + 1, max(begins.values()) + 1) == (25, 50)
    texts = [f"{min(values):.2f} to {max(values):.2f}" for values in (before.values(), share, fixed)]
    assert texts == ["0.13 to 0.56", "0.18 to 0.82", "0.37 to 0.72"]
    assert "at steps 25 to 50, at an accuracy of 0.13 to 0.56" in section_of("The main study")


@of(MAIN)
def test_the_secondary_outcomes(columns):
    """The page has the final accuracies and the pairs with one collapse."""
    final = {run: fate(lines[:, 0])[1] for run, lines in columns.items()}
    found = []
    for other in ("fixed", "linear"):
        differences = {s: final["triggered", s] - final[other, s] for s in range(9, 18)}
        ahead = sum(value < 0 for value in differences.values())
        rest = np.mean([value for s, value in differences.items() if s != 15])
        found.append((ahead, f"{float(sign_p(list(differences.values()))):.2g}", f"{rest:.2f}"))
    assert found == [(8, "0.012", "-0.02"), (7, "0.047", "-0.02")]
    assert "in 8 of 9 seeds (p 0.012), linear in 7 of 9 (p 0.047)" in section_of("The main study")
    gone = {run: fell and peak >= 0.3 for run, (peak, _, fell) in ((r, fate(v[:, 0])) for r, v in columns.items())}
    alone = [(gone["constant", s], gone["triggered", s]) for s in range(9, 18)]
    assert (alone.count((True, False)), alone.count((False, True))) == (7, 0)
    assert f"{stats.binomtest(7, 7).pvalue:.2g}" == "0.016"
    assert sum(final["constant", s] < 0.03 for s in range(9, 18)) == 6


@of(MAIN)
def test_where_the_mismatch_grows_without_a_fall(columns):
    """The growth is measured from the first step with 0.9 of the peak to the last step of the run."""
    grew = {}
    for (arm, seed), lines in columns.items():
        if arm != "constant" and (arm, seed) != ("triggered", 15):
            grew.setdefault(arm, []).append(growth(lines, len(lines)) > 1)
    counts = {arm: (sum(runs), len(runs)) for arm, runs in grew.items()}
    assert counts == {"triggered": (2, 8), "untriggered": (3, 9), "fixed": (1, 9), "linear": (1, 9), "tenth": (0, 9)}


@of(MAIN)
def test_what_grows_before_the_falls(study, columns):
    runs = {seed: columns["constant", seed] for seed in study.seeds}
    ends = {seed: fall_step(lines) if fate(lines[:, 0])[2] else len(lines) for seed, lines in runs.items()}
    assert [seed for seed, end in ends.items() if not fate(runs[seed][:, 0])[2]] == [14]
    grown = {seed: growth(runs[seed], end) for seed, end in ends.items()}
    fallen = spread([factor for seed, factor in grown.items() if seed != 14])
    entropies = sum(growth(runs[seed], end, 5) > 1 for seed, end in ends.items() if seed != 14)
    assert (fallen, f"{grown[14]:.2g}", entropies) == ("1.8 to 3.1", "1.4", 4)
    assert f"{fallen} times from the beginning of the plateau" in section_of(study.section)


def test_the_intervals_of_a_share_with_99_percent():
    lows = [f"{stats.binomtest(8, runs).proportion_ci(0.99, 'exact').low:.2f}" for runs in (8, 9)]
    assert lows == ["0.52", "0.42"]
    assert all(f"({low})" in PAGE for low in lows)
    share = stats.binomtest(7, 9).proportion_ci(0.95, "exact")
    assert f"7 of 9 do ({share.low:.2f} to {share.high:.2f})" in PAGE


@of(MAIN)
def test_the_arms_part_where_the_design_says(study, columns):
    """A seed's runs are one run until their rates differ.

    A drawn period is 1.8 times the surge of the next seed with one.
    """
    for seed in study.seeds:
        constant = columns["constant", seed]
        for arm in ("triggered", "untriggered", "fixed"):
            same = int(np.argmax(np.append(columns[arm, seed][:, 1] != constant[:, 1], True)))
            np.testing.assert_array_equal(columns[arm, seed][:same, 0], constant[:same, 0])
        following = [*range(seed + 1, study.seeds.stop), *range(study.seeds.start, seed)]
        surges = [columns["constant", other][-1, 2] for other in following]
        drawn = next(surge for surge in surges if not np.isnan(surge))
        assert columns["untriggered", seed][-1, 3] == round(1.8 * drawn), seed


@of(LATE)
def test_late_remedies_begin_at_step_100(study, columns):
    for seed in study.seeds:
        for arm, rate in (("decay", 2e-4), ("sixteen_bits", 4e-4)):
            np.testing.assert_array_equal(columns[arm, seed][:100, 0], columns["constant", seed][:100, 0])
            assert columns[arm, seed][100, 1] == np.float32(rate)


@of(LATE)
def test_what_late_remedies_do(study, columns):
    """The numbers stand in the sentences of the page. They count the steps after 100 if the page says nothing else."""
    runs = {arm: [columns[arm, seed] for seed in study.seeds] for arm in study.arms}
    fates = {arm: [fate(lines[:, 0]) for lines in runs[arm]] for arm in study.arms}
    falls = {arm: [fell for _, _, fell in fates[arm]] for arm in study.arms}
    pairs = list(zip(falls["constant"], falls["sixteen_bits"], strict=True))
    assert [pairs.count(pair) for pair in ((True, False), (False, True))] == [5, 0]
    gone = [lines for lines, fell in zip(runs["sixteen_bits"], falls["sixteen_bits"], strict=True) if fell]
    assert [seed for seed, fell in zip(study.seeds, falls["sixteen_bits"], strict=True) if fell] == [9, 11, 15]
    reward = {arm: np.array([lines[100:, 0] for lines in runs[arm]]) for arm in study.arms}
    assert (reward["decay"].mean(1) > reward["sixteen_bits"].mean(1)).sum() == 9
    gains = reward["sixteen_bits"] - reward["constant"]
    assert f"{gains[:, 0].mean():.2f}" == "0.05"
    assert (sum(gains.mean(1) > 0.05), f"{float(sign_p(gains.mean(1) - 0.05)):.2g}") == (8, "0.0078")
    lowest = accuracy(columns["decay", 15])[100:]
    assert (f"{lowest.min():.2f}", int(lowest.argmin()) + 101) == ("0.39", 163)
    means = {arm: np.array([lines[100:, 4].mean() for lines in runs[arm]]) for arm in study.arms}
    ratios = spread(means["constant"] / means["sixteen_bits"], ".0f")
    collapsed = spread([lines[100 : fall_step(lines) - 1, 4].mean() for lines in gone])
    texts = [
        spread([accuracy(lines)[99] for lines in runs["decay"]], ".2f"),
        spread([peak for peak, _, _ in fates["decay"]], ".2f"),
        spread([final for _, final, _ in fates["decay"]], ".2f"),
        spread([final for _, final, fell in fates["sixteen_bits"] if not fell], ".2f"),
        *(collapsed, f"{ratios} times"),
    ]
    texts.append(spread([peak for peak, _, fell in fates["sixteen_bits"] if fell], ".2f"))
    assert [text for text in texts if text not in section_of(study.section)] == []


@of(REMEDIES)
def test_the_mismatch_of_the_remedies(study, columns):
    """The page has the range over the seeds of the mean of steps 21 to 100."""
    page = section_of(study.section)
    for arm in ("constant", "sixteen_bits", "float32"):
        assert spread([columns[arm, seed][20:100, 4].mean() for seed in study.seeds]) in page, arm
    assert not columns["exact", 18][:, [4, 6]].any()


@of(ISOLATION)
def test_what_the_noise_alone_does(study, columns, areas):
    """One arm has no mismatch at any step. The page's sentences have the numbers of both arms and of the pairs."""
    runs = {arm: [columns[arm, seed] for seed in study.seeds] for arm in study.arms}
    assert not any(lines[:, [4, 6]].any() for lines in runs["constant"])
    fates = {arm: [fate(lines[:, 0]) for lines in runs[arm]] for arm in study.arms}
    gone = {arm: [fell and peak >= 0.3 for peak, _, fell in fates[arm]] for arm in study.arms}
    peak, final, _ = fates["constant"][1]
    assert (gone["constant"].index(True), f"{peak:.2f}", f"{final:.2f}") == (1, "0.81", "0.00")
    pairs = list(zip(gone["constant"], gone["noise"], strict=True))
    assert [pairs.count(pair) for pair in ((False, True), (True, False))] == [4, 1]
    assert f"{stats.binomtest(4, 5).pvalue:.2g}" == "0.38"
    lost = np.subtract(*([end for _, end, _ in fates[arm]] for arm in study.arms))
    assert (sum(lost > 0), f"{float(sign_p(lost)):.2g}") == (8, "0.11")
    fallen = [lines for lines, falls in zip(runs["noise"], gone["noise"], strict=True) if falls]
    first, second, third, fourth = (f"{growth(lines, fall_step(lines)):.2g}" for lines in fallen)
    texts = [
        f"changes {first}, {second}, {third} and {fourth} times",
        spread([areas["constant", seed] - areas["noise", seed] for seed in study.seeds], "+.2f"),
        spread([lines[20:100, 4].mean() for lines in runs["noise"]]),
    ]
    assert [text for text in texts if text not in section_of(study.section)] == []
