"""The choice of the shipped rules: its halves, its cost, and the record that the page shows."""

import dataclasses
import json
from pathlib import Path

import choose_rules
import length_curves
import numpy as np
import pytest

from rljax.schedule import SurgeConfig

ROOT = Path(__file__).parents[2]
CURVES = length_curves.load_curves()


def test_the_curves_of_a_project_are_in_one_half():
    halves = {curve.source["project"]: set() for curve in CURVES}
    for curve in CURVES:
        halves[curve.source["project"]].add(choose_rules.half_of(curve))
    assert all(len(half) == 1 for half in halves.values())
    # sha256("simopd") begins with an odd byte, and sha256("paper") with an even byte.
    assert (halves["simopd"], halves["paper"]) == ({"second"}, {"first"})


def test_runs_of_the_study_are_split_by_seed():
    runs = {run.name: choose_rules.half_of(run) for run in length_curves.load_runs()}
    assert runs["study-constant-4"] == "first"
    assert runs["study-constant-5"] == "second"


def test_a_cost_is_counted_by_hand():
    surge, flat = (curve for curve in CURVES if curve.name in ("signed-merger-25", "pivot-v15b"))
    if surge.surge is None:
        surge, flat = flat, surge
    sets = {"curves": [surge, flat]}
    assert choose_rules.scores(lambda stream: None, sets)["cost"] == 1
    begin = surge.surge[0]
    # A call at the surge's first step is in time on this stream, and false on the other one. A restart begins after it.
    at_surge = choose_rules.scores(lambda stream: begin, sets)
    assert at_surge["curves"]["not in time"] == 0
    assert at_surge["cost"] == pytest.approx(choose_rules.FALSE_WEIGHT)


def test_the_shipped_rules_are_the_chosen_ones():
    record = json.loads((ROOT / "benchmarks" / "chosen_rules.json").read_text())
    assert record["chosen"] == dataclasses.asdict(SurgeConfig())
    passed = [row["synthetic"] for row in record["ranking"]]
    assert passed.index(True) == sum(verdict is False for verdict in passed)
    costs = [row["cost"] for row in record["ranking"]]
    assert np.all(np.diff(costs) >= 0)
    page = (ROOT / "docs" / "length_curves.md").read_text()
    assert choose_rules.as_markdown(record) in page
