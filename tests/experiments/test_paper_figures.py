"""The figures of the papers: their panels, the message for a missing metric, and the page's table."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import numpy as np
import pytest
from paper_figures import ALL_PANELS, FIGURES, main, plot_figure, sequence_ratios, slope_of_ratio
from records import record_row, small_dump, write_record
from toy_runs import printed, refused

from rljax.record.figure import Run, plot_grid, read_runs
from rljax.record.token_dumps import write_dump

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("error")


def write_run(directory, rows, *, dump=True):
    write_record(directory, rows)
    if dump:
        write_dump(directory / "rollouts" / "step_000004.parquet", small_dump())
    return directory


@pytest.fixture
def runs(tmp_path):
    """Returns a run that collapses at step 26, and a run whose rate is halved every 14 steps."""
    rewards = [0.5] * 20 + [0.0] * 20
    collapsed = [record_row(step) | {"reward/mean": reward} for step, reward in enumerate(rewards, 1)]
    scheduled = [record_row(step, 2.0, period=14) for step in range(1, 41)]
    return [write_run(tmp_path / "one", collapsed), write_run(tmp_path / "two", scheduled)]


@pytest.mark.parametrize("name", FIGURES)
def test_each_panel_has_the_curves_of_both_runs(name, runs):
    paper, read = FIGURES[name], read_runs(runs)
    figure = plot_figure(name, read, 0.9)
    panels = [panel for row in paper.panels for panel in row]
    assert len(figure.axes) == len(panels)
    for panel, axis in zip(panels, figure.axes, strict=True):
        colors = [line.get_color() for line in axis.lines if len(line.get_xdata()) > 2 or panel == "ratio_by_length"]
        assert {run.color for run in read} <= set(colors)
        needed = ALL_PANELS[panel].needs
        if "*" in needed:
            assert not axis.texts
        else:
            first = next(line.get_ydata()[0] for line in axis.lines if line.get_color() == read[1].color)
            assert first == read[1].rows[0][needed]


def test_the_dotted_lines_are_the_captions(runs):
    """Figures 1 and 3 mark the collapse, figures 7 and 8 the first decay of the rate, and others nothing."""
    found = {}
    for name in FIGURES:
        for axis in plot_figure(name, read_runs(runs), 0.9).axes:
            lines = [line for line in axis.lines if line.get_linestyle() == ":" and len(line.get_xdata()) == 2]
            found.setdefault(name, []).append([line.get_xdata()[0] for line in lines])
    marked = {name: lines for name, lines in found.items() if any(lines)}
    assert marked == {"1": [[26], [26]], "3": [[26]], "7": [[14]] * 5, "8": [[14]] * 5}


@pytest.mark.parametrize("name", FIGURES)
def test_what_a_run_lacks_is_named_with_the_run(name, runs, tmp_path):
    """One run lacks one of the figure's metrics at a time; the message must name this metric and no other."""
    for pattern in set(FIGURES[name].needs):
        rows = [{k: v for k, v in record_row(s).items() if not fnmatch.fnmatch(k, pattern)} for s in range(1, 6)]
        poor = write_run(tmp_path / f"poor{pattern.replace('/', '_')}", rows, dump="parquet" not in pattern)
        with pytest.raises(ValueError, match="needs") as caught:
            plot_figure(name, read_runs([*runs, poor]), 0.9)
        assert str(caught.value) == f"figure {name} needs {pattern}, which is not in {poor}"
    never = write_run(tmp_path / "never", [record_row(step) | {"mismatch/log_ppl_abs_diff": None} for step in (1, 2)])
    with pytest.raises(ValueError, match=r"figure 1 needs mismatch/log_ppl_abs_diff, which is not in .*never$"):
        plot_figure("1", read_runs([never]), 0.9)


def test_the_table_names_arms_of_the_page():
    page = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
    arms = set(re.findall(r"^\| `((?:qwen3|deepseek)_[^`]+)` \|", page, re.MULTILINE))
    assert {run for paper in FIGURES.values() for run in paper.runs} <= arms


def test_the_program_plots_into_the_current_directory(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert printed(main, ["9", *runs, "--labels", "a,b"]) == "figure_9.png\n"
    assert (tmp_path / "figure_9.png").exists()
    assert refused(main, ["14", *runs]).startswith("error: expected one of 1, 2, 3, 6, 7,")
    assert "expected 2 labels, one per run, got 1" in refused(main, ["9", *runs, "--labels", "a"])


def test_kl_by_position_has_a_thin_and_a_thick_line_per_run():
    """They are means over the tokens of the first two and the last two of 20 steps, up the response."""
    rows = [record_row(step, factor=float(step)) for step in range(1, 21)]
    rows[-1]["mismatch_position/lt_64/token_count"] = 192
    axis, none = (
        plot_grid([["kl_by_position"]], [Run("a run", read, "#123456", "-")], 0.9, panels=ALL_PANELS).axes[0]
        for read in (rows, [record_row(1, factor=0.0)])
    )
    thin, thick = axis.lines
    np.testing.assert_allclose(thin.get_ydata(), [1.5e-4, 3e-4, 12e-4])
    np.testing.assert_allclose(thick.get_ydata(), [1e-4 * (64 * 19 + 192 * 20) / 256, 2e-4 * 19.5, 8e-4 * 19.5])
    assert thick.get_linewidth() > thin.get_linewidth()
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["below 64", "64 to 256", "from 256"]
    assert [text.get_text() for text in none.texts] == ["no mismatch_position/*/k3_kl above 0 in the record"]


def test_ratios_of_responses_come_from_the_newest_dump(tmp_path):
    found, ratios = sequence_ratios(small_dump())
    assert found.tolist() == [1, 2]
    assert ratios.tolist() == [-0.25, -0.5]
    assert slope_of_ratio(found, ratios) == pytest.approx(-250.0)
    run = write_run(tmp_path / "run", [record_row(1)])
    (run / "rollouts" / "step_000001.parquet").write_bytes(b"rubbish")
    axis = plot_grid([["ratio_by_length"]], read_runs([run]), 0.9, panels=ALL_PANELS).axes[0]
    assert axis.collections[0].get_offsets().tolist() == [[1, -0.25], [2, -0.5]]
    assert axis.get_legend().get_texts()[0].get_text() == "run: -250 per 1000 tokens"
