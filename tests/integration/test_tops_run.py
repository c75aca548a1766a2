"""Whole runs with likeliest tokens and cut sampling have the same tokens, a tiny mismatch, and dumps to compare."""

import numpy as np
import pytest
from toy_runs import comparable, completed, tiny

from rljax.compare.report import compare_columns
from rljax.record.token_dumps import read_dump

# rollout/test_tops.py, trainer/test_exact_engine.py and trainer/test_dumped_values.py have the parts of these runs.
pytestmark = [pytest.mark.slow, pytest.mark.harness]

FLOAT32 = ("--rollout.dtype", "float32", "--precision.compute-dtype", "float32", "--rollout.dump-every", "1")
CUT = ("--rollout.top-k", "5", "--rollout.top-p", "0.9")


def run(base, run_dir, *options, steps=2):
    completed(tiny(base, run_dir, steps, *FLOAT32, *options))
    return comparable(run_dir), [read_dump(path) for path in sorted((run_dir / "rollouts").glob("*.parquet"))]


def assert_reported(dump, k):
    """Checks that each sampled token among the likeliest ones has its log-probability there. Returns their number."""
    found = 0
    columns = map(dump.columns.get, ("top_ids", "top_logprobs", "logprobs/rollout"))
    for ids, logprobs, values, tokens, mask in zip(*columns, dump.token_ids, dump.response_mask, strict=True):
        assert ids.shape == logprobs.shape == (len(tokens), k)
        assert (ids[~mask] == -1).all()
        hit = (ids == tokens[:, None]) & mask[:, None]
        np.testing.assert_allclose(logprobs[hit], values[hit.any(axis=1)], atol=1e-6)
        found += int(hit.sum())
    assert found > 0
    return found


def assert_entropies(rows, dumps):
    """Checks that each row's entropy is the mean of its dump's entropies."""
    assert len(rows) == len(dumps) == 2
    for row, dump in zip(rows, dumps, strict=True):
        pairs = zip(dump.values["entropy"], dump.response_mask, strict=True)
        mean = np.concatenate([values[mask] for values, mask in pairs]).mean(dtype=np.float64)
        assert row["policy/entropy"] == pytest.approx(mean, rel=1e-5)


def test_a_run_that_reports_tops_trains_on_the_same_tokens(toy_base, tmp_path):
    plain, dumps = run(toy_base, tmp_path / "plain")
    told, with_tops = run(toy_base, tmp_path / "told", "--rollout.top-logprobs", "4")
    assert [set(row) for row in told] == [set(row) for row in plain]
    for row, other in zip(told, plain, strict=True):
        for name in ("reward/mean", "response_length/mean", "mismatch/token_count"):
            assert row[name] == other[name]
        assert row["policy/entropy"] == pytest.approx(other["policy/entropy"], abs=1e-5)
    assert_entropies(plain, dumps)
    for dump, other in zip(with_tops, dumps, strict=True):
        assert "top_ids" not in other.columns
        assert list(dump.of_kind("top_ids")) == [""]  # the loss needs none of the trainer
        assert_reported(dump, 4)
        for a, b in zip(dump.token_ids, other.token_ids, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_run_of_cut_sampling_has_float32_s_mismatch(toy_base, tmp_path):
    rows, dumps = run(toy_base, tmp_path / "run", *CUT)
    for row in rows:
        assert row["mismatch/k3_kl"] < 1e-8
        assert row["mismatch/logprob_abs_diff_max"] < 1e-4
        assert 0 < row["policy/entropy"] < np.log(5)
    assert_entropies(rows, dumps)

    for dump in dumps:
        assert dump.sampling["top_k"] == 5
        assert assert_reported(dump, 5) == sum(mask.sum() for mask in dump.response_mask)
        assert any((ids[mask] < 0).any() for ids, mask in zip(dump.columns["top_ids"], dump.response_mask, strict=True))
        (pair,) = compare_columns(dump).pairs
        assert pair.verdict.status == "pass", pair.verdict
