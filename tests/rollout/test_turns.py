"""Tests of the queue of requests for turns, worked out by hand, and of cuts by a request's limit."""

import threading
import time

import numpy as np
import pytest
from stopping import StopWhen

from rljax.errors import StoppedWaitingError
from rljax.rollout.engine import TurnQueue, TurnRequest


def ask(key, turn):
    return TurnRequest(key, turn, np.ones(1, np.int32), 4)


def places(requests):
    return [(request.key, request.turn) for request in requests]


def later(act, *arguments, seconds=0.1):
    """Calls ``act`` on another thread a moment later."""
    timer = threading.Timer(seconds, act, arguments)
    timer.start()
    return timer


def test_a_take_has_what_waits_in_order_of_key():
    queue = TurnQueue([7, 3, 5])
    assert queue.take() == []
    queue.put(ask(7, 1))
    queue.put(ask(3, 1))
    assert places(queue.take()) == [(3, 1), (7, 1)]
    assert queue.take() == []
    queue.put(ask(5, 1))
    assert places(queue.take()) == [(5, 1)]


def test_a_round_waits_for_each_open_trajectory():
    queue = TurnQueue(3)
    queue.put(ask(2, 1))
    queue.put(ask(0, 1))
    later(queue.put, ask(1, 1))
    assert places(queue.take_round()) == [(0, 1), (1, 1), (2, 1)]
    queue.end(1)
    queue.put(ask(2, 2))
    later(queue.put, ask(0, 2))
    assert places(queue.take_round()) == [(0, 2), (2, 2)]
    queue.put(ask(0, 3))
    later(queue.end, 2)
    assert places(queue.take_round()) == [(0, 3)]
    assert not queue.is_over
    later(queue.end, 0)
    assert queue.take_round() == []
    assert queue.is_over
    assert queue.take() == []


def test_an_end_drops_what_waits_and_may_come_twice():
    queue = TurnQueue(2)
    queue.put(ask(0, 1))
    queue.end(0)
    queue.end(0)
    queue.put(ask(1, 1))
    assert places(queue.take_round()) == [(1, 1)]


def test_a_failure_reaches_each_later_take():
    queue = TurnQueue(2)
    queue.put(ask(0, 1))
    later(queue.fail, OSError("the environments are gone"))
    with pytest.raises(OSError, match="the environments are gone"):
        queue.take_round()
    with pytest.raises(OSError, match="the environments are gone"):
        queue.take()


def test_a_wait_ends_when_the_run_gives_up():
    began = time.monotonic()
    queue = TurnQueue(1, StopWhen(gives_up=lambda: time.monotonic() > began + 0.3))
    with pytest.raises(StoppedWaitingError):
        queue.take_round()
    assert 0.3 < time.monotonic() - began < 30.0


def test_whoever_watches_is_told_of_each_change():
    queue, woken = TurnQueue(1), []
    queue.watch(lambda: woken.append(queue.is_over))
    queue.put(ask(0, 1))
    queue.end(0)
    queue.fail(OSError())
    assert woken == [False, True, True]
