"""Where the schedule helped: exact p values by hand, the counts of a row, and the page against the files."""

from pathlib import Path

import pytest
import schedule_balance

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/should_i_use_it.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([0.1, 0.2, 0.3], 2 / 8),  # all three up, or all three down
        ([-0.1, 0.2, 0.4], 4 / 8),  # the sums 0.7 and 0.5, and their opposites, reach 0.5
        ([0.1, 0.2, -0.3], 1.0),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0], 2 / 64),
        ([0.0, 0.0], 1.0),
    ],
)
def test_signs_are_flipped_in_every_way(differences, expected):
    assert schedule_balance.sign_flip_p(differences) == expected


def test_two_shares_by_hand():
    # 5 of 8 against 2 of 8: tables with 0 to 7 of the 7 in the first row, over C(16, 7) = 11440. The ways are
    # 8, 224, 1568, 3920, 3920, 1568, 224, 8; at most 1568 are 3600 of them.
    assert schedule_balance.fisher_p(5, 8, 2, 8) == pytest.approx(3600 / 11440)
    assert schedule_balance.fisher_p(1, 1, 0, 1) == 1.0


def test_a_row_counts_pairs_of_the_same_seed():
    def run(final, surge=5):
        return {"final": final, "surge_step": surge}

    study = {
        "a_triggered": {"0": run(0.5), "1": run(0.2, None), "2": run(0.9)},
        "a": {"0": run(0.25), "1": run(0.2, None), "3": run(0.9)},
    }
    comparison = schedule_balance.Comparison("", "x", schedule_balance.triggered("a"))
    row = schedule_balance.compare(comparison, {"x": study})
    assert row == {
        **{"pairs": 2, "well": 1, "other_well": 0, "no_call": 1, "better": 1, "same": 1},
        **{"difference": 0.125, "p": 1.0},
    }


def test_the_page_has_the_counts_and_both_tables():
    studies = schedule_balance.read_studies()
    assert schedule_balance.counts(studies) in PAGE
    for table in schedule_balance.tables(studies):
        assert table in PAGE
