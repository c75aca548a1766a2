"""Tests of rollouts sampled ahead: every batch comes once, in order, none too old; stops, losses, failures, resumes."""

import contextlib
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from waiting import until

from rljax.data.prompts import PromptStream
from rljax.errors import ServersLostError, StoppedWaitingError
from rljax.run.pipeline import Batches, BatchesAhead
from rljax.run.sampling import Rollouts
from rljax.run.stop import StopRequest, Timers

PROBLEMS = [{"prompt": str(i), "answer": ""} for i in range(10)]
SEED = 3


class Stop(StopRequest):
    """A request to stop that a test makes. It keeps the places that the run reports to its processes."""

    def __init__(self):
        self.seen, self.is_asked = [], False
        super().__init__(processes=SimpleNamespace(at=self.seen.append))

    def is_requested(self):
        return self.is_asked


class Engine:
    """An engine and sampler with one user at a time. A batch is (its problems, its step, the version at its start)."""

    def __init__(self, sampling_s=lambda step: 0.0):
        self.version, self.users, self.calls, self.failures, self.stop = 0, 0, [], {}, Stop()
        self.sampling_s = sampling_s

    @contextlib.contextmanager
    def used(self):
        self.users += 1
        assert self.users == 1, "two use the engine at once"
        try:
            yield
        finally:
            self.users -= 1

    def sample(self, problems, step):
        with self.used():
            version = self.version
            self.calls.append((step, version, threading.current_thread() is threading.main_thread()))
            end = time.monotonic() + self.sampling_s(step)
            while time.monotonic() < end:
                self.stop.progress()
                if self.stop.gives_up():
                    raise StoppedWaitingError("unwanted")
                time.sleep(0.002)
            failure = self.failures.pop(step, None)
            if failure is not None:
                raise failure
            assert self.version == version
            return Rollouts(([problem["prompt"] for problem in problems], step, version), None, row={"sampled": 1})

    def prepare(self, params, version):
        pass

    def publish(self, version):
        with self.used():
            time.sleep(0.002)
            self.version = version


SAVED = SimpleNamespace(last_save_s=lambda: -1e9)  # checkpoints whose last save took no time


def in_order(count):
    stream = PromptStream(PROBLEMS, 2, SEED)
    return [[problem["prompt"] for problem in stream.take()] for _ in range(count)]


def started(engine, k, steps=8, **options):
    batches = Batches(PromptStream(PROBLEMS, 2, SEED), engine.sample)
    if k:
        more = {"steps": steps, "max_staleness": k, **options}
        batches = BatchesAhead(batches.stream, engine.sample, engine, engine.stop, **more)
    batches.start(0)
    return batches


def take(batches, engine):
    return batches.take(Timers(engine.stop))


def publish(batches, engine, version, drains=True):
    """Publishes as the loop does. No batch begins during a publish."""
    with batches.paused({}, version, Timers(engine.stop), drains=drains):
        begun = batches.stream.state_dict()
        engine.publish(version)
        assert batches.stream.state_dict() == begun


def go_on(batches, engine, last, *, training_s=lambda step: 0.0, drains=True):
    """Runs steps as the loop does. Returns the trained batches, and the state of the stream after each step."""
    trained, states = [], []
    with contextlib.closing(batches):
        for step in range(1, last + 1):
            trained.append(take(batches, engine))
            time.sleep(training_s(step))
            publish(batches, engine, step, drains)
            states.append(batches.state_dict())
    return trained, states


@pytest.mark.parametrize("k", [0, 1, 2, 20])
@pytest.mark.parametrize("slow", ["sampling", "training", "by turns"])
def test_batches_come_once_in_order_and_none_is_too_old(k, slow):
    waits = {
        "sampling": (lambda step: 0.02, lambda step: 0.0),
        "training": (lambda step: 0.0, lambda step: 0.02),
        "by turns": (lambda step: 0.03 * (step % 3 == 0), lambda step: 0.03 * (step % 4 == 1)),
    }
    sampling_s, training_s = waits[slow]
    engine = Engine(sampling_s)
    trained, states = go_on(started(engine, k), engine, 8, training_s=training_s)
    for step, (sampled, state, expected) in enumerate(zip(trained, states, in_order(8), strict=True), 1):
        prompts, of_step, version = sampled.responses
        assert (prompts, of_step) == (expected, step)
        assert 0 <= step - 1 - version <= k
        assert sampled.row["sampled"] == 1
        assert state == {"problems_drawn": 2 * step}
    assert [step for step, *_ in engine.calls] == list(range(1, 9))
    if k == 1:
        assert [version for _, version, _ in engine.calls] == [0, 0, 1, 2, 3, 4, 5, 6]
    if k > 1 and slow == "training":
        assert max(step - 1 - version for step, version, _ in engine.calls) > 1


@pytest.mark.parametrize("k", [1, 4])
def test_while_a_step_trains_those_after_it_are_sampled(k):
    engine, steps, seen = Engine(), 8, []

    def train_until_all_are_sampled(step):
        last = min(step + k, steps)
        until(lambda: len(engine.calls) >= last, 10, every_s=0.001)
        seen.append((step, len(engine.calls)))
        return 0.01  # nothing beyond these batches begins in this time

    go_on(started(engine, k), engine, steps, training_s=train_until_all_are_sampled)
    assert seen == [(step, min(step + k, steps)) for step in range(1, steps + 1)]


def test_the_row_says_how_far_ahead_a_batch_was_begun():
    engine = Engine()
    trained, _ = go_on(started(engine, 1, steps=2), engine, 2, training_s=lambda step: 1.0 * (step == 1))
    first, second = (sampled.row["time/ahead_s"] for sampled in trained)
    # A busy machine may stop a thread between two readings of the clock.
    assert first < 0.5
    assert 0.8 <= second < 1.4


def test_a_lost_batch_is_sampled_again_after_the_publish():
    engine = Engine(lambda step: 0.01)
    engine.failures[3] = ServersLostError("none is left")
    # Training takes longer, so the loss is known before version 2 is published.
    trained, _ = go_on(started(engine, 1), engine, 5, training_s=lambda step: 0.05)
    assert [call[:2] for call in engine.calls[:5]] == [(1, 0), (2, 0), (3, 1), (3, 2), (4, 2)]
    assert [sampled.responses[0] for sampled in trained] == in_order(5)
    # A lost batch that is awaited is sampled in ``take``.
    engine = Engine()
    engine.failures[1] = ServersLostError("none is left")
    trained, _ = go_on(started(engine, 1), engine, 3)
    assert engine.calls[:2] == [(1, 0, False), (1, 0, True)]
    assert [sampled.responses[1] for sampled in trained] == [1, 2, 3]


def test_progress_counts_while_the_run_waits_for_it():
    engine = Engine(lambda step: 0.3)
    batches = started(engine, 1)
    take(batches, engine)
    assert set(engine.stop.seen) == {"wait"}
    assert len(engine.stop.seen) > 1
    engine.stop.at("train")
    until(lambda: len(engine.calls) == 2)
    time.sleep(0.05)
    assert engine.stop.seen[-1] == "train"
    assert engine.stop.seen.count("train") == 1
    batches.close()


@pytest.mark.parametrize("how", ["asked", "closed"])
def test_a_batch_that_no_step_will_use_is_given_up(how):
    engine = Engine(lambda step: 30.0 if step > 1 else 0.3)
    engine.stop.begin_step(0.0, SAVED)
    began, batches = time.monotonic(), started(engine, 2)
    if how == "asked":
        threading.Timer(0.1, lambda: setattr(engine.stop, "is_asked", True)).start()
    assert take(batches, engine).responses[1] == 1  # an awaited batch is not given up
    if how == "asked":
        publish(batches, engine, 1)
        assert batches.state_dict() == {"problems_drawn": 2}
    batches.close()
    assert time.monotonic() - began < 10
    assert not any(thread.name == "rljax-sampling" for thread in threading.enumerate())


class Sharing(Engine):
    """An engine that samples during publishes. A batch has the versions at its start and its end."""

    @contextlib.contextmanager
    def used(self):
        yield

    def sample(self, problems, step):
        first = self.version
        self.calls.append((step, first))
        time.sleep(self.sampling_s(step))
        return Rollouts(([problem["prompt"] for problem in problems], step, first, self.version), None)

    def publish(self, version):
        time.sleep(0.06)
        self.version = version


@pytest.mark.parametrize("step", [1, 2], ids=["take", "publish"])
def test_a_stop_does_not_wait_for_an_engine_that_goes_on(step):
    """The embedded engine samples a whole batch before it returns. One second of the grace is left."""
    engine = Sharing(lambda number: 2.5 * (number == step))
    batches = started(engine, 1)
    if step == 2:
        take(batches, engine)
    engine.stop.is_asked, engine.stop.left_s, began = True, lambda: 1.0, time.monotonic()
    with pytest.raises(StoppedWaitingError):
        take(batches, engine) if step == 1 else publish(batches, engine, 1)
    batches.close()
    assert time.monotonic() - began < 2.0
    del engine.stop.left_s
    batches.close()


@pytest.mark.parametrize(("sampling_s", "training_s", "k"), [(0.2, 0, 4), (0.03, 0, 1), (0.03, 0, 4), (0, 0.05, 1)])
def test_a_batch_goes_on_across_publishes(k, sampling_s, training_s):
    """Whatever version a batch ends with, no version is older than asked. A short one ends within the publish."""
    engine = Sharing(lambda step: sampling_s)
    batches = started(engine, k, always_drains=False)
    trained, _ = go_on(batches, engine, 8, training_s=lambda step: training_s, drains=False)
    assert [call[0] for call in engine.calls] == list(range(1, 9))
    for step, sampled in enumerate(trained, 1):
        _, of_step, first, last = sampled.responses
        assert of_step == step
        assert 0 <= step - 1 - last <= step - 1 - first <= k
    crossed = [first < last for sampled in trained for _, _, first, last in [sampled.responses]]
    assert any(crossed) or sampling_s < 0.2


def test_an_evaluation_waits_for_the_batch_under_way():
    engine = Sharing(lambda step: 0.1)
    trained, _ = go_on(started(engine, 1, always_drains=False), engine, 4)
    assert [sampled.responses[2:] for sampled in trained] == [(0, 0), (0, 0), (1, 1), (2, 2)]


def test_a_signal_to_another_process_is_noticed_on_any_thread():
    """The first own signal after it does not end the run at once."""
    signalled = SimpleNamespace(signal=lambda: signal.SIGTERM)
    with StopRequest(30.0, signalled) as stop, ThreadPoolExecutor(1) as pool:
        assert pool.submit(stop.is_requested).result(10)
        assert stop.signal == signal.SIGTERM
    with StopRequest(30.0, signalled) as stop:
        assert stop.is_requested()
        signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
