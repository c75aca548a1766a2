"""A study's signals are described and drawn from rows made by hand, and the rows go through the Parquet file."""

import numpy as np
import pytest
import study_figures
from matplotlib.figure import Figure
from pictures import coloured_share
from records import study_run
from study_figures import plot_finals, plot_metric
from study_outcome import outcome_of
from study_rows import read_table, write_table
from study_signals import change_step, filled, main, signal_row

from rljax.errors import ConfigError

STUDY = """
config: configs/quickstart.yaml
seeds: [0, 1]
arms: {constant: {schedule.kind: constant}, triggered: {}}
"""


def test_rows_come_back_as_they_were(tmp_path):
    runs = {("constant", 0): study_run(0.0), ("triggered", 1): study_run(0.75)}
    write_table(tmp_path / "rows.parquet", runs)
    found = read_table(tmp_path / "rows.parquet")
    assert list(found) == list(runs)
    for run, expected in runs.items():
        for row, line in zip(expected, found[run], strict=True):
            known = {key: value for key, value in row.items() if value is not None}
            stored = {key: each if isinstance(each, int) else float(np.float32(each)) for key, each in known.items()}
            assert {key: line[key] for key in stored} == stored
            assert line["mismatch/k3_kl"] is line["policy/entropy"] is None
    (tmp_path / "other.parquet").write_text("no table")
    with pytest.raises(ValueError, match=r"other.parquet cannot be read"):
        read_table(tmp_path / "other.parquet")


def test_a_signal_changes_when_it_stays_away_from_its_reference():
    """A trailing mean of ten steps must be above 1.5 times steps 20 to 59, which are all 1, for five steps."""
    assert filled([None, 2.0, None, float("inf"), 3.0, None]) == [None, 2.0, 2.0, 2.0, 3.0, 3.0]
    values = [1.0] * 100
    values[69] = 9.0  # after one such step the trailing mean is 1.8 for ten steps
    assert change_step(values, 20) == 70
    values[69] = 5.0  # the trailing mean is 1.4
    assert change_step(values, 20) is None
    assert change_step([1.0] * 69 + [0.0] * 31, 20) == 73  # the trailing mean is below 2 / 3 with the fourth 0
    assert change_step([1.0] * 96 + [9.0] * 4, 20) is None  # only four steps


def test_leads_misses_and_false_alarms():
    def run(last, grad_norm):
        found = study_run(last, grad_norm)
        return outcome_of(found), found

    early = run(0.0, lambda step: 1.0 if step < 70 else 3.0)
    silent = run(0.0, lambda step: 1.0 if step < 70 else None)
    healthy = run(0.75, lambda step: 1.0 if step < 70 else 3.0)
    # Accuracy falls by 0.075 a step from step 81. It is half of 0.75 at the fifth step and less at the sixth. The mean
    # of three 3s and seven 1s is 1.6.
    assert early[0].collapse_step == 86
    found = signal_row("optimizer/grad_norm", [early, silent, healthy])
    assert found == {"leads": [86 - 72], "lead_median": 14.0, "missed": 1, "false_alarms": 1, "healthy": 1}


def test_the_program_prints_the_signals(tmp_path, capsys):
    table = tmp_path / "rows.parquet"
    write_table(
        table, {("constant", 0): study_run(0.0), ("constant", 1): study_run(0.4), ("triggered", 0): study_run(0.75)}
    )
    for arms, line in {("--arms", "constant"): "| 1 | 0 of 1 |", (): "| 1 | 0 of 2 |"}.items():
        assert main([str(table), *arms]) == 0
        printed = capsys.readouterr().out
        assert f"| gradient norm | - |  {line}" in printed
        assert "effective sample size" not in printed  # no row has it
    with pytest.raises(ConfigError, match="no run of the arms fast"):
        main([str(table), "--arms", "constant", "fast"])


CLAIMS = """
claims:
  schedule: {title: "Does it help?", arms: [constant, triggered], metrics: [reward/mean, mismatch/log_ppl_abs_diff]}
"""
# The gradient norm of the first run rises before its fall.
RUNS = {
    ("constant", 0): study_run(0.0, lambda step: 1.0 if step < 70 else 3.0),
    ("constant", 1): study_run(0.4, steps=90),
    ("triggered", 0): study_run(0.75),
}


def test_lines_are_medians_and_dots_stand_beside_their_mean():
    """Accuracy is 0.75 up to step 80. Ten steps later the trailing means are 0.0 and 0.4."""
    axis, other_axis = Figure().subplots(1, 2)
    plot_metric(axis, RUNS, ["constant"], "reward/mean")
    thin, other, thick = axis.get_lines()
    assert (len(thin.get_ydata()), len(other.get_ydata()), len(thick.get_ydata())) == (100, 90, 90)
    assert thick.get_ydata()[[0, 79, 89]] == pytest.approx([0.75, 0.75, 0.2])
    assert thick.get_label() == "constant"
    plot_finals(other_axis, RUNS, ["constant", "triggered"])
    dots, mean = other_axis.get_lines()[:2]
    assert sorted(dots.get_xdata()) == pytest.approx([0.0, 0.4])
    assert list(mean.get_xdata()) == [pytest.approx(0.2)]
    assert [label.get_text() for label in other_axis.get_yticklabels()] == ["constant", "triggered"]


def test_the_program_writes_a_figure_for_each_claim(tmp_path, capsys):
    study, table = tmp_path / "small.yaml", tmp_path / "rows.parquet"
    study.write_text(STUDY + CLAIMS)
    write_table(table, RUNS)
    assert study_figures.main([str(study), str(table), "--out", str(tmp_path), "--signals", "constant"]) == 0
    paths = [tmp_path / f"study_small_{name}.png" for name in ("schedule", "signals")]
    assert capsys.readouterr().out.split() == [str(path) for path in paths]
    assert coloured_share(paths[0]) > 1e-3
    assert coloured_share(paths[1]) > 5e-5  # one dot
    with pytest.raises(ConfigError, match="no run of the arms fast"):
        study_figures.main([str(study), str(table), "--out", str(tmp_path), "--signals", "fast"])


def test_claims_that_do_not_fit_are_one_line(tmp_path):
    path, table = tmp_path / "bad.yaml", tmp_path / "rows.parquet"
    write_table(table, RUNS)
    for claims, message in {
        "{}": "names no claims",
        "{a: {title: A, arms: [constant]}}": "a claim has title, arms and metrics, and a has others",
        "{a: {title: A, arms: [fast], metrics: []}}": "name arms that are not there: fast",
        "{a: {title: A, arms: [a, b, c, d, e, f, g], metrics: []}}": "at most 6 arms, and a has more",
    }.items():
        path.write_text(STUDY + f"claims: {claims}\n")
        with pytest.raises(ConfigError, match=message):
            study_figures.main([str(path), str(table), "--out", str(tmp_path)])
