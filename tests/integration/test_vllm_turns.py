"""A real server samples trajectories of two turns. The second turn's prompt extends the tokens of the first turn."""

import numpy as np
import pytest

from rljax.rollout.engine import TurnQueue, TurnRequest
from rljax.rollout.types import SamplingParams

pytestmark = pytest.mark.vllm

ENVIRONMENT = np.asarray([7, 8, 9], np.int32)
LIMITS = SamplingParams(20, stop_token_ids=tuple(range(0, 256, 16)))


def converse(engine, prompts, seed):
    """Returns each turn's response by (trajectory, turn), with a row of joined tokens."""
    queue, responses = TurnQueue(len(prompts)), {}
    for key, prompt in enumerate(prompts):
        queue.put(TurnRequest(key, 1, prompt, 20))
    for response in engine.answer(queue, LIMITS, seed=seed):
        key, turn = response.prompt_index, response.sample_index + 1
        before = prompts[key] if turn == 1 else responses[key, 1][1]
        if turn == 1:
            row = np.concatenate([before, response.response, ENVIRONMENT])
            responses[key, 1] = response, row
            queue.put(TurnRequest(key, 2, row, 12))
        else:
            responses[key, 2] = response, np.concatenate([before, response.response])
            queue.end(key)
    return responses


def test_a_second_turn_goes_on_from_the_tokens_of_the_first(float32, prompts):
    """The log-probabilities are those of one pass over the joined tokens, and a seed decides both turns."""
    params, count = float32.model.moved(5), len(prompts)
    with float32.published(params, 3) as engine:
        first, again, other = (converse(engine, prompts, seed) for seed in (1, 1, 2))
    assert sorted(first) == [(key, turn) for key in range(count) for turn in (1, 2)]
    scored = float32.score(params, [first[key, 2][1] for key in range(count)])
    for key, (prompt, logprobs) in enumerate(zip(prompts, scored, strict=True)):
        starts = len(prompt), len(first[key, 1][1])
        for turn, start, most in ((1, starts[0], 20), (2, starts[1], 12)):
            response = first[key, turn][0]
            assert response["version"].tolist() == [3] * response.length
            assert response.truncated == (response.response[-1] not in LIMITS.stop_token_ids)
            assert response.length == most or not response.truncated
            np.testing.assert_allclose(
                response["rollout_logprobs"], logprobs[start : start + response.length], atol=1e-4, rtol=0
            )
            np.testing.assert_array_equal(response.response, again[key, turn][0].response)
    assert any(first[place][0].response.tolist() != other[place][0].response.tolist() for place in first)


def test_many_seeded_prompts_are_computed_whole(float32):
    """The prompts have more tokens than the server computes at once, and each has a seed.

    A prompt in parts would end its engine.
    """
    rng = np.random.default_rng(0)
    many = [rng.integers(2, 250, 150).astype(np.int32) for _ in range(120)]
    with float32.published() as engine:
        responses = list(engine.generate(many, 1, SamplingParams(2, stop_token_ids=(1,)), seed=3))
    assert sorted(response.prompt_index for response in responses) == list(range(120))
