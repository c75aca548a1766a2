"""``experiments/tpu_mismatch.py`` scores as the trainer does, and rounds only what it says."""

import numpy as np
import pytest
from toy_runs import TOY_BASE
from tpu_mismatch import scorer

from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.policy.score import make_scorer


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_each_program_rounds_what_it_says(dtype):
    config = read_config(TOY_BASE)
    params, ids = load_params(TOY_BASE, config), np.random.default_rng(0).integers(0, 14, 50).astype(np.int32)

    def gap(**how):
        score = scorer(params, config, dtype, **{"rounds_logits": False, "in_one_pass": False, **how})
        return np.abs(score(ids) - make_scorer(config, dtype)(params, [ids])[0][1:]).mean()

    assert gap() == 0
    if dtype == "bfloat16":  # its operands are rounded already, and logits of size 8 by up to 2**-6
        assert gap(in_one_pass=True) == 0
        assert 1e-3 < gap(rounds_logits=True) < 2**-6
    else:
        assert gap(rounds_logits=True) == 0
        assert 1e-3 < gap(in_one_pass=True) < 3e-2
