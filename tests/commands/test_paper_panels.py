"""The panels that only the papers have: k3_kl by position, and log-ratios of whole responses by length."""

import numpy as np
import pytest
from records import record_row, small_dump, write_record

from rljax.commands.plot import ALL_PANELS, bucket_means, sequence_ratios, slope_of_ratio
from rljax.record.figure import Run, plot_grid, read_runs
from rljax.record.token_dumps import write_dump

pytestmark = pytest.mark.filterwarnings("error")


def run_of(rows):
    return Run("a run", rows, "#123456", "-")


def test_buckets_go_up_the_response_and_are_means_over_tokens():
    rows = [record_row(step, factor=float(step)) for step in range(1, 21)]
    rows[-1]["mismatch_position/lt_64/token_count"] = 192
    first, last = bucket_means(rows, last=False), bucket_means(rows, last=True)
    assert [name for _, _, name in sorted(last)] == ["below 64", "64 to 256", "from 256"]
    assert first[(64.0, False, "below 64")] == pytest.approx(1e-4 * (1 + 2) / 2)
    assert last[(64.0, False, "below 64")] == pytest.approx(1e-4 * (64 * 19 + 192 * 20) / 256)


def test_kl_by_position_has_a_thin_and_a_thick_line_per_run():
    rows = [record_row(step, factor=float(step)) for step in (1, 2, 3)]
    axis = plot_grid([["kl_by_position"]], [run_of(rows)], 0.9, panels=ALL_PANELS).axes[0]
    thin, thick = axis.lines
    np.testing.assert_allclose(thin.get_ydata(), [1e-4, 2e-4, 8e-4])
    np.testing.assert_allclose(thick.get_ydata(), [3e-4, 6e-4, 24e-4])
    assert thick.get_linewidth() > thin.get_linewidth()
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["below 64", "64 to 256", "from 256"]


def test_buckets_that_agree_exactly_are_said():
    axis = plot_grid([["kl_by_position"]], [run_of([record_row(1, factor=0.0)])], 0.9, panels=ALL_PANELS).axes[0]
    assert [text.get_text() for text in axis.texts] == ["no mismatch_position/*/k3_kl above 0 in the record"]


def test_ratios_of_responses_come_from_the_newest_dump(tmp_path):
    found, ratios = sequence_ratios(small_dump())
    assert found.tolist() == [1, 2]
    assert ratios.tolist() == [-0.25, -0.5]
    assert slope_of_ratio(found, ratios) == pytest.approx(-250.0)
    run = write_record(tmp_path / "run", [record_row(1)])
    write_dump(run / "rollouts" / "step_000004.parquet", small_dump())
    (run / "rollouts" / "step_000001.parquet").write_bytes(b"rubbish")
    axis = plot_grid([["ratio_by_length"]], read_runs([run]), 0.9, panels=ALL_PANELS).axes[0]
    assert axis.collections[0].get_offsets().tolist() == [[1, -0.25], [2, -0.5]]
    assert axis.get_legend().get_texts()[0].get_text() == "run: -250 per 1000 tokens"
