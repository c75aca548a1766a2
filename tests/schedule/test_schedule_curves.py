"""The tracker is tested on the curves of experiments/study_surge.py, with some of the seeds that the program runs."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import study_surge

from rljax.schedule import SurgeConfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

SURGE_SEEDS, QUIET_SEEDS = 150, 10


@pytest.mark.parametrize("name", study_surge.QUIETS)
def test_no_surge_no_call(name):
    assert study_surge.judge_quiets(name, study_surge.QUIETS[name], SurgeConfig(), QUIET_SEEDS)["false_calls"] == 0


def test_a_toy_run_is_called_within_ten_steps():
    row = study_surge.judge_surges("toy", study_surge.toy, SurgeConfig(), SURGE_SEEDS)
    assert row["called"] == 1
    assert row["within_10"] > 0.96


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
