"""The exact engine samples trajectories of several turns, and the trainer scores them with the engine's bits."""

import numpy as np
import pytest
from tiny_step import CONFIG, MESH, UNCORRECTED, fresh_state, keep_gradient

from rljax.algorithms.losses import LossConfig
from rljax.rollout.engine import TurnQueue, TurnRequest
from rljax.rollout.exact import ExactEngine
from rljax.rollout.types import SamplingParams
from rljax.run.episodes import TokenRecorder
from rljax.trainer.exact import ExactPass, ExactUpdate
from rljax.trainer.measure import DiagnosisConfig
from rljax.trainer.objective import Objective
from rljax.trainer.packing import TrainSequence
from rljax.trainer.state import PrecisionConfig
from rljax.trainer.update import UpdateOptions

pytestmark = pytest.mark.slow

ROWS, ROW_TOKENS, COUNT = 4, 24, 6
PROMPTS = [np.asarray([1, 2, 3][: 1 + key % 3], np.int32) for key in range(COUNT)]
TURNS = [3, 1, 2, 1, 1, 3]  # turns of each trajectory: trajectories 1 and 5 share a row of the executable
ENVIRONMENT = np.asarray([20, 21], np.int32)
LIMITS = SamplingParams(6, 0.8, (0, 5))
PRECISION = PrecisionConfig("bfloat16")


def room(tokens):
    return min(6, ROW_TOKENS - len(tokens))


def converse(engine):
    """Returns the trajectories as sequences to train on, and the metrics of sampling them."""
    queue, recorders = TurnQueue(COUNT), [TokenRecorder(prompt) for prompt in PROMPTS]
    for key, prompt in enumerate(PROMPTS):
        queue.put(TurnRequest(key, 1, prompt, room(prompt)))
    samples = engine.answer(queue, LIMITS, seed=0)
    for response in samples:
        key, turn = response.prompt_index, response.sample_index + 1
        assert response.length <= room(recorders[key].tokens())
        recorders[key].add_turn(response)
        if turn == TURNS[key] or len(recorders[key].tokens()) + 2 >= ROW_TOKENS:
            queue.end(key)
            continue
        recorders[key].add_text(ENVIRONMENT)
        tokens = recorders[key].tokens()
        queue.put(TurnRequest(key, turn + 1, tokens, room(tokens)))
    rows = [recorder.response(key, 0, truncated=False) for key, recorder in enumerate(recorders)]
    sequences = [TrainSequence(r.ids, r.prompt_length, r.columns, (-1.0) ** key) for key, r in enumerate(rows)]
    return sequences, samples.metrics


def test_trajectories_of_several_turns_have_no_mismatch():
    objective, state = Objective(LossConfig(), UNCORRECTED, COUNT, ROW_TOKENS), fresh_state()
    exact = ExactPass(CONFIG, MESH, precision=PRECISION, objective=objective, rows=ROWS, row_tokens=ROW_TOKENS)
    how = {"precision": PRECISION, "temperature": 0.8, "diagnosis": DiagnosisConfig()}
    engine, update = ExactEngine(exact), ExactUpdate(exact, CONFIG, keep_gradient(), **how)
    engine.publish(state.params, 0)
    sequences, metrics = converse(engine)
    assert {int(sequence.turns.max()) for sequence in sequences} == {1, 2, 3}
    assert metrics["rollout/executable_runs"] >= 5  # two rows in the first round, and two more rounds
    found = update(state, update.pack(sequences), sequences, UpdateOptions(1e-2, 0, False))
    for sequence, trainer in zip(sequences, found.trainer().logprobs, strict=True):
        sampled = sequence.turns > 0
        np.testing.assert_array_equal(trainer[sampled], sequence["rollout_logprobs"][sampled])
    assert found.row["mismatch/logprob_abs_diff_max"] == 0.0
    assert found.row["optimizer/grad_norm"] > 0
    queue = TurnQueue(1)  # a turn that does not fit a row is refused
    queue.put(TurnRequest(0, 3, np.ones(20, np.int32), 5))
    said = "turn 3 of trajectory 0 would have 20 tokens before it and up to 5 of its own; rows have 24"
    with pytest.raises(ValueError, match=said):
        list(engine.answer(queue, LIMITS, seed=0))
