"""The balance of the schedule: the counts of a row, and the page against the files."""

from pathlib import Path

import schedule_balance

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/should_i_use_it.md").read_text(encoding="utf-8")


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
        **{"difference": 0.125, "p": 1.0, "seeds": 2, "p_by_seed": 1.0},
    }


def test_the_runs_of_a_seed_count_once():
    def runs(*finals):
        return {str(seed): {"final": final, "surge_step": 5} for seed, final in enumerate(finals)}

    study = {"a_triggered": runs(0.5, 0.5), "a": runs(0.1, 0.2), "b_triggered": runs(0.9, 0.4), "b": runs(0.0, 0.5)}
    row = schedule_balance.compare(
        schedule_balance.Comparison("", "x", schedule_balance.triggered("a", "b")), {"x": study}
    )
    # The pairs' differences are 0.4, 0.3, 0.9 and -0.1. Two of the 8 sums with one sign fixed, 1.7 and 1.5, reach 1.5.
    # The seeds' differences are 0.65 and 0.1.
    assert (row["pairs"], row["p"]) == (4, 4 / 16)
    assert (row["seeds"], row["p_by_seed"]) == (2, 2 / 4)


def test_the_page_has_the_counts_and_the_tables():
    studies = schedule_balance.read_studies()
    assert schedule_balance.counts(studies) in PAGE
    constant, triggered = schedule_balance.tables(studies)
    assert constant in PAGE
    assert triggered in PAGE
