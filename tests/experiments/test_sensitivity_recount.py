"""Counts the tables of the sensitivity of the study of a late collapse again from the rows."""

from itertools import product

import numpy as np
import pytest
from scipy import stats
from study_pages import PAGES, fate, table
from study_recount import (
    CACHES,
    DETECTOR,
    RATES,
    SERVERS,
    accuracy,
    areas_of,
    columns_of,
    fall_step,
    growth,
    of,
    plateau_step,
    spread,
)


@pytest.fixture(scope="module", params=[DETECTOR], ids=lambda study: study.rows)
def study(request):
    return request.param


@pytest.fixture(scope="module")
def columns(study):
    return columns_of(study)


@of(DETECTOR)
def test_the_sentences_about_the_detector(study, columns):
    """A run without a call equals the constant run.

    The page has the areas, final accuracies and first decays of the others.
    """
    areas, finals, begins, before, widest = {}, {}, [], [], 0.0
    reward = areas_of(study)
    for (ratio, times), seed in product(product(("2", "2.5", "3.5"), ("1.1", "1.8", "2.5")), study.seeds):
        arm = f"ratio_{ratio}_times_{times}"
        lines, called = columns[arm, seed], not np.isnan(columns[arm, seed][-1, 2])
        if not called:
            np.testing.assert_array_equal(lines[:, 0], columns["constant", seed][:, 0])
            continue
        areas.setdefault(times, []).append(reward[arm, seed])
        finals.setdefault(ratio, []).append(accuracy(lines)[-1])
        begins.append(int(np.argmax(lines[:, 1] < 3.9e-4)) + 1)
        before.append(accuracy(lines)[begins[-1] - 2])
        widest = max(widest, abs(reward[arm, seed] - reward[f"ratio_{ratio}_times_1.8", seed]))
    texts = [f"{spread(areas[times], '.2f')} with {times}" for times in ("1.1", "1.8")]
    texts += [spread(areas["2.5"], ".2f"), spread(finals["2"] + finals["2.5"], ".2f"), spread(finals["3.5"], ".2f")]
    texts += [f"steps {min(begins)} to {max(begins)}", spread(before, ".2f")]
    page = " ".join(PAGES[study.page].split())
    assert [text for text in texts if text not in page] == []
    assert [text for text in texts[:2] if text not in PAGES["study"]] == []
    assert widest < 0.05
    early, late = (reward[f"ratio_{ratio}_times_1.1", 23] for ratio in ("2", "2.5"))
    assert (f"{early:.2f}", f"{late:.2f}") == ("0.78", "0.81")


def outcome(lines):
    """Returns the mismatch up to 0.9 of the peak, the peak, the final accuracy and the fall, all as printed."""
    begin = plateau_step(lines)
    peak, final, fell = fate(lines[:, 0])
    mismatch = lines[max(0, begin - 10) : begin, 4].mean()
    return [f"{mismatch:.2g}", f"{peak:.2f}", f"{final:.2f}", str(fall_step(lines)) if fell else "-"]


@of(RATES)
def test_the_table_of_rates_and_caches(study, columns):
    expected = []
    for (rate, cache), arm in zip(product(("2e-4", "4e-4", "8e-4"), CACHES), study.arms, strict=True):
        cells = [outcome(columns[arm, seed]) for seed in study.seeds]
        expected.append([rate, cache, *(" ".join(pair) for pair in zip(*cells, strict=True))])
    assert table(study.page, "rate | cache") == expected


@of(SERVERS)
def test_the_table_of_a_real_server(study, columns):
    names = {arm: cache for cache, arm in CACHES.items()} | {"sixteen_bits": "16 bits"}
    expected = [
        [names[arm], str(seed), *outcome(columns[arm, seed])] for arm in study.arms for seed in study.seeds_of(arm)
    ]
    assert table(study.page, "cache | seed") == expected


@of(SERVERS)
def test_the_mismatch_of_a_real_server(study, columns):
    """The page's sentences have the growth from the plateau to the fall or the end, and the mean of steps 21 to 100."""
    grew = {}
    for run, lines in columns.items():
        grew[run] = growth(lines, fall_step(lines) if fate(lines[:, 0])[2] else len(lines))
    early = [columns["e5m2", seed][20:100, 4].mean() for seed in study.seeds]
    learned = [factor for run, factor in grew.items() if run not in {("e5m2", 27), ("e5m2", 29)}]
    share = stats.binomtest(1, 3).proportion_ci(0.95, "exact")
    texts = [f"grows {grew['e5m2', 27]:.1f} times", f"{spread(learned, '.1f')} times", spread(early)]
    texts.append(f"({share.low:.2f} to {share.high:.2f})")
    page = " ".join(PAGES[study.page].split())
    assert [text for text in texts if text not in page] == []
