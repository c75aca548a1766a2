"""Turns of trajectories: the queue by hand, rounds of the embedded engine, and stand-ins, whose tokens count up."""

import contextlib
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from served_engines import PARAMS, published
from small_engines import CONFIG, EXPERTS, MESH, counted_loops
from stopping import StopWhen
from waiting import until

from rljax.errors import StoppedWaitingError
from rljax.policy.model import init_params
from rljax.policy.score import make_scorer
from rljax.rollout.build import connect
from rljax.rollout.embedded import JaxEngine, make_functions
from rljax.rollout.engine import TurnQueue, TurnRequest
from rljax.rollout.servers.requests import response_seed
from rljax.rollout.types import SamplingParams

ENVIRONMENT = [20, 21]  # the tokens that the environment of these tests writes after each turn
SIX = SamplingParams(6)


def put(queue, key, turn, tokens=(1,), most=4):
    queue.put(TurnRequest(key, turn, np.asarray(tokens, np.int32), most))


def converse(engine, turns, *, first=None, seed=0, limits=SIX, most=None, after=lambda response: None, n=1):
    """Runs ``turns[key]`` turns of trajectories, in groups of ``n``; returns responses as they arrive, and metrics."""
    turns = turns if isinstance(turns, dict) else dict(enumerate(turns))
    rows = {key: [10 + key % 20] if first is None else [*first[key]] for key in turns}
    most = most or (lambda key, turn: limits.max_response_tokens)
    queue, responses = TurnQueue([*turns], None, n), []
    for key in turns:
        put(queue, key, 1, rows[key], most(key, 1))
    samples = engine.answer(queue, limits, seed=seed)
    for response in samples:
        responses.append(response)
        after(response)
        key, turn = response.prompt_index, response.sample_index + 1
        rows[key] += [*response.response.tolist(), *ENVIRONMENT]
        if turn == turns[key]:
            queue.end(key)
        else:
            put(queue, key, turn + 1, rows[key], most(key, turn + 1))
    assert queue.is_over
    return responses, samples.metrics


def by_place(responses):
    return {(response.prompt_index, response.sample_index + 1): response for response in responses}


def taken(requests):
    return [(request.key, request.turn) for request in requests]


def later(act, *arguments):
    threading.Timer(0.1, act, arguments).start()


def test_a_round_waits_for_each_open_trajectory():
    """The requests come in order of key. An end drops what waits, and may come twice."""
    queue = TurnQueue([0, 1, 2])
    assert queue.take() == []
    put(queue, 2, 1)
    put(queue, 0, 1)
    assert taken(queue.take()) == [(0, 1), (2, 1)]
    put(queue, 2, 2)
    put(queue, 0, 2)
    later(put, queue, 1, 1)
    assert taken(queue.take_round()) == [(0, 2), (1, 1), (2, 2)]
    put(queue, 1, 2)
    queue.end(1)
    queue.end(1)
    put(queue, 2, 3)
    later(put, queue, 0, 3)
    assert taken(queue.take_round()) == [(0, 3), (2, 3)]
    put(queue, 0, 4)
    later(queue.end, 2)
    assert taken(queue.take_round()) == [(0, 4)]
    assert not queue.is_over
    later(queue.end, 0)
    assert queue.take_round() == []
    assert queue.is_over


def test_a_wait_ends_with_a_failure_or_when_the_run_gives_up():
    """The failure reaches each later take. Whoever watches is told of each change."""
    queue, woken = TurnQueue(2), []
    queue.watch(lambda: woken.append(queue.is_over))
    put(queue, 0, 1)
    later(queue.fail, OSError("the environments are gone"))
    for take in (queue.take_round, queue.take):
        with pytest.raises(OSError, match="the environments are gone"):
            take()
    queue.end(0)
    queue.end(1)
    assert woken == [False, False, False, True]
    began = time.monotonic()
    queue = TurnQueue(1, StopWhen(gives_up=lambda: time.monotonic() > began + 0.3))
    with pytest.raises(StoppedWaitingError):
        queue.take_round()
    assert 0.3 < time.monotonic() - began < 30.0


PROMPTS = {4: [1, 2, 3], 0: [4], 7: [2, 2]}
FIVE = SamplingParams(5, 1.0, (0, 1))


def make(config=CONFIG, **settings):
    """Returns an engine with room for trajectories of 3 turns after prompts of 3 tokens, and its parameters."""
    settings = {"max_tokens": 3 + 3 * 5 + 2 * 2, "mesh": MESH, "with_routes": bool(config.num_experts)} | settings
    engine, params = JaxEngine(config, jnp.float32, 3, **settings), init_params(config, 0)
    engine.publish(params, 3)
    return engine, params


def rounds(engine, *turns, limits=FIVE, **settings):
    responses, metrics = converse(
        engine, dict(zip(PROMPTS, turns, strict=True)), first=PROMPTS, limits=limits, **settings
    )
    return by_place(responses), metrics


def check_logprobs(responses, config, params):
    """Checks what was sampled in turns against one pass of the trainer's forward over the joined tokens."""
    scored = make_scorer(config, jnp.float32)(params, [response.ids for response in responses])
    for response, expected in zip(responses, scored, strict=True):
        np.testing.assert_allclose(response["rollout_logprobs"], expected[-response.length :], atol=2e-5, rtol=0)


def test_turns_compile_few_loops_and_leave_those_of_one_turn(caplog):
    """There is one loop for each number of rows, whatever the lengths, and one loop for responses of one turn."""
    make_functions.cache_clear()
    engine, _ = make()
    with counted_loops(caplog) as loops:
        for seed in range(3):
            rounds(engine, 2, 1, 2, seed=seed)
        assert loops() == 2  # one loop each for 3 and 2 rows
        list(engine.generate([np.asarray(prompt, np.int32) for prompt in PROMPTS.values()], 1, FIVE, seed=0))
        assert loops() == 3


@pytest.mark.parametrize(("config", "decode_tokens"), [(CONFIG, 0), pytest.param(EXPERTS, 22, marks=pytest.mark.slow)])
def test_turns_have_the_logprobs_of_the_full_forward(config, decode_tokens):
    """The turns run all at once, or one row of 22 tokens at a time. A turn without room is refused."""
    engine, params = make(config, decode_tokens=decode_tokens)
    responses, metrics = rounds(engine, 3, 1, 3)
    assert sorted(responses) == [(0, 1), (4, 1), (4, 2), (4, 3), (7, 1), (7, 2), (7, 3)]
    assert metrics["time/generate_s"] > 0
    check_logprobs(responses.values(), config, params)
    for response in responses.values():
        assert response["version"].tolist() == [3] * response.length
        if config.num_experts:
            routes = response.columns["routes"]
            assert routes.shape == (len(response.ids), 2, 2)
            assert routes[:-1].min() > 0
            assert not routes[-1].any()
    said = "turn 2 of trajectory 0 would have 18 tokens before it and up to 5 of its own; the engine has room for 22"
    with pytest.raises(ValueError, match=said):
        engine.answer_round([TurnRequest(0, 2, np.ones(18, np.int32), 5)], FIVE, seed=0)


@pytest.mark.parametrize("config", [CONFIG, pytest.param(EXPERTS, marks=pytest.mark.harness)])
def test_first_turns_of_groups_share_their_prompts(config):
    """They are the bits of three responses to each prompt. Beside a turn after another prompt they share nothing."""
    make_functions.cache_clear()
    engine, params = make(config, max_tokens=3 + 5)
    functions = make_functions(config, jnp.dtype(jnp.float32), MESH, None, None, None)
    *prompts, third = (np.asarray(prompt, np.int32) for prompt in PROMPTS.values())
    asked = [TurnRequest(10 + 3 * i + j, 1, prompts[i], 5) for i in range(2) for j in range(3)]
    together = list(engine.answer_round(asked, FIVE, seed=1))
    assert [(turn.prompt_index, turn.sample_index) for turn in together] == [(10 + i, 0) for i in range(6)]
    alone = list(engine.generate(prompts, 3, FIVE, seed=1))
    assert functions.admit._cache_size() == (2 if config.num_experts else 1)  # routes have more room after turns
    for turn, response in zip(together, alone, strict=True):
        np.testing.assert_array_equal(turn.ids, response.ids)
        for name, column in response.columns.items():
            np.testing.assert_array_equal(turn.columns[name], column)
    check_logprobs(together, config, params)
    apart = list(engine.answer_round([*asked, TurnRequest(16, 1, third, 5)], FIVE, seed=1))
    for turn, other in zip(together, apart[:6], strict=True):
        np.testing.assert_array_equal(turn.ids, other.ids)
        np.testing.assert_allclose(turn["rollout_logprobs"], other["rollout_logprobs"], atol=2e-6, rtol=0)


def test_a_seed_decides_each_turn_and_its_likeliest_tokens():
    """A turn is cut to its own limit."""
    engine, limits = make()[0], SamplingParams(5, 1.0, (0, 1), reported=3)
    first, again, other = (rounds(engine, 2, 2, 2, seed=seed, limits=limits)[0] for seed in (3, 3, 4))
    for place, response in first.items():
        np.testing.assert_array_equal(response.response, again[place].response)
        np.testing.assert_array_equal(response["rollout_logprobs"], again[place]["rollout_logprobs"])
        assert response["top_ids"].shape == response["top_logprobs"].shape == (response.length, 3)
        among = response["top_ids"] == response.response[:, None]
        np.testing.assert_array_equal(response["top_logprobs"][among], response["rollout_logprobs"][among.any(axis=1)])
    assert any(first[place].response.tolist() != other[place].response.tolist() for place in first)
    responses, _ = rounds(
        engine, 2, 2, 2, limits=SamplingParams(5, 1.0), most=lambda key, turn: 5 if key == 4 else turn
    )
    lengths = {place: response.length for place, response in responses.items()}
    assert lengths == {(4, 1): 5, (4, 2): 5, (0, 1): 1, (0, 2): 2, (7, 1): 1, (7, 2): 2}
    assert all(response.truncated for response in responses.values())
    assert {len(response["version"]) for response in responses.values()} == {1, 2, 5}


@pytest.mark.parametrize("is_model", [False, True])
def test_each_turn_extends_the_one_before(fake, is_model):
    """Trajectory 0 starts from the token 10, and has three turns of two tokens. A served model answers turns, too."""
    with contextlib.closing(connect([fake.url])) if is_model else published(fake.url) as engine:
        fake.asked.clear()
        responses, metrics = converse(engine, [3, 1], seed=5, most=lambda key, turn: 2 + 9 * key)
    first, second = [10, 10, 11, 20, 21], [10, 10, 11, 20, 21, 21, 22, 20, 21]
    wanted = [([10], 2, (0, 1)), ([11], 6, (1, 1)), (first, 2, (0, 2)), (second, 2, (0, 3))]
    assert sorted(fake.asked) == sorted([(row, most, response_seed(5, *place)) for row, most, place in wanted])
    assert sorted(by_place(responses)) == [(0, 1), (0, 2), (0, 3), (1, 1)]
    for response in responses:
        assert response.length == (6 if response.prompt_index else 2)
        assert is_model or response["version"].tolist() == [0] * response.length
        assert response.truncated
        assert set(response["rollout_logprobs"]) == {-1.0}
    assert (metrics["rollout/requests"], metrics["rollout/retries"]) == (4, 0)
    assert is_model or metrics["time/generate_s"] > 0


def test_turns_are_answered_while_others_run(fake):
    """Trajectory 0 takes a second or more for its turn. The turns of trajectory 1 do not wait for it."""
    with published(fake.url) as engine:
        fake.token_s = 0.1
        responses, _ = converse(engine, [1, 4], limits=SamplingParams(20), most=lambda key, turn: 1 if key else 20)
    assert [*by_place(responses)] == [(1, 1), (1, 2), (1, 3), (1, 4), (0, 1)]


def test_requests_may_come_late_and_from_other_threads(fake, elsewhere):
    with published(fake.url) as engine:
        queue, responses = TurnQueue([3, 8]), []
        answering = elsewhere.submit(lambda: responses.extend(engine.answer(queue, SIX, seed=0)))
        for key in (8, 3):
            time.sleep(0.3)
            assert not answering.done()
            put(queue, key, 1, [key], 1)
        queue.end(8)
        time.sleep(0.3)
        assert not answering.done()
        queue.end(3)
        answering.result(timeout=20)
    assert [*by_place(responses)] == [(8, 1), (3, 1)]


@pytest.mark.parametrize("n", [3, pytest.param(1, marks=pytest.mark.harness)])
def test_the_turns_of_a_group_stay_at_one_server(another, n):
    fakes = [another() for _ in range(3)]
    for each in fakes:
        each.delay_s = 0.02
    with published(*(each.url for each in fakes)) as engine:
        for each in fakes:
            each.asked.clear()
        responses, _ = converse(engine, [4] * 9, n=n)
    assert len(responses) == 36
    asked = [{(prompt[0] - 10) // n for prompt, _, _ in each.asked} for each in fakes]
    assert sum(map(len, asked)) == 9 // n
    assert all(len(each.asked) == 12 for each in fakes)


def test_another_server_goes_on_where_one_dies(another):
    """Each turn has the tokens of an undisturbed run, whichever server samples it."""
    fakes = [another() for _ in range(2)]
    with published(*(each.url for each in fakes)) as engine:
        undisturbed, _ = converse(engine, [4] * 4)
        for each in fakes:
            each.token_s = 0.02
        deaths = iter([fakes[0].stop])
        responses, metrics = converse(engine, [4] * 4, after=lambda response: next(deaths, lambda: None)())
    assert metrics["rollout/retries"] >= 1
    was, found = by_place(undisturbed), by_place(responses)
    assert len(responses) == len(found) == 16
    assert {place: each.response.tolist() for place, each in found.items()} == {
        p: was[p].response.tolist() for p in was
    }


@pytest.mark.parametrize("update", ["keep", pytest.param("abort", marks=pytest.mark.harness)])
def test_new_weights_may_come_in_the_middle_of_a_turn(fake, update, elsewhere):
    """Or between many short turns, some of which end while the servers are not verified yet."""
    with published(fake.url, update=update, max_staleness=1) as engine:
        fake.token_s = 0.02
        answering = elsewhere.submit(converse, engine, [2, 2], limits=SamplingParams(40))
        until(lambda: fake.running == 2)
        time.sleep(0.2)
        engine.publish(PARAMS, 1)
        responses, _ = answering.result(timeout=30)
        assert sorted(by_place(responses)) == [(0, 1), (0, 2), (1, 1), (1, 2)]
        for response in responses:
            assert response.versions.tolist() == ([1] if response.sample_index else [0, 1])
            assert response.length == 40
        assert all(sampling["seed"] is None for sampling in fake.sampling if sampling["max_tokens"] == 40)
        fake.token_s = 0.01
        answering = elsewhere.submit(converse, engine, [30] * 4, limits=SamplingParams(1, stop_token_ids=(63,)))
        for version in (2, 3, 4):
            time.sleep(0.1)
            engine.publish(PARAMS, version)
        responses, _ = answering.result(timeout=60)
    assert sorted(by_place(responses)) == [(key, turn) for key in range(4) for turn in range(1, 31)]


def test_a_turn_that_a_server_would_shorten_is_refused(fake):
    """The stand-in takes 128 tokens, and the turn needs 6 of them."""
    queue = TurnQueue(1)
    put(queue, 0, 2, [1] * 123, 100)
    said = "the prompt of turn 2 of trajectory 0 has 123 tokens; with 6 of response it must have 1 to 122"
    with published(fake.url) as engine, pytest.raises(ValueError, match=said):
        list(engine.answer(queue, SIX, seed=0))


def test_a_wait_for_environments_ends_with_them_or_with_the_run(fake):
    gives_up, queue = threading.Event(), TurnQueue(2)
    put(queue, 0, 1)
    with published(fake.url, stop=StopWhen(gives_up=gives_up.is_set)) as engine:
        answers = iter(engine.answer(queue, SIX, seed=0))
        assert next(answers).prompt_index == 0
        threading.Timer(0.2, queue.fail, [OSError("the environments are gone")]).start()
        with pytest.raises(OSError, match="the environments are gone"):
            next(answers)
        threading.Timer(0.2, gives_up.set).start()
        with pytest.raises(StoppedWaitingError):
            list(engine.answer(TurnQueue(1), SIX, seed=0))


@pytest.mark.slow
def test_hundreds_of_trajectories_take_no_thread_each(fake):
    """The stand-in has a thread for each request in this process. The engine's threads have names of their own."""
    counts = []

    def count(_):
        counts.append(sum(each.name.startswith(("rljax", "asyncio")) for each in threading.enumerate()))

    with published(fake.url) as engine:
        responses, _ = converse(engine, [2] * 300, after=count)
    assert len(responses) == 600
    assert max(counts) < 20
