"""Turns of several trajectories through engines that answer them in rounds."""

import jax.numpy as jnp
import numpy as np

from rljax.policy.config import PolicyConfig
from rljax.policy.model import init_params
from rljax.policy.score import make_scorer
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.turns import TurnQueue, TurnRequest
from rljax.rollout.types import SamplingParams
from rljax.sharding import MeshConfig, make_mesh

CONFIG = PolicyConfig(24, 32, 64, 2, 4, 2, 8, tie_word_embeddings=True, initializer_range=0.25)
MESH = make_mesh(MeshConfig(1, 1))
PROMPTS = [np.asarray(p, np.int32) for p in ([1, 2, 3], [4], [2, 2])]
ENVIRONMENT = np.asarray([20, 21], np.int32)  # the tokens that the environment of these tests writes after each turn
LIMITS = SamplingParams(5, 1.0, (0, 1))


def converse(engine, turns, *, seed=0, limits=LIMITS, max_tokens=lambda key, turn: 5, keys=(4, 0, 7)):
    """Runs a trajectory of ``turns[i]`` turns from each prompt; returns their responses and the row of tokens."""
    queue, rows = TurnQueue(keys), dict(zip(keys, PROMPTS, strict=True))
    wanted, responses = dict(zip(keys, turns, strict=True)), {}
    for key in keys:
        queue.put(TurnRequest(key, 1, rows[key], max_tokens(key, 1)))
    samples = engine.answer(queue, limits, seed=seed)
    for response in samples:
        key, turn = response.prompt_index, response.sample_index + 1
        responses[key, turn] = response, rows[key]
        rows[key] = np.concatenate([rows[key], response.token_ids, ENVIRONMENT])
        if turn == wanted[key]:
            queue.end(key)
        else:
            queue.put(TurnRequest(key, turn + 1, rows[key], max_tokens(key, turn + 1)))
    assert queue.is_over
    return responses, samples.metrics


def make(dtype=jnp.float32, **settings):
    engine, params = JaxEngine(CONFIG, dtype, 20, mesh=MESH, **settings), init_params(CONFIG, 0)
    engine.publish(params, 3)
    return engine, params


def test_turns_have_the_logprobs_of_the_full_forward():
    engine, params = make()
    responses, metrics = converse(engine, turns=(3, 1, 2))
    assert sorted(responses) == [(0, 1), (4, 1), (4, 2), (4, 3), (7, 1), (7, 2)]
    assert metrics["time/generate_s"] > 0
    for response, tokens in responses.values():
        row = np.concatenate([tokens, response.token_ids])
        (scored,) = make_scorer(CONFIG, jnp.float32)(params, [row])
        np.testing.assert_allclose(response.logprobs, scored[len(tokens) :], atol=2e-5, rtol=0)


def test_a_seed_decides_each_turn():
    engine, _ = make()
    first, again, other = (converse(engine, turns=(2, 2, 2), seed=seed)[0] for seed in (3, 3, 4))
    for place, (response, _) in first.items():
        np.testing.assert_array_equal(response.token_ids, again[place][0].token_ids)
        np.testing.assert_array_equal(response.logprobs, again[place][0].logprobs)
    assert any(first[place][0].token_ids.tolist() != other[place][0].token_ids.tolist() for place in first)


def test_a_turn_is_cut_to_its_own_limit():
    engine, _ = make()
    limits = SamplingParams(5, 1.0)
    responses, _ = converse(
        engine, turns=(2, 2, 2), limits=limits, max_tokens=lambda key, turn: 5 if key == 4 else turn
    )
    lengths = {place: response.length for place, (response, _) in responses.items()}
    assert lengths == {(4, 1): 5, (4, 2): 5, (0, 1): 1, (0, 2): 2, (7, 1): 1, (7, 2): 2}
    assert all(response.truncated for response, _ in responses.values())
    assert {response.versions[0].end for response, _ in responses.values()} == {1, 2, 5}
