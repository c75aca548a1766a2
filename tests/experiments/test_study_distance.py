"""Tests of the comparison of arms at an equal distance from the base, by hand."""

import numpy as np
import pytest
from study import read_study
from study_distance import Course, compare, course_of, figure_of, markdown, tables

STUDY = """
config: configs/quickstart.yaml
seeds: [0, 1]
arms: {slow: , fast: , never_run: }
comparisons: [[slow, fast], [slow, never_run]]
"""


def rows(rewards, distances):
    """Returns rows that hold each pair of values for ten steps, as long as the means of accuracy and distance."""
    return [
        {"step": 10 * k + i, "reward/mean": reward, "policy/reference_kl": distance}
        for k, (reward, distance) in enumerate(zip(rewards, distances, strict=True))
        for i in range(1, 11)
    ]


RUNS = {
    ("slow", 0): rows([0.25, 0.5, 0.75], [0.0, 0.5, 1.0]),
    ("fast", 0): rows([0.5, 0.25, 0.0], [1.0, 2.0, 1.0]),
    ("slow", 1): rows([0.5, 0.5, 0.5], [0.0, 1.0, 2.0]),
    ("fast", 1): rows([0.0, 0.0, 1.0], [0.5, 0.5, 0.5]),
}


def test_what_was_moved_never_falls():
    course = course_of(RUNS["fast", 0])
    np.testing.assert_allclose(course.moved[[9, 19, 29]], [1.0, 2.0, 2.0])
    np.testing.assert_allclose(course.accuracy[[9, 19, 29]], [0.5, 0.25, 0.0])
    with pytest.raises(ValueError, match="no seed in common"):
        compare({0: course}, {1: course}, 1)
    course = Course(np.zeros(4), np.array([0.2, 0.5, 0.6, 0.8]))
    assert [course.step_at(distance) for distance in (0.1, 0.2, 0.5, 0.7, 9.0)] == [1, 1, 2, 3, 4]
    for unknown in ({}, {"policy/reference_kl": float("nan")}):
        with pytest.raises(ValueError, match="no finite policy/reference_kl"):
            course_of([{"step": 1, "reward/mean": 0.0, **unknown}])


def test_pairs_by_hand(tmp_path):
    """Seed 0 is read at 1.0: slow at its end, fast after 10 steps. Seed 1 is read at 0.5, where slow is in step 15."""
    (tmp_path / "study.yaml").write_text(STUDY)
    study = read_study(tmp_path / "study.yaml")
    found = tables(study, RUNS)
    (pair,) = found["comparisons"]
    assert pair["read"] == {"0": {"distance": 1.0, "steps": [30, 10]}, "1": {"distance": 0.5, "steps": [15, 30]}}
    assert pair["differences"] == [0.25, -0.5]
    assert (pair["equal"]["difference"], pair["ends"]["difference"]) == (-0.125, 0.125)
    assert (pair["equal"]["p"], pair["equal"]["corrected_p"]) == (1.0, 1.0)
    assert found["arms"]["fast"] == {"seeds": 2, "distance": 1.25, "accuracy": 0.5}
    assert "| slow - fast | 2 | -0.12 | - | 1/0/1 | 1 | 1 |" in markdown(found)
    (axis,) = figure_of(study, RUNS).axes
    assert sum(line.get_marker() == "o" for line in axis.lines) == 4
