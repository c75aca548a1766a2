"""The balance of the schedule: the counts of a row, and the page against the files."""

from pathlib import Path

import schedule_balance

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/should_i_use_it.md").read_text(encoding="utf-8")


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
