"""Tests of the figures of a study's claims, from rows made by hand."""

import pytest
from matplotlib.figure import Figure
from pictures import coloured_share
from records import study_run
from study_figures import main, plot_finals, plot_metric
from study_rows import write_table

from rljax.errors import ConfigError

STUDY = """
config: configs/quickstart.yaml
seeds: [0, 1]
arms: {constant: {schedule.kind: constant}, triggered: {}}
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
    study.write_text(STUDY)
    write_table(table, RUNS)
    assert main([str(study), str(table), "--out", str(tmp_path), "--signals", "constant"]) == 0
    paths = [tmp_path / f"study_small_{name}.png" for name in ("schedule", "signals")]
    assert capsys.readouterr().out.split() == [str(path) for path in paths]
    assert coloured_share(paths[0]) > 1e-3
    assert coloured_share(paths[1]) > 5e-5  # one dot


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ("{}", "names no claims"),
        ("{a: {title: A, arms: [constant]}}", "a claim has title, arms and metrics, and a has others"),
        ("{a: {title: A, arms: [fast], metrics: []}}", "name arms that are not there: fast"),
        ("{a: {title: A, arms: [a, b, c, d, e, f, g], metrics: []}}", "at most 6 arms, and a has more"),
    ],
)
def test_claims_that_do_not_fit_are_one_line(claims, message, tmp_path):
    path, table = tmp_path / "bad.yaml", tmp_path / "rows.parquet"
    path.write_text(STUDY.partition("claims:")[0] + f"claims: {claims}\n")
    write_table(table, RUNS)
    with pytest.raises(ConfigError, match=message):
        main([str(path), str(table), "--out", str(tmp_path)])
