"""The pool gives right rewards in bounded time. Damage stays with one response, and nothing is left."""

import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from waiting import is_gone

from rljax.rewards.pool import RewardPool

pytestmark = pytest.mark.slow

# A reward function that can misbehave in many ways. The text of the response selects one of them.
REWARDS = """
import os, signal, subprocess, sys, threading, time

kept = []

class Ending(BaseException):
    pass

class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no words")

ERRORS = {"raise": ValueError("no\\nsuch"), "SystemExit": SystemExit(0), "KeyboardInterrupt": KeyboardInterrupt()}
ERRORS |= {"Ending": Ending("of all"), "Speechless": Speechless()}

def hoard():
    while True:
        kept.append(bytearray(1 << 20))

def act(problem, response, truncated):
    if response == "hang":
        time.sleep(300)
    if response == "hang deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
        while True:
            pass
    if response == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if response in ERRORS:
        raise ERRORS[response]
    if response == "memory":
        return float(len(bytearray(3 << 30)))
    if response == "hoard and keep":
        hoard()
    if response == "hoard and go on":
        while True:
            try:
                hoard()
            except MemoryError:
                pass
    if response == "huge string":
        return "x" * (1 << 28)
    if response == "thread":
        threading.Thread(target=time.sleep, args=(300,)).start()
    if response == "gigabyte":
        for _ in range(16):
            print("x" * (1 << 26), flush=True)
    if response == "fork" and os.fork() == 0:
        return 0.25
    if response == "asked to end":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        return 0.75
    if response == "ends its fork":
        child = os.fork()
        if child == 0:
            time.sleep(300)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if response == "ends its program":
        child = subprocess.Popen(["sleep", "300"])
        child.terminate()
        return float(child.wait())
    if response == "print":
        print("a reward may print")
    if response == "pid":
        return os.getpid()
    if response == "alarm":
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(20)
        except TimeoutError:
            return -0.5
    if response == "modules":
        return float(any(name.split(".")[0] in ("jax", "flax", "grain", "transformers") for name in sys.modules))
    return float(problem["answer"] == response) + 0.5 * truncated

def breaks_in_workers(problem, response, truncated):
    return 0.0

def ring(number, frame):
    raise TimeoutError

if os.environ.get("RLJAX_TEST_PARENT") != str(os.getpid()):
    del breaks_in_workers
    signal.signal(signal.SIGALRM, ring)
"""
PROBLEM = {"answer": "right"}


@pytest.fixture(autouse=True)
def rewards_module(tmp_path, monkeypatch):
    (tmp_path / "persons_rewards.py").write_text(REWARDS)
    monkeypatch.setenv("RLJAX_TEST_PARENT", str(os.getpid()))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("persons_rewards", None)


def pool_of(workers, timeout_s=20.0, **options):
    return RewardPool("persons_rewards:act", workers, timeout_s, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_rewards_come_back_to_their_responses(workers):
    with pool_of(workers) as pool:
        answers = [("right", False), ("wrong", False), ("right", True), ("wrong", True), ("print", False)]
        futures = [pool.submit(PROBLEM, response, truncated) for response, truncated in answers * 20]
        assert [future.result(timeout=60) for future in futures] == [1.0, 0.0, 1.5, 0.5, 0.0] * 20
        assert pool.pop_metrics() == {"reward/errors": 0, "reward/timeouts": 0}


@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_scored_earns_zero_and_is_an_error(workers, caplog):
    with pool_of(workers) as pool, caplog.at_level(logging.WARNING):
        assert pool.submit(PROBLEM, "raise", False).result(timeout=60) == 0.0
        assert pool.submit(PROBLEM, "wrong", False).result(timeout=60) == 0.0
        assert pool.pop_metrics() == {"reward/errors": 1, "reward/timeouts": 0}
        assert pool.pop_metrics() == {"reward/errors": 0, "reward/timeouts": 0}
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    assert re.search(r"ValueError: no such \(/.*persons_rewards\.py:\d+\)$", record.getMessage())


# What a response costs: errors, timeouts, whether its worker is replaced; and the limits of the pool. A reward that
# keeps its memory would leave none to the next response. One may leave a thread, a gigabyte of output, or a process.
COSTS = {
    **dict.fromkeys(("segv", "KeyboardInterrupt"), (1, 0, True, {})),
    "hang deaf": (1, 1, True, {"timeout_s": 1.0}),
    "memory": (1, 0, True, {"memory_gib": 1.0}),
    "hoard and keep": (1, 0, True, {"memory_gib": 0.125}),
    "hoard and go on": (1, 1, True, {"memory_gib": 0.125, "timeout_s": 2.0}),
    **dict.fromkeys(("SystemExit", "Ending", "Speechless", "huge string"), (1, 0, False, {})),
    **dict.fromkeys(("thread", "gigabyte", "fork"), (0, 0, False, {})),
}


@pytest.mark.parametrize("response", COSTS)
def test_whatever_a_reward_does_costs_only_itself(response, capfd):
    errors, timeouts, is_replaced, limits = COSTS[response]
    with pool_of(1, **limits) as pool:
        texts = ("pid", "right", response, "right", "wrong", "right", "pid")
        first, *rewards, second = (future.result(60) for future in [pool.submit(PROBLEM, t, False) for t in texts])
        assert rewards == [1.0, 0.0, 1.0, 0.0, 1.0]
        assert (first != second) == is_replaced
        assert not is_replaced or is_gone(int(first))
        assert pool.pop_metrics() == {"reward/errors": errors, "reward/timeouts": timeouts}
    assert is_gone(int(second))
    assert capfd.readouterr().out == ""


def test_every_response_is_bounded_in_time_and_others_pass_by():
    with pool_of(2, timeout_s=1.0) as pool:
        pool.submit(PROBLEM, "right", False).result(timeout=60)
        start = time.monotonic()
        hanging = pool.submit(PROBLEM, "hang", False)
        passing = [pool.submit(PROBLEM, "right", False) for _ in range(20)]
        assert [future.result(timeout=60) for future in passing] == [1.0] * 20
        assert not hanging.done()
        assert hanging.result(timeout=60) == 0.0
        assert 0.9 < time.monotonic() - start < 5.0
        assert pool.pop_metrics() == {"reward/errors": 1, "reward/timeouts": 1}


def test_a_worker_that_is_asked_to_end_finishes_its_response():
    """All processes of a Slurm step are asked to end while the trainer finishes its step. An idle worker may die."""
    with pool_of(1) as pool:
        os.kill(int(pool.submit(PROBLEM, "pid", False).result(timeout=60)), 9)
        time.sleep(0.2)
        responses = ["asked to end", "ends its fork", "ends its program", "right", "alarm", "alarm"]
        rewards = [pool.submit(PROBLEM, response, False).result() for response in responses]
        assert rewards == [0.75, -signal.SIGTERM, -signal.SIGTERM, 1.0, -0.5, -0.5]  # a module's own handler stays
        assert pool.pop_metrics() == {"reward/errors": 0, "reward/timeouts": 0}


def test_in_process_only_ctrl_c_ends_the_run():
    with pool_of(0) as pool:
        for response in ("SystemExit", "Ending", "Speechless"):
            assert pool.submit(PROBLEM, response, False).result() == 0.0
        assert pool.pop_metrics()["reward/errors"] == 3
        with pytest.raises(KeyboardInterrupt):
            pool.submit(PROBLEM, "KeyboardInterrupt", False)


def test_close_ends_every_process_and_cancels_what_waits():
    pool = pool_of(2, timeout_s=60.0)
    pids = {int(pool.submit(PROBLEM, "pid", False).result(timeout=60)) for _ in range(20)}
    futures = [pool.submit(PROBLEM, "hang", False) for _ in range(6)]
    time.sleep(0.2)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 5.0
    assert all(is_gone(pid) for pid in pids)
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(timeout=1)
    assert pool.pop_metrics()["reward/errors"] == 0
    pool.close()
    with pytest.raises(RuntimeError, match="the reward pool is closed"):
        pool.submit(PROBLEM, "right", False)


def test_a_cancelled_future_is_skipped():
    with pool_of(1, timeout_s=1.0) as pool:
        hanging, waiting, last = (pool.submit(PROBLEM, text, False) for text in ("hang", "segv", "right"))
        assert waiting.cancel()
        assert hanging.result(timeout=60) == 0.0
        assert last.result(timeout=60) == 1.0
        assert pool.pop_metrics() == {"reward/errors": 1, "reward/timeouts": 1}


def test_workers_that_cannot_start_stop_the_pool():
    with RewardPool("persons_rewards:breaks_in_workers", 1) as pool:
        futures = [pool.submit(PROBLEM, "right", False) for _ in range(3)]
        for future in futures:
            with pytest.raises(RuntimeError, match=r"cannot be started: .* has no attribute 'breaks_in_workers'"):
                future.result(timeout=60)


SCRIPT = """
import jax, os, sys, time
sys.path.insert(0, sys.argv[1])
from rljax.rewards.pool import RewardPool

if __name__ == "__main__":
    pool = RewardPool("persons_rewards:act", 2, 1.0)
    print(pool.submit({"answer": "x"}, "modules", False).result(timeout=60))
    print(int(pool.submit({"answer": "x"}, "pid", False).result(timeout=60)), flush=True)
    if sys.argv[2] == "killed":
        for _ in range(2):
            pool.submit({"answer": "x"}, "hang", False)
        time.sleep(0.5)
        os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("ending", ["killed", pytest.param("without close", marks=pytest.mark.harness)])
def test_workers_have_no_jax_and_end_with_their_parent(tmp_path, ending):
    script = tmp_path / "trainer.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), str(tmp_path), ending]
    # This also waits for the workers, which hold the output open. A worker that hangs would do so for 300 s.
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode == (-9 if ending == "killed" else 0), done.stderr
    has_jax, pid = done.stdout.split()
    assert has_jax == "0.0"
    # An idle worker sees the end of the pipe at once. A worker that hangs ends by its own alarm.
    assert is_gone(pid, 15.0)


def test_toys_run_in_process_and_mathematics_in_workers():
    def children():
        return len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    def workers(*arguments):
        before = children()
        with RewardPool(*arguments):
            return children() - before

    assert workers("addition") == workers("swaps") == 0
    assert workers("math") == max(1, min(8, os.cpu_count() - 1))
    assert workers("math", 2) == 2
    with pytest.raises(ValueError, match="workers must not be negative, got -1"):
        RewardPool("addition", workers=-1)
    for timeout_s in (0.0, float("inf")):
        with pytest.raises(ValueError, match=f"timeout_s must be positive and finite, got {timeout_s}"):
            RewardPool("addition", timeout_s=timeout_s)
