"""The papers' figures: each draws from a small record, and says in one line what a run lacks."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rljax.compare.dump import ColumnSource, make_dump, write_dump
from rljax.report.lengths import bucket_means, kl_by_position, ratio_by_length, sequence_ratios, slope_of_ratio
from rljax.report.panels import draw_grid, read_runs
from rljax.report.paper_figures import FIGURES, PANELS, draw_paper_figure, figures_table

pytestmark = pytest.mark.filterwarnings("error")

TOOL = Path(__file__).parents[2] / "tools" / "plot_run.py"
CONFIGS = TOOL.parents[1] / "configs" / "paper"
BUCKETS = {"lt_64": (64, 1e-4), "64_to_256": (192, 2e-4), "ge_256": (100, 8e-4)}


def row(step, factor=1.0):
    made = {
        "step": step,
        "reward/mean": 0.1 * step,
        "response_length/mean": 100.0 + step,
        "schedule/learning_rate": 1e-6,
        "schedule/surge_step": 2 if step >= 2 else None,
        "schedule/decay_period": 4 if step >= 2 else None,
        "optimizer/grad_norm": 0.3,
        "optimizer/grad_noise": 0.01,
        "policy/entropy": 0.5,
        "mismatch/log_ppl_abs_diff": 1e-3 * factor,
        "mismatch/k3_kl": 1e-4 * factor,
    }
    for name, (tokens, kl) in BUCKETS.items():
        prefix = f"mismatch_position/{name}/"
        made |= {prefix + "token_count": tokens, prefix + "k3_kl": kl * factor, prefix + "kl": -kl}
    return made | ({"eval/aime24/accuracy": 0.2} if step % 2 == 0 else {})


def write_run(directory, rows, *, dump=True):
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    if dump:
        write_dump(directory / "rollouts" / "step_000004.parquet", token_dump())
    return directory


def token_dump():
    """Responses of 1 and 2 tokens whose log-ratios are -0.25, and 0.5 - 1.0; the third token has no number."""
    rollout = [[None, -1.0], [None, -1.0, -1.0, None]]
    trainer = [[None, -1.25], [None, -0.5, -2.0, -1.0]]
    source = ColumnSource("jax", "float32", "", 1.0)
    return make_dump(
        ["a", "b"],
        [[5, 6], [5, 6, 7, 8]],
        [[False, True], [False, True, True, True]],
        {"rollout": rollout, "trainer": trainer},
        {"rollout": source, "trainer": source},
        {},
    )


@pytest.fixture
def runs(tmp_path):
    return [write_run(tmp_path / name, [row(step) for step in range(1, 6)]) for name in ("one", "two")]


@pytest.mark.parametrize("name", FIGURES)
def test_each_figure_draws_from_a_small_record(name, runs, tmp_path):
    out = draw_paper_figure(name, runs, tmp_path / "figure.png", labels=["constant", "length-triggered"])
    assert out.read_bytes().startswith(b"\x89PNG")


def test_there_are_the_thirteen_figures_and_the_two_by_length():
    assert list(FIGURES) == [*map(str, range(1, 14)), "kl-by-length", "ratio-by-length"]
    assert {panel for figure in FIGURES.values() for panel in figure.names} <= set(PANELS)


@pytest.mark.parametrize("name", FIGURES)
def test_what_a_run_lacks_is_named_with_the_run(name, runs, tmp_path):
    """One run loses one of the figure's metrics at a time; the message names that and no other."""
    for pattern in {PANELS[panel][1] for panel in FIGURES[name].names}:
        rows = [{key: value for key, value in row(s).items() if not fnmatch.fnmatch(key, pattern)} for s in range(1, 6)]
        poor = write_run(tmp_path / f"poor{pattern.replace('/', '_')}", rows, dump="parquet" not in pattern)
        with pytest.raises(ValueError, match="needs") as caught:
            draw_paper_figure(name, [*runs, poor], tmp_path / "x.png")
        assert str(caught.value) == f"figure {name} needs {pattern}, which is not in {poor}"


def test_a_metric_that_is_never_a_number_is_lacking(tmp_path):
    run = write_run(tmp_path / "run", [row(step) | {"mismatch/log_ppl_abs_diff": None} for step in (1, 2)])
    with pytest.raises(ValueError, match=r"figure 1 needs mismatch/log_ppl_abs_diff, which is not in .*run$"):
        draw_paper_figure("1", [run], tmp_path / "x.png")


def test_an_unknown_figure_is_refused(runs, tmp_path):
    with pytest.raises(ValueError, match="no figure '14'; there are 1, 2"):
        draw_paper_figure("14", runs, tmp_path / "x.png")


def test_buckets_go_up_the_response_and_are_means_over_tokens():
    rows = [row(step, factor=float(step)) for step in range(1, 21)]
    rows[-1]["mismatch_position/lt_64/token_count"] = 192
    first, last = bucket_means(rows, last=False), bucket_means(rows, last=True)
    assert [name for _, _, name in sorted(last)] == ["below 64", "64 to 256", "from 256"]
    assert first[(64.0, False, "below 64")] == pytest.approx(1e-4 * (1 + 2) / 2)
    assert last[(64.0, False, "below 64")] == pytest.approx(1e-4 * (64 * 19 + 192 * 20) / 256)


def test_kl_by_position_has_a_thin_and_a_thick_line_per_run(tmp_path):
    rows = [row(step, factor=float(step)) for step in (1, 2, 3)]
    figure = draw_grid([[kl_by_position]], read_runs([write_run(tmp_path / "run", rows)]), 0.9)
    thin, thick = figure.axes[0].lines
    np.testing.assert_allclose(thin.get_ydata(), [1e-4, 2e-4, 8e-4])
    np.testing.assert_allclose(thick.get_ydata(), [3e-4, 6e-4, 24e-4])
    assert thick.get_linewidth() > thin.get_linewidth()
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["below 64", "64 to 256", "from 256"]


def test_buckets_that_agree_exactly_are_said(tmp_path):
    run = write_run(tmp_path / "run", [row(1, factor=0.0)])
    axis = draw_grid([[kl_by_position]], read_runs([run]), 0.9).axes[0]
    assert [text.get_text() for text in axis.texts] == ["no mismatch_position/*/k3_kl above 0 in the record"]


def test_ratios_of_whole_responses_leave_out_what_is_no_number(tmp_path):
    found, ratios = sequence_ratios(token_dump())
    assert found.tolist() == [1, 2]
    assert ratios.tolist() == [-0.25, -0.5]
    assert slope_of_ratio(found, ratios) == pytest.approx(-250.0)
    axis = draw_grid([[ratio_by_length]], read_runs([write_run(tmp_path / "run", [row(1)])]), 0.9).axes[0]
    assert axis.collections[0].get_offsets().tolist() == [[1, -0.25], [2, -0.5]]
    assert axis.get_legend().get_texts()[0].get_text() == "run: -250 per 1000 tokens"


def test_the_newest_dump_is_the_one_drawn(tmp_path):
    run = write_run(tmp_path / "run", [row(1)])
    (run / "rollouts" / "step_000001.parquet").write_bytes(b"rubbish")
    assert draw_grid([[ratio_by_length]], read_runs([run]), 0.9).axes[0].collections


def test_the_table_names_runs_metrics_and_what_is_known():
    table = figures_table()
    for name, figure in FIGURES.items():
        assert f"{name}: {figure.title}" in table
        assert all((CONFIGS / f"{run}.yaml").is_file() for run in figure.runs), name
    assert table.count("as far as known") == sum(not figure.known for figure in FIGURES.values())
    assert max(map(len, table.splitlines())) <= 100


def plot(*arguments, cwd):
    return subprocess.run(
        [sys.executable, str(TOOL), *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def test_the_program_draws_a_figure_and_lists_them(runs, tmp_path):
    done = plot(*runs, "--figure", "9", "--labels", "a,b", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "figure_9.png\n"), done.stderr
    done = plot("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert figures_table() in done.stdout


def test_the_programs_mistakes_take_one_line(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(TOOL.parent))
    from plot_run import main

    from rljax.errors import run_cli

    poor = write_run(tmp_path / "poor", [{"step": 1}])
    for arguments, message in (
        ((*runs, poor, "--figure", "1"), "figure 1 needs mismatch/log_ppl_abs_diff, which is not in"),
        ((*runs, "--figure", "14"), "argument --figure: invalid choice: '14'"),
        ((*runs, "--labels", "a"), "expected 2 labels, one per run, got 1"),
    ):
        assert run_cli(main, [str(argument) for argument in arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {message}")
        assert error.count("\n") == 1
