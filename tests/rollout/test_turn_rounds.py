"""Tests of turns of trajectories: the queue of requests by hand, and engines that answer them in rounds."""

import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from small_engines import CONFIG, EXPERTS, MESH, counted_loops
from stopping import StopWhen

from rljax.errors import StoppedWaitingError
from rljax.policy.model import init_params
from rljax.policy.score import make_scorer
from rljax.rollout.embedded import JaxEngine, make_functions
from rljax.rollout.engine import TurnQueue, TurnRequest
from rljax.rollout.types import SamplingParams

PROMPTS = [np.asarray(p, np.int32) for p in ([1, 2, 3], [4], [2, 2])]
ENVIRONMENT = np.asarray([20, 21], np.int32)  # the tokens that the environment of these tests writes after each turn
LIMITS = SamplingParams(5, 1.0, (0, 1))


# ---- The queue ----


def queue_of(keys, *requests, stop=None):
    """Returns a queue with requests for (trajectory, turn)."""
    queue = TurnQueue(keys, stop)
    for request in requests:
        put(queue, *request)
    return queue


def put(queue, key, turn):
    queue.put(TurnRequest(key, turn, np.ones(1, np.int32), 4))


def places(requests):
    return [(request.key, request.turn) for request in requests]


def later(act, *arguments):
    """Calls ``act`` on another thread a moment later."""
    threading.Timer(0.1, act, arguments).start()


def test_a_take_has_what_waits_in_order_of_key():
    queue = queue_of([7, 3, 5])
    assert queue.take() == []
    put(queue, 7, 1)
    put(queue, 3, 1)
    assert places(queue.take()) == [(3, 1), (7, 1)]
    assert queue.take() == []
    put(queue, 5, 1)
    assert places(queue.take()) == [(5, 1)]


def test_a_round_waits_for_each_open_trajectory():
    """An end drops what waits, and may come twice."""
    queue = queue_of(3, (2, 1), (0, 1))
    later(put, queue, 1, 1)
    assert places(queue.take_round()) == [(0, 1), (1, 1), (2, 1)]
    put(queue, 1, 2)
    queue.end(1)
    queue.end(1)
    put(queue, 2, 2)
    later(put, queue, 0, 2)
    assert places(queue.take_round()) == [(0, 2), (2, 2)]
    put(queue, 0, 3)
    later(queue.end, 2)
    assert places(queue.take_round()) == [(0, 3)]
    assert not queue.is_over
    later(queue.end, 0)
    assert queue.take_round() == []
    assert queue.is_over


def test_a_wait_ends_with_a_failure_or_when_the_run_gives_up():
    """The failure reaches each later take. Whoever watches is told of each change."""
    queue, woken = queue_of(2, (0, 1)), []
    queue.watch(lambda: woken.append(queue.is_over))
    later(queue.fail, OSError("the environments are gone"))
    for take in (queue.take_round, queue.take):
        with pytest.raises(OSError, match="the environments are gone"):
            take()
    put(queue, 1, 1)
    queue.end(0)
    queue.end(1)
    assert woken == [False, False, False, True]
    began = time.monotonic()
    queue = queue_of(1, stop=StopWhen(gives_up=lambda: time.monotonic() > began + 0.3))
    with pytest.raises(StoppedWaitingError):
        queue.take_round()
    assert 0.3 < time.monotonic() - began < 30.0


# ---- Engines ----


def converse(engine, turns, *, seed=0, limits=LIMITS, max_tokens=lambda key, turn: 5, keys=(4, 0, 7)):
    """Runs a trajectory of ``turns[i]`` turns from each prompt; returns their responses and the tokens before each."""
    queue, rows = TurnQueue(keys), dict(zip(keys, PROMPTS, strict=True))
    wanted, responses = dict(zip(keys, turns, strict=True)), {}
    for key in keys:
        queue.put(TurnRequest(key, 1, rows[key], max_tokens(key, 1)))
    samples = engine.answer(queue, limits, seed=seed)
    for response in samples:
        key, turn = response.prompt_index, response.sample_index + 1
        responses[key, turn] = response, rows[key]
        rows[key] = np.concatenate([rows[key], response.response, ENVIRONMENT])
        if turn == wanted[key]:
            queue.end(key)
        else:
            queue.put(TurnRequest(key, turn + 1, rows[key], max_tokens(key, turn + 1)))
    assert queue.is_over
    return responses, samples.metrics


def make(config=CONFIG, **settings):
    """Returns an engine with room for trajectories of 3 turns after prompts of 3 tokens, and its parameters."""
    settings = {"max_tokens": 3 + 3 * 5 + 2 * 2, "mesh": MESH, "with_routes": bool(config.num_experts)} | settings
    engine, params = JaxEngine(config, jnp.float32, 3, **settings), init_params(config, 0)
    engine.publish(params, 3)
    return engine, params


def check_logprobs(responses, config, params):
    """Checks what was sampled in turns against one pass of the trainer's forward over the joined tokens."""
    score = make_scorer(config, jnp.float32)
    for response, tokens in responses.values():
        (scored,) = score(params, [np.concatenate([tokens, response.response])])
        np.testing.assert_allclose(response["rollout_logprobs"], scored[len(tokens) :], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("config", "decode_tokens"), [(CONFIG, 0), (CONFIG, 50), pytest.param(EXPERTS, 22, marks=pytest.mark.slow)]
)
def test_turns_have_the_logprobs_of_the_full_forward(config, decode_tokens):
    """The turns run all at once, or one or two rows of 22 tokens at a time. A turn without room is refused."""
    engine, params = make(config, decode_tokens=decode_tokens)
    responses, metrics = converse(engine, turns=(3, 1, 2))
    assert sorted(responses) == [(0, 1), (4, 1), (4, 2), (4, 3), (7, 1), (7, 2)]
    assert metrics["time/generate_s"] > 0
    check_logprobs(responses, config, params)
    for response, tokens in responses.values():
        assert response["version"].tolist() == [3] * response.length
        if config.num_experts:
            routes = response.columns["routes"]
            assert routes.shape == (len(tokens) + response.length, 2, 2)
            assert routes[:-1].min() > 0
            assert not routes[-1].any()
    said = "turn 2 of trajectory 0 would have 18 tokens before it and up to 5 of its own; the engine has room for 22"
    with pytest.raises(ValueError, match=said):
        engine.answer_round([TurnRequest(0, 2, np.ones(18, np.int32), 5)], LIMITS, seed=0)


def test_turns_compile_few_loops_and_leave_those_of_one_turn(caplog):
    """There is one loop for each number of rows, whatever the lengths, and one loop for responses of one turn."""
    make_functions.cache_clear()
    engine, _ = make()
    with counted_loops(caplog) as loops:
        for seed in range(3):
            converse(engine, turns=(2, 1, 3), seed=seed)
        assert loops() == 3  # one loop each for 3, 2 and 1 rows
        list(engine.generate(PROMPTS, 1, LIMITS, seed=0))
        assert loops() == 4


@pytest.mark.parametrize("config", [CONFIG, pytest.param(EXPERTS, marks=pytest.mark.harness)])
def test_first_turns_of_groups_share_their_prompts(config):
    """Groups of three turns are the bits of three responses to each prompt, which the same program computes.

    With a turn after another prompt beside them they share nothing, and round otherwise.
    """
    make_functions.cache_clear()
    engine, params = make(config, max_tokens=3 + 5)
    functions = make_functions(config, jnp.dtype(jnp.float32), MESH, None, None, None)
    asked = [TurnRequest(10 + 3 * i + j, 1, PROMPTS[i], 5) for i in range(2) for j in range(3)]
    together = list(engine.answer_round(asked, LIMITS, seed=1))
    assert [(turn.prompt_index, turn.sample_index) for turn in together] == [(10 + i, 0) for i in range(6)]
    alone = list(engine.generate(PROMPTS[:2], 3, LIMITS, seed=1))
    assert functions.admit._cache_size() == (2 if config.num_experts else 1)  # routes have more room after turns
    for turn, response in zip(together, alone, strict=True):
        np.testing.assert_array_equal(turn.ids, response.ids)
        for name, column in response.columns.items():
            np.testing.assert_array_equal(turn.columns[name], column)
    check_logprobs({turn.prompt_index: (turn, turn.ids[: turn.prompt_length]) for turn in together}, config, params)
    apart = list(engine.answer_round([*asked, TurnRequest(16, 1, PROMPTS[2], 5)], LIMITS, seed=1))
    for turn, other in zip(together, apart[:6], strict=True):
        np.testing.assert_array_equal(turn.ids, other.ids)
        np.testing.assert_allclose(turn["rollout_logprobs"], other["rollout_logprobs"], atol=2e-6, rtol=0)


def test_a_seed_decides_each_turn_and_its_likeliest_tokens():
    engine, _ = make()
    limits = SamplingParams(5, 1.0, (0, 1), reported=3)
    first, again, other = (converse(engine, turns=(2, 2, 2), seed=seed, limits=limits)[0] for seed in (3, 3, 4))
    for place, (response, _) in first.items():
        np.testing.assert_array_equal(response.response, again[place][0].response)
        np.testing.assert_array_equal(response["rollout_logprobs"], again[place][0]["rollout_logprobs"])
        assert response["top_ids"].shape == response["top_logprobs"].shape == (response.length, 3)
        among = response["top_ids"] == response.response[:, None]
        np.testing.assert_array_equal(response["top_logprobs"][among], response["rollout_logprobs"][among.any(axis=1)])
    assert any(first[place][0].response.tolist() != other[place][0].response.tolist() for place in first)


def test_a_turn_is_cut_to_its_own_limit():
    engine, limits = make()[0], SamplingParams(5, 1.0)
    responses, _ = converse(engine, (2, 2, 2), limits=limits, max_tokens=lambda key, turn: 5 if key == 4 else turn)
    lengths = {place: response.length for place, (response, _) in responses.items()}
    assert lengths == {(4, 1): 5, (4, 2): 5, (0, 1): 1, (0, 2): 2, (7, 1): 1, (7, 2): 2}
    assert all(response.truncated for response, _ in responses.values())
    assert {len(response["version"]) for response, _ in responses.values()} == {1, 2, 5}
