"""The exact engine samples trajectories of several turns, and the trainer scores them with the engine's bits."""

import functools

import numpy as np
import pytest
from records import train_sequence
from small_engines import assert_same_bits
from tiny_step import CONFIG, MESH, UNCORRECTED, fresh_state, keep_gradient

from rljax.algorithms.losses import LossConfig
from rljax.rollout.engine import TurnQueue, TurnRequest
from rljax.rollout.exact import ExactEngine
from rljax.rollout.types import SamplingParams
from rljax.trainer.exact import ExactPass, ExactUpdate
from rljax.trainer.measure import DiagnosisConfig
from rljax.trainer.objective import Objective
from rljax.trainer.state import PrecisionConfig
from rljax.trainer.update import UpdateOptions

pytestmark = pytest.mark.slow

ROWS, ROW_TOKENS, COUNT = 4, 24, 6
PROMPTS = [np.asarray([1, 2, 3][: 1 + key % 3], np.int32) for key in range(COUNT)]
TURNS = [3, 1, 2, 1, 1, 3]  # turns of each trajectory: trajectories 1 and 5 share a row of the executable
ENVIRONMENT = np.asarray([20, 21], np.int32)
LIMITS = SamplingParams(6, 0.8, (0, 5))
PRECISION = PrecisionConfig("bfloat16")


@functools.cache
def executable():
    objective = Objective(LossConfig(), UNCORRECTED, COUNT, ROW_TOKENS)
    return ExactPass(CONFIG, MESH, precision=PRECISION, objective=objective, rows=ROWS, row_tokens=ROW_TOKENS)


def make():
    tx, exact = keep_gradient(), executable()
    update = ExactUpdate(exact, CONFIG, tx, precision=PRECISION, temperature=0.8, diagnosis=DiagnosisConfig())
    engine, state = ExactEngine(exact), fresh_state()
    engine.publish(state.params, 0)
    return engine, update, state


def room(tokens):
    return min(6, ROW_TOKENS - len(tokens))


def converse(engine, seed):
    """Returns the trajectories as sequences to train on, and the metrics of sampling them."""
    queue, empty = TurnQueue(COUNT), np.zeros(0)
    tokens, logprobs, turns = list(PROMPTS), [empty] * COUNT, [empty] * COUNT
    for key, prompt in enumerate(PROMPTS):
        queue.put(TurnRequest(key, 1, prompt, room(prompt)))
    samples = engine.answer(queue, LIMITS, seed=seed)
    for response in samples:
        key, turn = response.prompt_index, response.sample_index + 1
        assert response.length <= room(tokens[key])
        tokens[key] = np.concatenate([tokens[key], response.response])
        logprobs[key] = np.concatenate([logprobs[key], response["rollout_logprobs"]])
        turns[key] = np.concatenate([turns[key], np.full(response.length, turn)])
        if turn == TURNS[key] or len(tokens[key]) + 2 >= ROW_TOKENS:
            queue.end(key)
            continue
        tokens[key] = np.concatenate([tokens[key], ENVIRONMENT])
        logprobs[key], turns[key] = np.append(logprobs[key], [0.0, 0.0]), np.append(turns[key], [0, 0])
        queue.put(TurnRequest(key, turn + 1, tokens[key], room(tokens[key])))
    sequences = [
        train_sequence(
            prompt,
            tokens[key][len(prompt) :].astype(np.int32),
            logprobs[key].astype(np.float32),
            (-1.0) ** key,
            turn=turns[key],
        )
        for key, prompt in enumerate(PROMPTS)
    ]
    return sequences, samples.metrics


def test_trajectories_of_several_turns_have_no_mismatch():
    engine, update, state = make()
    sequences, metrics = converse(engine, 0)
    assert {int(sequence.turns.max()) for sequence in sequences} == {1, 2, 3}
    assert metrics["rollout/executable_runs"] >= 5  # two rows in the first round, and two more rounds
    found = update(state, update.pack(sequences), sequences, UpdateOptions(1e-2, 0, False))
    for sequence, trainer in zip(sequences, found.trainer().logprobs, strict=True):
        sampled = sequence.turns > 0
        np.testing.assert_array_equal(trainer[sampled], sequence["rollout_logprobs"][sampled])
    assert found.row["mismatch/logprob_abs_diff_max"] == 0.0
    assert found.row["optimizer/grad_norm"] > 0


def test_a_seed_decides_each_trajectory():
    engine, _, _ = make()
    first, again, other = (converse(engine, seed)[0] for seed in (3, 3, 4))
    assert_same_bits(first, again)
    assert any(one.response.tolist() != two.response.tolist() for one, two in zip(first, other, strict=True))


def test_a_turn_that_does_not_fit_a_row_is_refused():
    engine, _, _ = make()
    queue = TurnQueue(1)
    queue.put(TurnRequest(0, 3, np.ones(20, np.int32), 5))
    said = "turn 3 of trajectory 0 would have 20 tokens before it and up to 5 of its own; rows have 24"
    with pytest.raises(ValueError, match=said):
        list(engine.answer(queue, LIMITS, seed=0))
