"""Counts the tables of the study of a late collapse again from the rows, by other means than the program."""

from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet
import pytest
from scipy import stats
from study_pages import PAGES, fate, sign_p, table

ROOT = Path(__file__).parents[2]
PLANNED = ["constant", "untriggered", "fixed", "tenth", "linear"]


class Recounted(NamedTuple):
    """A study: its page and section, its rows in benchmarks/, its seeds, the steps of a run, and what it compares."""

    page: str
    section: str
    rows: str
    seeds: range
    steps: int
    planned: int = 5  # the number of comparisons, of which the page may lack some
    compared: tuple[tuple[str, str], ...] = tuple(("triggered", arm) for arm in PLANNED)
    arms: tuple[str, ...] = ("constant", "triggered", *PLANNED[1:])


REMEDIES = Recounted(
    *("study_collapse", "Other remedies", "study_remedies", range(18, 22), 300),
    planned=9,
    compared=(
        ("triggered", "constant"),
        *((arm, "constant") for arm in ("token_tis", "region", "centering")),
        ("triggered_centering", "triggered"),
        ("sixteen_bits", "constant"),
        ("float16", "sixteen_bits"),
        ("float32", "float32_e5m2"),
    ),
    arms=(
        *("constant", "triggered", "token_tis", "region", "centering", "triggered_centering"),
        *("sixteen_bits", "float16", "float32", "float32_e5m2"),
    ),
)
SIX_ARMS = [
    Recounted("study_collapse", "What was found", "study_collapse", range(9, 18), 300),
    Recounted("study_families", "Sums", "study_family_sums", range(33, 37), 300),
    Recounted("study_families", "Swaps", "study_family_swaps", range(37, 41), 600),
]
LATE = Recounted(
    *("study_late", "What was found", "study_late", range(9, 18), 300),
    planned=2,
    compared=(("decay", "constant"), ("sixteen_bits", "constant")),
    arms=("constant", "decay", "sixteen_bits"),
)
CACHES = {"16 bits": "16_bits", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
RATES = Recounted(
    *("study_collapse", "Rate and mismatch", "study_rates", range(25, 27), 300),
    arms=tuple(f"{rate}_{cache}" for rate, cache in product(("half", "rate", "double"), CACHES.values())),
)
EVERY = [*SIX_ARMS, REMEDIES, LATE]


def of(*studies):
    return pytest.mark.parametrize("study", studies, indirect=True, ids=lambda study: study.rows)


MAIN = of(SIX_ARMS[0])


@pytest.fixture(scope="module", params=EVERY, ids=lambda study: study.rows)
def study(request):
    return request.param


@pytest.fixture(scope="module")
def columns(study):
    """Eight metrics of each step in the order of ``keys``, an array for each arm and seed."""
    rows = pyarrow.parquet.read_table(ROOT / f"benchmarks/{study.rows}.parquet").to_pydict()
    keys = ("reward/mean", "schedule/learning_rate", "schedule/surge_step", "schedule/decay_period")
    keys += ("mismatch/log_ppl_abs_diff", "policy/entropy", "mismatch/logprob_abs_diff_mean")
    keys += ("mismatch_self/log_ppl_abs_diff",)
    found = {}
    for place, run in enumerate(zip(rows["arm"], rows["seed"], strict=True)):
        values = [rows[key][place] if key in rows else None for key in keys]
        found.setdefault(run, []).append([np.nan if value is None else value for value in values])
    return {run: np.array(lines) for run, lines in found.items()}


@pytest.fixture(scope="module")
def areas(study, columns):
    """The mean reward after the constant run's surge, by arm and seed; without a surge, of all steps."""
    surges = {seed: int(np.nan_to_num(np.nanmax(columns["constant", seed][:, 2], initial=0))) for seed in study.seeds}
    return {(arm, seed): float(lines[surges[seed] :, 0].mean()) for (arm, seed), lines in columns.items()}


def accuracy(lines):
    """The mean reward of the last ten steps, at each step."""
    return np.array([lines[max(0, i - 9) : i + 1, 0].mean() for i in range(len(lines))])


def fall_step(lines):
    """The step after the last one at which the accuracy is at least half of the peak before it."""
    means = accuracy(lines)
    return int(np.flatnonzero(means >= np.maximum.accumulate(means) / 2)[-1]) + 2


def test_all_runs_are_there(study, columns):
    assert set(columns) == {(arm, seed) for arm in study.arms for seed in study.seeds}
    assert {len(lines) for lines in columns.values()} == {study.steps}


def test_each_line_of_the_arms(study, columns, areas):
    rows = table(study.page, "arm | seeds | area", study.section)
    assert tuple(row[0] for row in rows) == study.arms
    for arm, seeds, area, peak, final, collapsed, interval, falls, surges in rows:
        runs = [columns[arm, seed] for seed in study.seeds]
        fates = [fate(lines[:, 0]) for lines in runs]
        steps = [fall_step(lines) if fell else None for lines, (_, _, fell) in zip(runs, fates, strict=True)]
        called = [lines[-1, 2] for lines in runs]
        gone = sum(fell and top >= 0.3 for top, _, fell in fates)
        share = stats.binomtest(gone, len(study.seeds)).proportion_ci(0.95, "exact")
        assert int(seeds) == len(study.seeds)
        assert area == f"{np.mean([areas[arm, seed] for seed in study.seeds]):.2f}", arm
        assert [peak, final] == [f"{np.mean([one[place] for one in fates]):.2f}" for place in (0, 1)], arm
        assert [collapsed, interval] == [str(gone), f"{share.low:.2f} to {share.high:.2f}"], arm
        assert falls == " ".join(str(step or "-") for step in steps), arm
        assert surges == " ".join("-" if np.isnan(step) else str(int(step)) for step in called), arm


def test_the_planned_comparisons(study, columns, areas):
    rows, count = table(study.page, "compared | seeds", study.section), len(study.seeds)
    assert [row[0] for row in rows] == [f"{one} - {other}" for one, other in study.compared]
    for cells, (one, other) in zip(rows, study.compared, strict=True):
        differences = np.array([areas[one, seed] - areas[other, seed] for seed in study.seeds])
        sizes = range(1, count + 1)
        means = sorted(differences[list(some)].mean() for size in sizes for some in combinations(range(count), size))
        # All intervals together have 95%. Of 512 parts 2 lie outside at each end of one of five, and of 16 parts none.
        outside = 5 * 2**count // (200 * study.planned)
        interval = f"{means[outside - 1]:+.2f} to {means[-outside]:+.2f}" if outside else "-"
        p = float(sign_p(differences))
        signs = [int(sum(differences > 0)), int(sum(differences == 0)), int(sum(differences < 0))]
        fates = [[fate(columns[arm, seed][:, 0]) for seed in study.seeds] for arm in (one, other)]
        gone = [sum(fell and peak >= 0.3 for peak, _, fell in of_arm) for of_arm in fates]
        fisher = stats.fisher_exact([[gone[0], count - gone[0]], [gone[1], count - gone[1]]]).pvalue
        assert cells[1:4] == [str(count), f"{differences.mean():+.2f}", interval], other
        assert cells[4] == "{} / {} / {}".format(*signs), other
        assert cells[5:] == [f"{p:.2g}", f"{min(1, study.planned * p):.2g}", "{}, {}".format(*gone), f"{fisher:.2g}"], (
            other
        )


@of(*SIX_ARMS)
def test_the_page_gives_the_range_of_each_difference(study, columns, areas):
    """A range is over the seeds whose surge was called, and stands in the study's own section."""
    page = PAGES[study.page]
    section = page[page.index(f"# {study.section}\n") :].split("\n##")[0]
    called = [seed for seed in study.seeds if not np.isnan(columns["constant", seed][-1, 2])]
    assert called
    for other in PLANNED:
        differences = [areas["triggered", seed] - areas[other, seed] for seed in called]
        assert f"{min(differences):+.2f} to {max(differences):+.2f}" in section, other


@MAIN
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
    for page in ("study", "study_collapse"):
        assert all(text in PAGES[page] for text in ("0.035 to 0.060", "0.0031 to 0.025"))


@MAIN
def test_the_mismatch_before_the_first_fall(columns):
    """Of the steps 61 to 115, and the two columns behind it at the end."""
    called = [9, 10, 11, 12, 13, 14, 16, 17]
    mean = {run: lines[60:115, 4:].mean(0) for run, lines in columns.items()}
    last = {run: lines[-10:, 4:].mean(0) for run, lines in columns.items()}
    assert min(fall_step(columns["constant", seed]) for seed in range(9, 18)) == 116
    for of, pairs in ((mean, (8, 8)), (last, (8, 5))):
        lower = [
            (of["triggered", s][0] < of["constant", s][0], gap["triggered"] < gap["constant"])
            for s in called
            for gap in [{arm: of[arm, s][2] / of[arm, s][1] for arm in ("triggered", "constant")}]
        ]
        assert tuple(np.sum(lower, axis=0)) == pairs
    assert sum(mean["tenth", s][0] > mean["constant", s][0] for s in range(9, 18)) == 9
    texts = [
        f"{min(of[arm, s][place] for s in seeds):.2g} to {max(of[arm, s][place] for s in seeds):.2g}"
        for of, arm, place, seeds in (
            (mean, "triggered", 0, called),
            (mean, "constant", 0, called),
            (mean, "tenth", 0, range(9, 18)),
            (last, "constant", 1, called),
            (last, "triggered", 1, called),
        )
    ]
    assert texts == ["0.0063 to 0.032", "0.016 to 0.033", "0.031 to 0.05", "0.082 to 0.44", "0.022 to 0.11"]
    assert all(text in PAGES["study_collapse"] for text in texts)
    assert all(text in PAGES["study"] for text in texts[:2])


@MAIN
def test_the_decay_begins_before_the_policy_has_learned(columns):
    called = [9, 10, 11, 12, 13, 14, 16, 17]
    begins = {s: int(np.argmax(columns["triggered", s][:, 1] < 3.9e-4)) for s in called}
    before = {s: accuracy(columns["triggered", s])[step - 1] for s, step in begins.items()}
    share = [value / accuracy(columns["constant", s]).max() for s, value in before.items()]
    fixed = [accuracy(columns["fixed", s])[73] for s in range(9, 18)]
    assert (min(begins.values()) + 1, max(begins.values()) + 1) == (25, 50)
    texts = [f"{min(values):.2f} to {max(values):.2f}" for values in (before.values(), share, fixed)]
    assert texts == ["0.13 to 0.56", "0.18 to 0.82", "0.37 to 0.72"]
    assert all(text in PAGES["study_collapse"] for text in texts)


@MAIN
def test_the_secondary_outcomes(columns, areas):
    """The areas of each base, the final accuracies, and the pairs of which one run collapses."""
    for cells in table("study_collapse", "compared | base 0"):
        one, other = cells[0].split(" - ")
        of_base = [[areas[one, s] - areas[other, s] for s in range(9, 18) if s % 3 == base] for base in range(3)]
        assert cells[1:] == [f"{np.mean(differences):+.2f}" for differences in of_base], other
    final = {run: fate(lines[:, 0])[1] for run, lines in columns.items()}
    found = []
    for other in ("fixed", "linear"):
        differences = {s: final["triggered", s] - final[other, s] for s in range(9, 18)}
        ahead = sum(value < 0 for value in differences.values())
        rest = np.mean([value for s, value in differences.items() if s != 15])
        found.append((ahead, f"{float(sign_p(list(differences.values()))):.2g}", f"{rest:.2f}"))
    assert found == [(8, "0.012", "-0.02"), (7, "0.047", "-0.02")]
    gone = {run: fell and peak >= 0.3 for run, (peak, _, fell) in ((r, fate(v[:, 0])) for r, v in columns.items())}
    alone = [(gone["constant", s], gone["triggered", s]) for s in range(9, 18)]
    assert (alone.count((True, False)), alone.count((False, True))) == (7, 0)
    assert f"{stats.binomtest(7, 7).pvalue:.2g}" == "0.016"
    assert sum(final["constant", s] < 0.03 for s in range(9, 18)) == 6


@MAIN
def test_where_the_mismatch_grows_without_a_fall(columns):
    """From the first step with 0.9 of the peak to the last step of the run."""
    grew = {}
    for (arm, seed), lines in columns.items():
        if arm != "constant" and (arm, seed) != ("triggered", 15):
            means = accuracy(lines)
            begin = int(np.argmax(means >= 0.9 * means.max())) + 1
            grew.setdefault(arm, []).append(lines[-10:, 4].mean() > lines[begin - 10 : begin, 4].mean())
    counts = {arm: (sum(runs), len(runs)) for arm, runs in grew.items()}
    assert counts == {"triggered": (2, 8), "untriggered": (3, 9), "fixed": (1, 9), "linear": (1, 9), "tenth": (0, 9)}


def test_the_intervals_of_a_share_with_99_percent():
    lows = [f"{stats.binomtest(8, runs).proportion_ci(0.99, 'exact').low:.2f}" for runs in (8, 9)]
    assert lows == ["0.52", "0.42"]
    assert all(f"({low})" in PAGES["study"] for low in lows)
    share = stats.binomtest(7, 9).proportion_ci(0.95, "exact")
    assert f"7 of 9 do ({share.low:.2f} to {share.high:.2f})" in PAGES["study"]


@of(*SIX_ARMS)
def test_the_arms_part_where_the_design_says(study, columns):
    """A seed's runs are one run until their rates differ; a drawn period is the next seed's surge times 1.8."""
    for seed in study.seeds:
        constant = columns["constant", seed]
        for arm in ("triggered", "untriggered", "fixed"):
            same = int(np.argmax(np.append(columns[arm, seed][:, 1] != constant[:, 1], True)))
            np.testing.assert_array_equal(columns[arm, seed][:same, 0], constant[:same, 0])
        following = [*range(seed + 1, study.seeds.stop), *range(study.seeds.start, seed)]
        surges = [columns["constant", other][-1, 2] for other in following]
        drawn = next(surge for surge in surges if not np.isnan(surge))
        assert columns["untriggered", seed][-1, 3] == round(1.8 * drawn), seed


def spread(values, digits=".2g"):
    return " to ".join(format(value, digits) for value in (min(values), max(values)))


@of(LATE)
def test_late_remedies_begin_at_step_100(study, columns):
    for seed in study.seeds:
        for arm, rate in (("decay", 2e-4), ("sixteen_bits", 4e-4)):
            np.testing.assert_array_equal(columns[arm, seed][:100, 0], columns["constant", seed][:100, 0])
            assert columns[arm, seed][100, 1] == np.float32(rate)


@of(LATE)
def test_what_late_remedies_do(study, columns):
    """The numbers in the sentences of the page, of the steps after 100 where it says nothing else."""
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
        *(spread([lines[-10:, 4].mean() for lines in runs[arm]]) for arm in study.arms),
        *(collapsed, f"{ratios} times"),
    ]
    page = " ".join(PAGES["study_late"].split())
    assert [text for text in texts if text not in page] == []
    lost = spread([peak for peak, _, fell in fates["sixteen_bits"] if fell], ".2f")
    assert [text for text in (ratios, collapsed, lost) if text not in PAGES["study"]] == []


@of(REMEDIES)
def test_the_mismatch_of_each_remedy(study, columns):
    """The mean of steps 21 to 100, of each seed."""
    for arm, *cells in table(study.page, "arm | mismatch", study.section):
        for key, cell in zip((4, 7), cells, strict=True):
            means = [np.nanmean(columns[arm, seed][20:100, key]) for seed in study.seeds]
            assert cell == f"{min(means):.2g} to {max(means):.2g}", arm


@of(RATES)
def test_the_table_of_rates_and_caches(study, columns):
    """Peak, final accuracy and fall of 18 runs, and the mismatch up to where 0.9 of the peak is reached."""
    assert {len(lines) for lines in columns.values()} == {study.steps}
    assert set(columns) == {(arm, seed) for arm in study.arms for seed in study.seeds}
    expected = []
    for (rate, cache), arm in zip(product(("2e-4", "4e-4", "8e-4"), CACHES), study.arms, strict=True):
        cells = []
        for lines in (columns[arm, seed] for seed in study.seeds):
            means = accuracy(lines)
            begin = int(np.argmax(means >= 0.9 * means.max())) + 1
            peak, final, fell = fate(lines[:, 0])
            mismatch = lines[max(0, begin - 10) : begin, 4].mean()
            cells.append([f"{mismatch:.2g}", f"{peak:.2f}", f"{final:.2f}", str(fall_step(lines)) if fell else "-"])
        expected.append([rate, cache, *(" ".join(pair) for pair in zip(*cells, strict=True))])
    assert table(study.page, "rate | cache") == expected
