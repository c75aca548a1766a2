"""If sampling is cut, the trainer's scores of the support have the bits of the exact engine's scores."""

import jax
import numpy as np
import pytest
from tiny_step import CONFIG, keep_gradient

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.policy.model import init_params
from rljax.rollout.exact import ExactEngine
from rljax.rollout.types import SamplingParams
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.exact import ExactPass, ExactUpdate
from rljax.trainer.measure import DiagnosisConfig
from rljax.trainer.objective import Objective
from rljax.trainer.packing import TrainSequence, max_micro_batches, pack
from rljax.trainer.state import PrecisionConfig, create_state
from rljax.trainer.step import TrainStep
from rljax.trainer.update import UpdateOptions

pytestmark = pytest.mark.slow

ROWS, ROW_TOKENS, LIMIT, K, TEMPERATURE = 4, 12, 6, 4, 0.8
PROMPTS = [np.asarray(p, np.int32) for p in ([1, 2, 3], [4], [2, 2])]
N = 2
COUNT = N * len(PROMPTS)


def test_a_cut_run_has_no_mismatch_and_learns_what_is_left():
    tx, mesh, precision = keep_gradient(), make_mesh(MeshConfig(1, 1)), PrecisionConfig("float32")
    objective = Objective(LossConfig(), CorrectionConfig(), COUNT, LIMIT)
    where = {"precision": precision, "objective": objective}
    exact = ExactPass(CONFIG, mesh, **where, rows=ROWS, row_tokens=ROW_TOKENS, reported=K, cut=True)
    update = ExactUpdate(exact, CONFIG, tx, precision=precision, temperature=TEMPERATURE, diagnosis=DiagnosisConfig())

    def state():
        return create_state(init_params(CONFIG, 0), CONFIG, tx, mesh, dynamic_scale=False)

    engine, trained = ExactEngine(exact), state()
    engine.publish(trained.params, 0)
    sampling = SamplingParams(LIMIT, TEMPERATURE, (0,), top_p=0.9, top_k=K, reported=K)
    responses = sorted(
        engine.generate(PROMPTS, N, sampling, seed=0), key=lambda one: (one.prompt_index, one.sample_index)
    )
    sequences = [TrainSequence(one.ids, one.prompt_length, one.columns, (-1.0) ** i) for i, one in enumerate(responses)]
    assert any((s["top_ids"] < 0).any() for s in sequences)
    found = update(trained, update.pack(sequences), sequences, UpdateOptions(1e-2, 0, False))
    for sequence, trainer in zip(sequences, found.trainer().logprobs, strict=True):
        np.testing.assert_array_equal(trainer, sequence["rollout_logprobs"])
    assert found.row["mismatch/logprob_abs_diff_max"] == 0.0

    shape = (max_micro_batches(COUNT, ROW_TOKENS, 24, 2), 2, 24)
    options = {"batch_shape": shape, "temperature": TEMPERATURE, "diagnosis": None, "cut": True}
    step = TrainStep(CONFIG, tx, mesh, **where, **options)
    packed = pack(sequences, row_tokens=24, rows_per_micro_batch=2, micro_batches=shape[0])
    expected, row, _ = step(state(), packed, 1e-2, True)
    for name in ("policy/entropy", "policy/loss", "optimizer/grad_norm"):
        assert found.row[name] == pytest.approx(float(row[name]), rel=1e-4, abs=1e-6), name
    traces = (one.opt_state.inner_state.trace for one in (found.state, expected))
    for g, wanted in zip(*map(jax.tree.leaves, traces), strict=True):
        assert np.abs(g - wanted).max() <= 1e-5 * np.abs(wanted).max()
