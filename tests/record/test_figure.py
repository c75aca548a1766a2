"""Tests of a run's figure: curves and their values, the marks of the schedule, and notes on missing keys."""

from pathlib import Path

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
from records import record_row, write_record

from rljax.record import figure as figures
from rljax.record.figure import REPORT, Run, plot_grid, plot_report, read_runs, short_names, svg_text

pytestmark = pytest.mark.filterwarnings("error")


def run_of(rows, label="a run", color="#123456"):
    return Run(label, rows, color, "-")


def rows_of(total=40, **options):
    return [record_row(step, **options) for step in range(1, total + 1)]


def report(*runs, smooth=0.9):
    return plot_grid(REPORT, runs, smooth)


def axis_named(figure, title):
    return next(axis for axis in figure.axes if axis.get_title(loc="left") == title)


def texts(part):
    return [text.get_text() for text in part.texts]


def legend(part):
    return [text.get_text() for text in part.get_texts()]


MISMATCH = "Training-inference mismatch"


SHOWN = {
    "Reward": "reward/mean",
    "Evaluation accuracy": "eval/aime24/accuracy",
    "Response length": "response_length/mean",
    "Learning rate": "schedule/learning_rate",
    "Gradient norm": "optimizer/grad_norm",
    "Policy entropy": "policy/entropy",
    MISMATCH: "mismatch/log_ppl_abs_diff",
}


def test_each_panel_shows_the_values_of_its_metric(tmp_path):
    shown = set(SHOWN.values())
    rows = [row | {key: row[key] * (1 + row["step"] / 100) for key in shown & row.keys()} for row in rows_of(12)]
    figure = report(run_of(rows))
    for title, key in SHOWN.items():
        line = axis_named(figure, title).lines[0]
        points = [(row["step"], row[key]) for row in rows if key in row]
        assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == points
    run = write_record(tmp_path / "run", rows)
    out = plot_report([run], tmp_path / "new" / "report.png")
    assert out == tmp_path / "new" / "report.png"
    color = matplotlib.colors.to_rgb(read_runs([run])[0].color)
    pixels = matplotlib.image.imread(out)[..., :3]
    assert (np.abs(pixels - color).max(axis=-1) < 0.01).sum() > 7 * 500  # seven panels with a curve of 500 pixels each


def test_gaps_zeros_and_floors_of_the_mismatch():
    """Curves leave gaps at values that are not finite, and on the log axis of the mismatch at zeros."""
    rows = rows_of()
    rows[4]["optimizer/grad_norm"] = None
    rows[8]["mismatch/log_ppl_abs_diff"] = 0.0
    for step, mesh in ((10, 2e-4), (20, 3e-4)):
        rows[step - 1] |= {"mismatch_self/log_ppl_abs_diff": 0.0, "mismatch_self/mesh/log_ppl_abs_diff": mesh}
    figure = report(run_of(rows))
    raw, smooth = (line.get_ydata() for line in axis_named(figure, "Gradient norm").lines)
    for values in (raw, smooth):
        assert np.isnan(values[4])
        np.testing.assert_allclose(np.delete(values, 4), 0.5)
    assert len(axis_named(report(run_of(rows), smooth=0.0), "Gradient norm").lines) == 1
    axis = axis_named(figure, MISMATCH)
    assert axis.get_yscale() == "log"
    assert np.isnan(axis.lines[0].get_ydata()[8])
    (line,) = [line for line in axis.lines if line.get_marker() == "s" and len(line.get_xdata())]
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([10, 20], [2e-4, 3e-4])
    assert legend(axis.get_legend()) == ["itself: shape (0)", "itself: mesh"]
    assert axis.get_ylim()[0] < 2e-4
    axis = axis_named(report(run_of(rows_of(factor=0.0))), MISMATCH)
    assert texts(axis) == ["mismatch/log_ppl_abs_diff is 0 at every step"]
    assert axis.get_legend() is None


def test_the_log_axis_shows_every_value_however_alike(tmp_path):
    for values in ([1e-18, 1e-18], [1e-3, 1e-3 * (1 + 2e-16)], [1e300, 1e300], [2e-3], [1e-5, 1e-1]):
        rows = [{"step": step, "mismatch/log_ppl_abs_diff": value} for step, value in enumerate(values, 1)]
        figure = plot_grid((("mismatch",),), [run_of(rows)], 0.9)
        figure.savefig(tmp_path / "x.png")
        low, high = axis_named(figure, MISMATCH).get_ylim()
        assert 0 < low < min(values) <= max(values) < high


def test_notes_and_marks_are_in_their_panels():
    """A key that is missing in one of several runs makes no note, and several datasets are told apart."""
    figure = report(run_of([{"step": 1}, {"step": 2}]))
    notes = [text for axis in figure.axes for text in texts(axis)]
    assert notes == [f"no {figures.PANELS[name].needs} in the record" for row in REPORT for name in row]
    assert len(notes) == 7
    rows = [row | {"eval/owner/toy/accuracy": 0.1} for row in rows_of()]
    figure = report(run_of(rows), run_of([{"step": 1, "policy/entropy": 0.5}], "other", "#abcdef"))
    assert legend(figure.legends[0]) == ["a run", "other"]
    assert texts(axis_named(figure, "Reward")) == []
    axis = axis_named(report(run_of(rows)), "Evaluation accuracy")
    assert legend(axis.get_legend()) == ["aime24", "owner/toy"]
    # The surge and the decay period are marked.
    for schedule, lines, said in (
        ({"surge": 8, "period": 14}, [8, 14, 28], ["surge at 8, period 14"]),
        ({"period": 15}, [15, 30], []),
        ({}, [], []),
    ):
        figure = report(run_of(rows_of(**schedule)))
        for title in ("Response length", "Learning rate"):
            found = {line.get_xdata()[0] for line in axis_named(figure, title).lines if len(line.get_xdata()) == 2}
            assert sorted(found) == lines
        assert texts(axis_named(figure, "Response length")) == said


def test_runs_are_told_apart_and_a_mean_looks_both_ways(tmp_path):
    places = [write_record(tmp_path / f"run{index}", rows_of(2)) for index in range(8)]
    assert len({(run.color, run.line) for run in read_runs(places)}) == 8  # there are fewer colors
    assert short_names([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
    assert short_names([Path("/a/x"), Path("/a/x")]) == ["x", "x"]
    with pytest.raises(ValueError, match="smooth must be"):
        plot_report(places, tmp_path / "x.png", smooth=float("nan"))
    with pytest.raises(ValueError, match="at least one run"):
        plot_report([], tmp_path / "x.png")
    got = figures.exponential_mean(np.asarray([0.0, 0.0, 1.0, 0.0, 0.0]), 0.5)
    np.testing.assert_allclose(got, got[::-1])
    assert (got[2], got[0]) == (1 / (1 + 2 * (0.5 + 0.25)), 0.25 / (1 + 0.5 + 0.25 + 0.125 + 0.0625))


def test_a_figure_for_a_page_takes_the_colours_of_the_page():
    run = run_of(rows_of(surge=20, period=36), label="a < b", color="#1f5fa8")
    text = svg_text(plot_grid((("length",),), [run], 0.0))
    assert text.startswith("<svg ")
    assert "://" not in text
    named = [f"var(--{name})" for name in ("ink", "quiet", "grid", "paper", "run")]
    assert all(words in text for words in ("a &lt; b", "surge at 20, period 36", *named))
    assert text == svg_text(plot_grid((("length",),), [run], 0.0))
