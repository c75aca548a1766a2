"""The host's part of a checkpoint, and its sums from row to row."""

import itertools
import json
import math

import pytest

from rljax.run.step import Progress


def step_row(tokens=1, sequences=1, summed=0.0, norm=1.0):
    return {
        "optimizer/grad_norm": norm,
        "mismatch/token_count": tokens,
        "mismatch/sequence_count": sequences,
        "mismatch/log_ppl_abs_diff_sum": summed,
    }


def test_a_rise_is_split_against_the_first_steps():
    """The reference has 50 sequences, 500 tokens and a summed gap of 0.4 a sequence. That is 10 tokens of 0.04 each."""
    progress = Progress()
    for row in 5 * (step_row(60, 4, 0.5), step_row(40, 6, 2.0 / 6)):
        assert progress.observe(row, has_loss=False) == {"optimizer/grad_norm_ema": None}
    assert progress.reference == {"steps": 10, "token_count": 500, "sequence_count": 50, "gap": pytest.approx(20.0)}
    # Thirty tokens of 0.05 each give 1.5. Length alone would give 1.2.
    split = progress.observe(step_row(300, 10, 1.5), has_loss=False)
    assert split == {
        "optimizer/grad_norm_ema": None,
        "mismatch/sum_rise": pytest.approx(1.1),
        "mismatch/sum_length_explained": pytest.approx(0.8),
        "mismatch/sum_per_token": pytest.approx(0.3),
    }


def test_the_mean_gradient_norm_leaves_out_what_is_not_finite():
    progress = Progress()
    for norm in (2.0, math.nan, 4.0, math.inf):
        progress.observe(step_row(norm=norm), has_loss=True)
    progress.observe(step_row(norm=7.0), has_loss=False)
    assert progress.grad_norm_ema == pytest.approx(0.9 * 2.0 + 0.1 * 4.0)


def counted(progress, totals, updates, start=(0, 0)):
    """Returns ``not_finite`` after each row of (updates skipped so far, updates not finite so far)."""
    names = ("optimizer/skipped_updates", "precision/overflows")
    rows = [{"step": step} | dict(zip(names, total, strict=True)) for step, total in enumerate([start, *totals])]
    seen = []
    for last_row, row in itertools.pairwise(rows):
        progress.count_skipped(row, last_row, updates)
        seen.append(progress.not_finite)
    return seen


def test_updates_without_signal_do_not_count_as_skipped():
    """The updates are: not finite, no signal, not finite, applied, no signal, not finite."""
    progress = Progress()
    assert counted(progress, [(1, 1), (2, 1), (3, 2), (3, 2), (4, 2), (5, 3)], 1) == [1, 1, 2, 0, 0, 1]
    assert progress.not_finite_since == 6


def test_an_applied_update_ends_a_row_of_skipped_ones():
    """A step has four updates: all are not finite, then three and one applied, then one and three without signal."""
    progress = Progress()
    assert counted(progress, [(104, 24), (107, 27), (111, 28)], 4, start=(100, 20)) == [4, 0, 1]
    resumed = Progress.from_state_dict(json.loads(json.dumps(progress.state_dict())))
    assert resumed == progress
    assert counted(resumed, [(115, 32), (119, 36)], 4, start=(111, 28)) == [5, 9]
    assert resumed.not_finite_since == 3


def test_the_first_step_counts_from_zero():
    progress = Progress()
    progress.count_skipped({"step": 1, "optimizer/skipped_updates": 2, "precision/overflows": 1}, {}, 2)
    assert (progress.not_finite, progress.not_finite_since) == (1, 1)
