"""A whole run of cut sampling has a tiny mismatch, and dumps to compare."""

import numpy as np
import pytest
from toy_runs import comparable, completed, tiny

from rljax.compare.report import compare_columns
from rljax.record.rows import run_dumps
from rljax.record.token_dumps import read_dump

# rollout/test_tops.py, trainer/test_step_tops.py and trainer/test_dumped_values.py have the parts of such runs. They
# show that likeliest tokens which are only reported change nothing.
pytestmark = [pytest.mark.slow, pytest.mark.harness]

FLOAT32 = ("--rollout.dtype", "float32", "--precision.compute-dtype", "float32", "--rollout.dump-every", "1")
CUT = ("--rollout.top-k", "5", "--rollout.top-p", "0.9")


def test_a_run_of_cut_sampling_has_float32_s_mismatch(toy_base, tmp_path):
    completed(tiny(toy_base, tmp_path, 2, *FLOAT32, *CUT))
    rows, dumps = comparable(tmp_path), [read_dump(path) for path in run_dumps(tmp_path)]
    assert len(rows) == len(dumps) == 2
    for row in rows:
        assert row["mismatch/k3_kl"] < 1e-8
        assert row["mismatch/logprob_abs_diff_max"] < 1e-4
        assert 0 < row["policy/entropy"] < np.log(5)
    for row, dump in zip(rows, dumps, strict=True):
        pairs = zip(dump.values["entropy"], dump.response_mask, strict=True)
        mean = np.concatenate([values[mask] for values, mask in pairs]).mean(dtype=np.float64)
        assert row["policy/entropy"] == pytest.approx(mean, rel=1e-5)
        assert dump.sampling["top_k"] == 5
        assert any((ids[mask] < 0).any() for ids, mask in zip(dump.columns["top_ids"], dump.response_mask, strict=True))
        (pair,) = compare_columns(dump).pairs
        assert pair.verdict.status == "pass", pair.verdict
