"""Tests of turns of trajectories through stand-in servers, whose tokens count up from the last token of the prompt."""

import contextlib
import threading
import time

import numpy as np
import pytest
import served_engines
from served_engines import PARAMS
from stopping import StopWhen
from waiting import until

from rljax.errors import StoppedWaitingError
from rljax.rollout.build import connect
from rljax.rollout.engine import TurnQueue, TurnRequest
from rljax.rollout.servers.requests import response_seed
from rljax.rollout.types import SamplingParams

LIMITS = SamplingParams(6)
ENVIRONMENT = [40, 41]  # the tokens that the environment of these tests writes after each turn


@contextlib.contextmanager
def published(*fakes, **config):
    with served_engines.published(*(each.url for each in fakes), **config) as engine:
        for each in fakes:
            each.asked.clear()
            each.sampling.clear()
        yield engine


def converse(engine, turns, *, seed=0, limits=LIMITS, max_tokens=lambda key, turn: 6, after=lambda response: None, n=1):
    """Runs trajectories from the tokens 10 + key, with ``turns[key]`` turns, in groups of ``n``.

    Returns responses in order of arrival, and metrics.
    """
    queue, rows, responses = TurnQueue(len(turns), None, n), [[10 + key % 20] for key in range(len(turns))], []

    def put(key, turn):
        queue.put(TurnRequest(key, turn, np.asarray(rows[key], np.int32), max_tokens(key, turn)))

    for key in range(len(turns)):
        put(key, 1)
    samples = engine.answer(queue, limits, seed=seed)
    for response in samples:
        responses.append(response)
        after(response)
        key, turn = response.prompt_index, response.sample_index + 1
        rows[key] += [*response.response.tolist(), *ENVIRONMENT]
        if turn == turns[key]:
            queue.end(key)
        else:
            put(key, turn + 1)
    return responses, samples.metrics


def places(responses):
    return [(response.prompt_index, response.sample_index) for response in responses]


@pytest.mark.parametrize("is_model", [False, True])
def test_each_turn_extends_the_one_before(fake, is_model):
    """Trajectory 0 starts from the token 10, and has three turns of two tokens. A served model answers turns, too."""
    with contextlib.closing(connect([fake.url])) if is_model else published(fake) as engine:
        fake.asked.clear()
        responses, metrics = converse(engine, [3, 1], seed=5, max_tokens=lambda key, turn: 2 + 9 * key)
    first, second = [10, 10, 11, 40, 41], [10, 10, 11, 40, 41, 41, 42, 40, 41]
    wanted = [([10], 2, (0, 1)), ([11], 6, (1, 1)), (first, 2, (0, 2)), (second, 2, (0, 3))]
    assert sorted(fake.asked) == sorted([(row, most, response_seed(5, *place)) for row, most, place in wanted])
    assert sorted(places(responses)) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    for response in responses:
        assert response.length == (6 if response.prompt_index else 2)
        assert is_model or response["version"].tolist() == [0] * response.length
        assert response.truncated
        assert set(response["rollout_logprobs"]) == {-1.0}
    assert (metrics["rollout/requests"], metrics["rollout/retries"]) == (4, 0)
    assert metrics["time/generate_s"] > 0


def test_turns_are_answered_while_others_run(fake):
    """Trajectory 0 takes a second or more for its turn. The turns of trajectory 1 do not wait for it."""
    with published(fake) as engine:
        fake.token_s = 0.1
        limits = SamplingParams(20)
        responses, _ = converse(engine, [1, 4], limits=limits, max_tokens=lambda key, turn: 1 if key else 20)
    assert places(responses) == [(1, 0), (1, 1), (1, 2), (1, 3), (0, 0)]


def test_requests_may_come_late_and_from_other_threads(fake, elsewhere):
    with published(fake) as engine:
        queue, responses = TurnQueue([3, 8]), []
        answering = elsewhere.submit(lambda: responses.extend(engine.answer(queue, LIMITS, seed=0)))
        for key in (8, 3):
            time.sleep(0.3)
            assert not answering.done()
            queue.put(TurnRequest(key, 1, np.asarray([key], np.int32), 1))
        queue.end(8)
        time.sleep(0.3)
        assert not answering.done()
        queue.end(3)
        answering.result(timeout=20)
    assert places(responses) == [(8, 0), (3, 0)]


@pytest.mark.parametrize("n", [1, 3])
def test_the_turns_of_a_group_stay_at_one_server(another, n):
    fakes = [another() for _ in range(3)]
    for each in fakes:
        each.delay_s = 0.02
    with published(*fakes) as engine:
        responses, _ = converse(engine, [4] * 9, n=n)
    assert len(responses) == 36
    asked = [{(prompt[0] - 10) // n for prompt, _, _ in each.asked} for each in fakes]
    assert sum(map(len, asked)) == 9 // n
    assert all(len(each.asked) == 12 for each in fakes)


def test_another_server_goes_on_where_one_dies(another):
    """Each turn has the tokens of an undisturbed run, whichever server samples it."""
    fakes = [another() for _ in range(2)]
    with published(*fakes) as engine:
        undisturbed, _ = converse(engine, [4] * 4)
        for each in fakes:
            each.token_s = 0.02
        deaths = iter([fakes[0].stop])
        responses, metrics = converse(engine, [4] * 4, after=lambda response: next(deaths, lambda: None)())
    assert metrics["rollout/retries"] >= 1
    was, found = (
        [(*place, *r.response) for place, r in zip(places(of), of, strict=True)] for of in (undisturbed, responses)
    )
    assert sorted(was) == sorted(found)


@pytest.mark.parametrize("update", ["keep", "abort"])
def test_new_weights_may_come_in_the_middle_of_a_turn(fake, update, elsewhere):
    with published(fake, update=update, max_staleness=1) as engine:
        fake.token_s, long = 0.02, {"limits": SamplingParams(40), "max_tokens": lambda key, turn: 40}
        answering = elsewhere.submit(converse, engine, [2, 2], **long)
        until(lambda: fake.running == 2)
        time.sleep(0.2)
        engine.publish(PARAMS, 1)
        responses, _ = answering.result(timeout=30)
    assert sorted(places(responses)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for response in responses:
        assert response.versions.tolist() == ([1] if response.sample_index else [0, 1])
        assert response.length == 40
    assert all(sampling["seed"] is None for sampling in fake.sampling if sampling["max_tokens"] == 40)


@pytest.mark.parametrize("update", ["keep", "abort"])
def test_turns_are_asked_for_while_new_weights_come(fake, update, elsewhere):
    """Trajectories have many short turns. Some turns end while the servers are not verified yet."""
    with published(fake, update=update, max_staleness=1) as engine:
        fake.token_s = 0.01
        limits = SamplingParams(1, stop_token_ids=(63,))
        answering = elsewhere.submit(converse, engine, [30] * 4, limits=limits, max_tokens=lambda key, turn: 1)
        for version in (1, 2, 3):
            time.sleep(0.1)
            engine.publish(PARAMS, version)
        responses, _ = answering.result(timeout=60)
    assert sorted(places(responses)) == [(key, turn) for key in range(4) for turn in range(30)]


def test_a_turn_that_a_server_would_shorten_is_refused(fake):
    """The stand-in takes 128 tokens, and the turn needs 6 of them."""
    queue = TurnQueue(1)
    queue.put(TurnRequest(0, 2, np.ones(123, np.int32), 100))
    said = "the prompt of turn 2 of trajectory 0 has 123 tokens; with 6 of response it must have 1 to 122"
    with published(fake) as engine, pytest.raises(ValueError, match=said):
        list(engine.answer(queue, LIMITS, seed=0))


def test_a_wait_for_environments_ends_with_them_or_with_the_run(fake):
    gives_up, queue = threading.Event(), TurnQueue(2)
    queue.put(TurnRequest(0, 1, np.ones(1, np.int32), 1))
    with published(fake, stop=StopWhen(gives_up=gives_up.is_set)) as engine:
        answers = iter(engine.answer(queue, LIMITS, seed=0))
        assert next(answers).prompt_index == 0
        threading.Timer(0.2, queue.fail, [OSError("the environments are gone")]).start()
        with pytest.raises(OSError, match="the environments are gone"):
            next(answers)
        threading.Timer(0.2, gives_up.set).start()
        with pytest.raises(StoppedWaitingError):
            list(engine.answer(TurnQueue(1), LIMITS, seed=0))


@pytest.mark.slow
def test_hundreds_of_trajectories_take_no_thread_each(fake):
    """The stand-in has a thread for each request in this process. The engine's threads have names of their own."""
    counts = []

    def count(_):
        counts.append(sum(each.name.startswith(("rljax", "asyncio")) for each in threading.enumerate()))

    with published(fake) as engine:
        responses, _ = converse(engine, [2] * 300, after=count)
    assert len(responses) == 600
    assert max(counts) < 20
