"""The figure of a run: what it draws, what it says about what is missing, and the program's one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rljax.report.figure import REPORT, draw_report
from rljax.report.panels import Run, draw_grid, exponential_mean, short_names

pytestmark = pytest.mark.filterwarnings("error")

TOOL = Path(__file__).parents[2] / "tools" / "plot_run.py"


def rows(total=40, surge=None, period=None):
    made = []
    for step in range(1, total + 1):
        row = {
            "step": step,
            "reward/mean": step / total,
            "response_length/mean": 7.0 + step,
            "schedule/learning_rate": 1e-4,
            "schedule/surge_step": surge if surge and step >= surge else None,
            "schedule/decay_period": period if period and step >= (surge or 1) else None,
            "optimizer/grad_norm": None if step == 5 else 0.5,
            "policy/entropy": 0.5,
            "mismatch/log_ppl_abs_diff": 0.0 if step == 9 else 2e-3,
        }
        made.append(row | ({"eval/toy/accuracy": 0.5} if step % 10 == 0 else {}))
    return made


def write_run(directory: Path, made) -> Path:
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return directory


def run_of(made, color="#123456"):
    return Run("a run", made, color, "-")


def draw(runs, smooth):
    return draw_grid(REPORT, runs, smooth)


def axis_named(figure, title):
    return next(axis for axis in figure.axes if axis.get_title(loc="left") == title)


def texts(axis):
    return [text.get_text() for text in axis.texts]


def vertical_lines(axis):
    return sorted({line.get_xdata()[0] for line in axis.lines if len(line.get_xdata()) == 2})


def test_one_run_is_written_as_a_png(tmp_path):
    out = draw_report([write_run(tmp_path / "run", rows())], tmp_path / "new" / "report.png")
    assert out == tmp_path / "new" / "report.png"
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_surge_and_the_decay_period_are_marked():
    figure = draw([run_of(rows(40, surge=8, period=14))], 0.9)
    assert vertical_lines(axis_named(figure, "Response length")) == [8, 14, 28]
    assert vertical_lines(axis_named(figure, "Learning rate")) == [8, 14, 28]
    assert texts(axis_named(figure, "Response length")) == ["surge at 8, period 14"]


def test_a_fixed_period_without_a_surge_is_marked_alone():
    axis = axis_named(draw([run_of(rows(40, period=15))], 0.9), "Response length")
    assert vertical_lines(axis) == [15, 30]
    assert texts(axis) == []


def test_a_run_without_schedule_has_no_marks():
    assert vertical_lines(axis_named(draw([run_of(rows())], 0.9), "Response length")) == []


def test_raw_and_smoothed_curves_leave_gaps_where_a_value_was_not_finite():
    axis = axis_named(draw([run_of(rows())], 0.9), "Gradient norm")
    raw, smooth = (line.get_ydata() for line in axis.lines)
    for values in (raw, smooth):
        assert np.isnan(values[4])
        np.testing.assert_allclose(np.delete(values, 4), 0.5)
    assert len(axis_named(draw([run_of(rows())], 0.0), "Gradient norm").lines) == 1


def test_the_mismatch_is_drawn_on_a_log_axis_without_its_zeros():
    axis = axis_named(draw([run_of(rows())], 0.9), "Training-inference mismatch")
    assert axis.get_yscale() == "log"
    assert np.isnan(axis.lines[0].get_ydata()[8])


@pytest.mark.parametrize("values", [[1e-18, 1e-18], [1e-3, 1e-3 * (1 + 2e-16)], [1e300, 1e300], [2e-3], [1e-5, 1e-1]])
def test_the_log_axis_holds_every_value_however_alike(values, tmp_path):
    made = [{"step": step, "mismatch/log_ppl_abs_diff": value} for step, value in enumerate(values, 1)]
    draw_report([write_run(tmp_path / "run", made)], tmp_path / "x.png")
    low, high = axis_named(draw([run_of(made)], 0.9), "Training-inference mismatch").get_ylim()
    assert 0 < low < min(values)
    assert max(values) < high


def test_a_mismatch_of_zero_is_said():
    made = [row | {"mismatch/log_ppl_abs_diff": 0.0} for row in rows()]
    axis = axis_named(draw([run_of(made)], 0.9), "Training-inference mismatch")
    assert texts(axis) == ["mismatch/log_ppl_abs_diff is 0 at every step"]


def test_missing_keys_leave_a_note_in_their_panel():
    figure = draw([run_of([{"step": 1}, {"step": 2}])], 0.9)
    notes = [text for axis in figure.axes for text in texts(axis)]
    assert len(figure.axes) == 7
    assert notes == [
        f"no {key} in the record"
        for key in (
            "reward/mean",
            "eval/*/accuracy",
            "response_length/mean",
            "schedule/learning_rate",
            "optimizer/grad_norm",
            "policy/entropy",
            "mismatch/log_ppl_abs_diff",
        )
    ]


def test_several_runs_have_a_legend_and_a_missing_key_in_one_is_no_note():
    short = [{"step": 1, "policy/entropy": 0.5}]
    figure = draw([run_of(rows()), Run("other", short, "#abcdef", "-")], 0.9)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a run", "other"]
    assert texts(axis_named(figure, "Reward")) == []


def test_more_runs_than_colours_differ_in_line(tmp_path):
    runs = [write_run(tmp_path / f"run{index}", rows(12, surge=4, period=7)) for index in range(8)]
    assert draw_report(runs, tmp_path / "all.png").stat().st_size > 10_000


def test_several_datasets_are_told_apart():
    made = [row | {"eval/aime/accuracy": 0.1} for row in rows()]
    axis = axis_named(draw([run_of(made)], 0.9), "Evaluation accuracy")
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["aime", "toy"]


def test_the_mean_looks_both_ways_and_keeps_a_line_a_line():
    values = np.asarray([0.0, 0.0, 1.0, 0.0, 0.0])
    got = exponential_mean(values, 0.5)
    np.testing.assert_allclose(got, got[::-1])
    assert got[2] == 1 / (1 + 2 * (0.5 + 0.25))
    assert got[0] == 0.25 / (1 + 0.5 + 0.25 + 0.125 + 0.0625)


def test_names_are_as_long_as_it_takes_to_tell_runs_apart():
    assert short_names([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    assert short_names([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
    assert short_names([Path("/a/x"), Path("/a/x")]) == ["x", "x"]


def test_arguments_out_of_range(tmp_path):
    run = write_run(tmp_path / "run", rows())
    for wrong in ({"smooth": 1.0}, {"smooth": float("nan")}, {"labels": ["a", "b"]}):
        with pytest.raises(ValueError, match=r"smooth must be|expected 1 labels"):
            draw_report([run], tmp_path / "x.png", **wrong)
    with pytest.raises(ValueError, match="at least one run"):
        draw_report([], tmp_path / "x.png")


def plot(*arguments, cwd):
    return subprocess.run(
        [sys.executable, str(TOOL), *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def test_the_program_draws_into_the_run_or_here(tmp_path):
    one, two = (write_run(tmp_path / name, rows()) for name in ("one", "two"))
    done = plot(one, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{one / 'report.png'}\n"), done.stderr
    assert (one / "report.png").exists()
    done = plot(one, two, "--smooth", "0.5", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "report.png\n"), done.stderr
    assert (tmp_path / "report.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere/metrics.jsonl: No such file or directory"),
        (["empty"], "empty/metrics.jsonl: no rows to draw"),
        (["damaged"], "damaged/metrics.jsonl:1: not a row"),
        ([], "the following arguments are required: RUN"),
        (["run", "--smooth", "2"], "smooth must be in the range [0, 1), got 2.0"),
        (["run", "--smooth", "x"], "argument --smooth: invalid float value: 'x'"),
        (["run", "--out", "run/metrics.jsonl/x.png"], "run/metrics.jsonl"),
    ],
)
def test_the_programs_mistakes_take_one_line(tmp_path, arguments, message, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(TOOL.parent))
    from plot_run import main

    from rljax.errors import run_cli

    write_run(tmp_path / "run", rows())
    write_run(tmp_path / "empty", [])
    (write_run(tmp_path / "damaged", []) / "metrics.jsonl").write_text("rubbish\n{}\n")
    monkeypatch.chdir(tmp_path)
    assert run_cli(main, arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
