"""Tests of comparisons of arms by hand: the area under the accuracy, and equal distances from the base."""

import numpy as np
import pytest
import study_distance
from exact_tests import sign_flip_p
from records import study_row
from study import read_study
from study_area import areas_of, compare, comparison_figure, dose_figure, markdown, power, tables
from study_distance import Course, course_of, figure_of


def rows(rewards, surge=None):
    return [study_row(step, reward, surge) for step, reward in enumerate(rewards, 1)]


STUDY = """
config: configs/quickstart.yaml
seeds: [0, 1, 2]
arms: {constant: , slow: , never_run: }
comparisons: [[slow, constant], [slow, never_run]]
"""


def test_the_trend_of_another_outcome_by_hand(tmp_path):
    """The outcome stands in each second row. Both slopes of the areas 1, 0.75, 0.5 are -0.25; the gaps are 0 to 0.2."""
    runs = {}
    for size, arm in enumerate(("constant", "slow", "never_run")):
        run = rows([0.0] * 200, surge=10)
        for row in run:
            row["eval/held/accuracy"] = 1 - size / 4 if row["step"] % 2 else None
            row["mismatch/logprob_abs_diff_mean"] = size / 10 * (row["step"] <= 100)
        runs |= {(arm, 0): run, (arm, 1): run}
    study = tmp_path / "study.yaml"
    study.write_text(STUDY + "outcome: eval/held/accuracy\ntrend: [constant, slow, never_run]\n")
    found = tables(read_study(study), runs)
    trend = found["trend"]
    assert trend["slopes"] == pytest.approx({"0": -0.25, "1": -0.25})
    assert (trend["p"], trend["interval"]) == (0.5, None)
    assert trend["gaps"] == pytest.approx({"constant": 0.0, "slow": 0.1, "never_run": 0.2})
    assert "trend: -0.250 for each level (none), p 0.5" in markdown(found)
    (axis,) = dose_figure(found).axes
    means = [line.get_xydata()[0] for line in axis.lines if line.get_marker() == "D"]
    np.testing.assert_allclose(means, [[0.1, -0.25], [0.2, -0.5]])
    with pytest.raises(ValueError, match="no step after 200"):
        areas_of(runs, after=200)
    # A seed without a run of the constant arm has no area, and a pair with an arm that was not run is left out.
    assert areas_of(runs | {("slow", 2): run})["slow"].keys() == {0, 1}
    study.write_text(STUDY)
    few = {key: rows for key, rows in runs.items() if key[0] != "never_run"}
    assert [line["arms"] for line in tables(read_study(study), few)["comparisons"]] == [["slow", "constant"]]


def test_the_figure_has_each_seed_the_mean_and_the_interval():
    """With nine pairs there is an interval, and with two there is none."""
    many = {"arms": ["a", "b"], **compare({seed: seed / 8 for seed in range(9)}, dict.fromkeys(range(9), 0.0), count=5)}
    few = {"arms": ["a", "c"], **compare({0: 0.75, 1: 0.25}, {0: 0.25, 1: 0.25}, count=5)}
    (axis,) = comparison_figure([many, few]).axes
    assert [text.get_text() for text in axis.get_yticklabels()] == ["a - b", "a - c"]
    _, interval, seeds, mean, few_seeds, few_mean = (list(line.get_xdata()) for line in axis.lines)
    assert interval == list(many["interval"])
    assert (seeds, mean) == ([seed / 8 for seed in range(9)], [0.5])
    assert (few_seeds, few_mean) == ([0.5, 0.0], [0.25])
    (axis,) = comparison_figure([few] * 9).axes
    assert sum(line.get_marker() == "D" for line in axis.lines) == 9


def test_the_power_of_drawn_studies():
    """Without a shift a study is significant as often as its level allows. A shift beyond all noise is always found."""
    areas = [0.2, 0.25, 0.3, 0.4, 0.55]
    assert power(areas, 9, 0.0, 5, np.random.default_rng(0)) < 0.014  # three standard errors above 4 of 512 patterns
    assert power(areas, 9, 1.0, 5, np.random.default_rng(0)) == 1.0
    assert power(areas, 6, 1.0, 5, np.random.default_rng(0)) == 0.0  # the least p is 2 / 64; five times it is 0.16
    assert sign_flip_p([1.0] * 9) * 5 < 0.05


def moving(rewards, distances):
    """Returns rows that hold each pair of values for ten steps, as long as the means of accuracy and distance."""
    return [
        {"step": 10 * k + i, "reward/mean": reward, "policy/reference_kl": distance}
        for k, (reward, distance) in enumerate(zip(rewards, distances, strict=True))
        for i in range(1, 11)
    ]


MOVING = {
    ("slow", 0): moving([0.25, 0.5, 0.75], [0.0, 0.5, 1.0]),
    ("constant", 0): moving([0.5, 0.25, 0.0], [1.0, 2.0, 1.0]),
    ("slow", 1): moving([0.5, 0.5, 0.5], [0.0, 1.0, 2.0]),
    ("constant", 1): moving([0.0, 0.0, 1.0], [0.5, 0.5, 0.5]),
}


def test_what_was_moved_never_falls():
    course = course_of(MOVING["constant", 0])
    np.testing.assert_allclose(course.moved[[9, 19, 29]], [1.0, 2.0, 2.0])
    np.testing.assert_allclose(course.accuracy[[9, 19, 29]], [0.5, 0.25, 0.0])
    with pytest.raises(ValueError, match="no seed in common"):
        study_distance.compare({0: course}, {1: course}, 1)
    course = Course(np.zeros(4), np.array([0.2, 0.5, 0.6, 0.8]))
    assert [course.step_at(distance) for distance in (0.1, 0.2, 0.5, 0.7, 9.0)] == [1, 1, 2, 3, 4]
    for unknown in ({}, {"policy/reference_kl": float("nan")}):
        with pytest.raises(ValueError, match="no finite policy/reference_kl"):
            course_of([{"step": 1, "reward/mean": 0.0, **unknown}])


def test_pairs_by_hand(tmp_path):
    """Seed 0 is read at 1.0: slow at its end, the other after 10 steps. Seed 1 is read at 0.5, slow in step 15."""
    (tmp_path / "study.yaml").write_text(STUDY)
    study = read_study(tmp_path / "study.yaml")
    found = study_distance.tables(study, MOVING)
    (pair,) = found["comparisons"]
    assert pair["read"] == {"0": {"distance": 1.0, "steps": [30, 10]}, "1": {"distance": 0.5, "steps": [15, 30]}}
    assert pair["differences"] == [0.25, -0.5]
    assert (pair["equal"]["difference"], pair["ends"]["difference"]) == (-0.125, 0.125)
    assert (pair["equal"]["p"], pair["equal"]["corrected_p"]) == (1.0, 1.0)
    assert found["arms"]["constant"] == {"seeds": 2, "distance": 1.25, "accuracy": 0.5}
    assert "| slow - constant | 2 | -0.12 | - | 1/0/1 | 1 | 1 |" in study_distance.markdown(found)
    (axis,) = figure_of(study, MOVING).axes
    assert sum(line.get_marker() == "o" for line in axis.lines) == 4
