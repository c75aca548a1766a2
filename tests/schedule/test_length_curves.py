"""The recorded length curves, the rules for each kind and the scores of two rules; and the drawn curves.

The tracker is tested on the curves of experiments/study_surge.py, with some of the seeds that the program runs.
"""

import dataclasses
import json
from pathlib import Path

import detector_table
import length_curves
import numpy as np
import pytest
import study_surge

from rljax.schedule import SurgeConfig

ROOT = Path(__file__).parents[2]
CURVES = length_curves.load_curves()


def curve_of(lengths, steps=None, truncated=None, cap=None):
    steps = range(1, len(lengths) + 1) if steps is None else steps
    setting = dict.fromkeys(length_curves.SETTING_KEYS) | {"max_tokens": cap}
    share = np.full(len(lengths), np.nan) if truncated is None else np.asarray(truncated, float)
    return dataclasses.replace(
        CURVES[0], setting=setting, surge=None, steps=np.array(steps), lengths=np.array(lengths, float), truncated=share
    )


def test_each_curve_is_well_formed_and_of_its_kind():
    for curve in CURVES:
        assert len(curve.steps) == len(curve.lengths) == len(curve.truncated) >= 3
        assert np.all(np.isfinite(curve.lengths) & (curve.lengths > 0))
        assert np.all(np.diff(curve.steps, prepend=-1) > 0)
        shares = curve.truncated[np.isfinite(curve.truncated)]
        assert np.all((shares >= 0) & (shares <= 1))
        assert curve.obtained in length_curves.OBTAINED
        assert tuple(curve.source) == length_curves.SOURCE_KEYS
        assert tuple(curve.setting) == length_curves.SETTING_KEYS
        assert curve.source["project"]
        assert curve.source["repository"] or curve.source["address"]
        assert length_curves.kind_by_rule(curve) == curve.kind or "By eye" in curve.reason
        assert curve.kind != "surge" or curve.surge
        if curve.surge:
            assert curve.steps[0] <= curve.surge[0] < curve.surge[1] <= curve.steps[-1]
    assert len({curve.name for curve in CURVES}) == len(CURVES) >= 60
    assert length_curves.independent(CURVES) >= 30
    assert {curve.kind for curve in CURVES} == set(length_curves.KINDS)


def test_the_rules_of_the_kinds():
    for curve, kind in (
        (curve_of([100, 100, 104, 106]), "flat"),
        (curve_of([100, 105, 115, 120]), "slow growth"),
        (curve_of([100, 90, 85, 80]), "shrinking"),
        (curve_of([100, 80, 60, 40]), "collapse"),
        (curve_of([100, 100, 300, 300]), "surge"),
        (curve_of([100, 100, 300, 300], steps=[1, 2, 60, 120]), "slow growth"),
        (curve_of([100, 200, 180, 110]), "rise and fall"),
        (curve_of([100, 400, 900, 950], cap=1000), "truncated"),
        (curve_of([100, 100, 100, 100], truncated=[0, 0.2, 0.4, 0.5]), "truncated"),
    ):
        assert length_curves.kind_by_rule(curve) == kind
    # A spike is no surge.
    assert length_curves.find_surge(curve_of([100, 300, 100, 100])) is None
    assert length_curves.find_surge(curve_of([100, 110, 280, 290, 300])) == (2, 3)
    assert length_curves.find_surge(curve_of([100] * 20 + [900] + [100] * 20)) is None


def test_runs_are_read_and_another_format_is_refused(tmp_path):
    runs = length_curves.load_runs()
    assert len(runs) == 110
    assert sum(run.setting["algorithm"] == "constant" for run in runs) == 8
    (tmp_path / "curves.json").write_text(json.dumps({"format": 2, "curves": []}))
    with pytest.raises(ValueError, match="must have format 1, got 2"):
        length_curves.load_curves(tmp_path / "curves.json")


def test_the_recorded_table_is_of_these_curves_and_on_the_page():
    record = json.loads((length_curves.CURVES.parent / "detector_table.json").read_text())
    assert record["sizes"] == {"curves": len(CURVES), "runs": 110}
    assert set(record["by_variation"]["curves"]["as it is"]) == set(detector_table.RULES)
    for rule in ("shipped", "three times"):
        call = detector_table.RULES[rule]
        for curve in CURVES:
            recorded = record["calls"][curve.name]
            assert (recorded["kind"], recorded[rule]) == (curve.kind, call(detector_table.stream_of(curve)))
        for variation, changes in detector_table.VARIATIONS.items():
            counts = record["by_variation"]["curves"][variation][rule]
            assert counts == detector_table.count(CURVES, call, changes), (rule, variation)
    page = (ROOT / "docs" / "length_curves.md").read_text(encoding="utf-8")
    rows = [line for line in detector_table.as_markdown(record).splitlines() if line.startswith("| ") and "/" in line]
    assert len(rows) == 2 * len(detector_table.VARIATIONS)
    assert [row for row in rows if row not in page] == []
    chosen = json.loads((length_curves.CURVES.parent / "chosen_rules.json").read_text())
    assert chosen["chosen"] == dataclasses.asdict(SurgeConfig())


SURGE_SEEDS, QUIET_SEEDS = 150, 10


@pytest.mark.slow
@pytest.mark.parametrize("name", study_surge.QUIETS)
def test_no_surge_no_call(name):
    assert study_surge.judge_quiets(name, study_surge.QUIETS[name], SurgeConfig(), QUIET_SEEDS)["false_calls"] == 0


@pytest.mark.slow
def test_a_toy_run_is_called_within_ten_steps():
    row = study_surge.judge_surges("toy", study_surge.toy, SurgeConfig(), SURGE_SEEDS)
    assert row["called"] == 1
    assert row["within_10"] > 0.96


@pytest.mark.slow
@pytest.mark.parametrize("name", study_surge.SURGES)
def test_a_surge_is_called_in_time(name):
    """It is called, too, where it runs into a limit of five times the level."""
    row = study_surge.judge_surges(name, study_surge.SURGES[name], SurgeConfig(), SURGE_SEEDS)
    assert row["called"] > 0.99
    assert row["median_delay"] <= 3
    assert row["earlier_than_15"] == 0
    for seed in range(20):
        curve = study_surge.draw(name, study_surge.SURGES[name], seed)
        lengths, truncated = study_surge.cut(curve.lengths, 5 * study_surge.BASE_TOKENS)
        call = study_surge.first_call(study_surge.Curve(lengths, truncated, curve.crossing), SurgeConfig())
        assert call is not None
        assert abs(call - curve.crossing) <= 15


@pytest.mark.slow
def test_the_bars_are_missed_by_worse_rules():
    """The judgement can fail: a tracker that trusts a single high step calls a surge at spikes."""
    hasty = SurgeConfig(smooth=1, persistence=1)
    assert study_surge.judge_quiets("single spikes", study_surge.QUIETS["single spikes"], hasty, 5)["false_calls"] == 1
    blunt = SurgeConfig(baseline_quantile=0.8)
    row = study_surge.judge_surges("linear", study_surge.SURGES["linear"], blunt, 100)
    assert row["called"] < 0.99


def test_the_published_table_is_the_recorded_study():
    """A curve depends on its family and seed only."""
    record = json.loads((ROOT / "benchmarks" / "surge_study.json").read_text())
    assert record["config"] == dataclasses.asdict(SurgeConfig())
    assert study_surge.as_markdown(record, record["seeds"]) in (ROOT / "docs" / "schedule.md").read_text()
    first, again, other = (study_surge.draw("linear", study_surge.SURGES["linear"], seed) for seed in (4, 4, 5))
    np.testing.assert_array_equal(first.lengths, again.lengths)
    assert not np.array_equal(first.lengths, other.lengths)
    assert first.crossing is not None
    assert abs(int(np.argmax(first.lengths >= 3000)) + 1 - first.crossing) < 30
