"""Environments that misbehave cost what they must and no more. Thousands of them run at once with few threads."""

import logging
import sys
import threading
import time
from concurrent.futures import CancelledError

import pytest
from waiting import is_gone

from rljax.rollout.episodes.config import MAX_REPLY_CHARS, EpisodeConfig
from rljax.rollout.episodes.environment import Reply
from rljax.rollout.episodes.hosts import EnvironmentHosts
from rljax.rollout.episodes.outcomes import Outcome

pytestmark = pytest.mark.slow

# An environment that can misbehave in many ways. The text of the response selects one of them.
ENVIRONMENTS = """
import asyncio, inspect, os, subprocess, sys, time
from rljax.rollout.episodes.environment import Reply
kept = []
HEAVY = ("jax", "flax", "grain", "transformers", "orbax")
LONG = [{"role": "tool", "content": "y" * 70}, {"role": "user", "content": "z" * (1 << 15)}]
REPLIES = {
    "nothing": lambda: None,
    "number": lambda: Reply(5),
    "maybe": lambda: Reply("x", None),
    "roles": lambda: Reply([{"role": "tool"}]),
    "broken text": lambda: Reply("a\\ud800b"),
    "flood": lambda: Reply("x" * (1 << 27)),
    "flood messages": lambda: Reply(LONG),
    "pid": lambda: Reply(str(os.getpid())),
    "modules": lambda: Reply(",".join(name for name in HEAVY if name in sys.modules)),
    "SystemExit": lambda: sys.exit(0),
    "exit": lambda: os._exit(3),
    "fork": lambda: Reply("forked", not os.fork()),
    "block": lambda: time.sleep(300),
    "count": lambda: 9 ** 9 ** 9,
}
class Env:
    def __init__(self):
        self.turns, self.notes = 0, []
    async def reset(self, problem):
        asked = problem.get("reset", "")
        await asyncio.sleep({"slow exit": 0.3, "wait": 0.5}.get(asked, 0.0))
        if "exit" in asked:
            os._exit(4)
        self.problem = problem
        return problem.get("first")
    async def step(self, response, truncated):
        self.turns += 1
        if response in REPLIES:
            return REPLIES[response]()
        act = getattr(self, "do_" + response.replace(" ", "_"), None)
        return Reply(f"{response} {self.turns} {truncated}", self.turns == 3) if act is None else await act()
    async def reward(self):
        wrong = {"nan": float("nan"), "text": "1.0", "large": 1e39, "huge": -(10**400)}
        return wrong.get(self.problem.get("reward"), self.turns / 4)
    async def do_raise(self):
        raise ValueError("no\\nsuch")
    async def do_hang(self):
        await asyncio.sleep(300)
    async def do_deaf(self):
        while True:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                pass
    async def do_block_beside(self):
        asyncio.get_running_loop().create_task(self.step("block", False))
        await asyncio.sleep(300)
    async def do_hoard(self):
        while True:
            self.notes.append(bytearray(1 << 20))
    async def do_hoard_and_keep(self):
        while True:
            kept.append(bytearray(1 << 20))
    async def do_wait(self, seconds=0.3):
        await asyncio.sleep(seconds)
        return Reply("waited")
    async def do_long_wait(self):
        return await self.do_wait(1.2)
    async def do_ask(self):
        task = asyncio.get_running_loop().create_task(self.do_wait())
        return Reply(inspect.getcoroutinestate(task.get_coro()))
    async def do_child(self):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], process_group=0)
        return Reply(f"{os.getpid()} {child.pid}")
"""


@pytest.fixture(autouse=True)
def environments_module(tmp_path, monkeypatch):
    (tmp_path / "persons_environments.py").write_text(ENVIRONMENTS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("persons_environments", None)


def hosts_of(workers=1, call_timeout_s=20.0, **options):
    limits = EpisodeConfig(workers=workers, call_timeout_s=call_timeout_s, **options)
    return EnvironmentHosts("persons_environments:Env", limits)


def counts(hosts):
    """Returns the counts that are not 0."""
    return {name.removeprefix("turns/"): count for name, count in hosts.pop_metrics().items() if count}


def begun(hosts, *keys):
    for future in [hosts.reset(key, {}) for key in keys]:
        assert future.result(60) == Outcome(None)


def test_a_trajectory_goes_through_its_calls():
    """A long reply is cut and counted. A fork answers for no other, and a trajectory is not asked twice at once."""
    messages = [{"role": "user", "content": "hello"}]
    with hosts_of() as hosts:
        assert hosts.reset("a", {"first": "begin: "}).result(60) == Outcome("begin: ")
        assert hosts.reset("b", {"first": messages}).result(60) == Outcome(messages)
        begun(hosts, "c")
        assert hosts.step("a", "x", False).result(60) == Outcome(Reply("x 1 False", False))
        assert hosts.step("b", "y", True).result(60) == Outcome(Reply("y 1 True", False))
        assert hosts.step("a", "z", False).result(60) == Outcome(Reply("z 2 False", False))
        assert hosts.step("a", "z", False).result(60) == Outcome(Reply("z 3 False", True))
        assert [hosts.reward(key).result(60) for key in "abc"] == [Outcome(0.75), Outcome(0.25), Outcome(0.0)]
        assert hosts.step("c", "ask", False).result(60).value == Reply("CORO_CREATED")  # as anyio asks its tasks
        hosts.end("a")
        hosts.end("never begun")
        with pytest.raises(KeyError):
            hosts.reward("a")
        begun(hosts, "b")
        assert hosts.reward("b").result(60) == Outcome(0.0)
        assert set(hosts.pop_metrics().values()) == {0}
        assert hosts.step("b", "flood", False).result(60) == Outcome(Reply("x" * MAX_REPLY_CHARS), cut=True)
        messages = [{"role": "tool", "content": "y" * 70}, {"role": "user", "content": "z" * (MAX_REPLY_CHARS - 70)}]
        assert hosts.step("b", "flood messages", False).result(60) == Outcome(Reply(messages), cut=True)
        assert hosts.step("b", "broken text", False).result(60) == Outcome(Reply("a?b"))
        said = f"reset returned a prompt of more than {MAX_REPLY_CHARS} characters"
        assert hosts.reset("d", {"first": "x" * (MAX_REPLY_CHARS + 1)}).result(60) == Outcome(None, "bad_reply", said)
        assert counts(hosts) == {"cut_replies": 2, "env_errors": 1}
        begun(hosts, "e", "f")
        assert hosts.step("e", "fork", False).result(60) == Outcome(Reply("forked"))
        assert [hosts.step(key, "x", False).result(60).value.content for key in "ef"] == ["x 2 False", "x 1 False"]
        first = hosts.step("f", "wait", False)
        with pytest.raises(ValueError, match="trajectory 'f' is asked for reward before step ended"):
            hosts.reward("f")
        hosts.end("f")
        with pytest.raises(CancelledError):
            first.result(timeout=1)


FAILURES = {
    "raise": ("raised", "step: ValueError: no such"),
    "SystemExit": ("raised", "step: SystemExit: 0"),
    "hoard": ("raised", "step: MemoryError"),
    "nothing": ("bad_reply", "step must return Reply(content, done), got a value of type NoneType"),
    "maybe": ("bad_reply", "step must return Reply(content, done), got a value of type Reply"),
    "number": ("bad_reply", "the content must be a text, a list of messages or None, got a value of type int"),
    "roles": ("bad_reply", "a message must have the texts role and content, got the keys ['role']"),
}


def test_a_failure_costs_one_trajectory_alone(caplog):
    """A reward that is no finite float32 is one, too."""
    with hosts_of(memory_gib=0.25) as hosts, caplog.at_level(logging.WARNING):
        for response, (failure, message) in FAILURES.items():
            begun(hosts, "bad", "good")
            failed = hosts.step("bad", response, False).result(60)
            assert failed == Outcome(None, failure, message)
            assert hosts.step("good", "x", False).result(60) == Outcome(Reply("x 1 False", False))
            assert hosts.reward("bad").result(60) == failed
            assert counts(hosts) == {"env_errors": 1}
        assert counts(hosts) == {}
        said = [f"environment persons_environments:Env, trajectory bad: {message}" for _, message in FAILURES.values()]
        assert [record.getMessage() for record in caplog.records] == said
        for reward in ("nan", "text", "large", "huge"):
            hosts.reset("a", {"reward": reward}).result(60)
            outcome = hosts.reward("a").result(60)
            assert outcome.failure == "bad_reply"
            assert outcome.message.startswith("reward must return a finite float32, got ")
        assert counts(hosts) == {"env_errors": 4}


def test_a_call_that_awaits_too_long_is_cancelled():
    with hosts_of(call_timeout_s=1.0) as hosts:
        begun(hosts, "hang", "deaf", "quick")
        start = time.monotonic()
        slow = [hosts.step(key, key, False) for key in ("hang", "deaf")]
        assert hosts.step("quick", "wait", False).result(60) == Outcome(Reply("waited"))
        for each in slow:
            assert not slow[0].done() or each is slow[1]
            assert each.result(60) == Outcome(None, "timeout", "step took more than 1 s")
        assert 0.9 < time.monotonic() - start < 5.0
        assert hosts.step("quick", "x", False).result(60).failure is None
        assert counts(hosts) == {"env_timeouts": 2}


@pytest.mark.parametrize("response", ["block beside", pytest.param("count", marks=pytest.mark.harness)])
def test_a_call_that_blocks_is_named_and_others_are_not_blamed(response, caplog):
    with hosts_of(2, call_timeout_s=1.5) as hosts, caplog.at_level(logging.WARNING):
        begun(hosts, *range(6))
        pids = {key: hosts.step(key, "pid", False).result(60).value.content for key in range(6)}
        beside = [key for key in range(1, 6) if pids[key] == pids[0]]
        elsewhere = [key for key in range(6) if pids[key] != pids[0]]
        assert len(beside) == 2
        waiting = {key: hosts.step(key, "long wait", False) for key in (*beside, *elsewhere)}
        said = "step ran for more than 1.5 s without awaiting, so its process was ended"
        assert hosts.step(0, response, False).result(60) == Outcome(None, "timeout", said)
        assert [waiting[key].result(60).value for key in elsewhere] == [Reply("waited")] * 3
        lost = Outcome(None, "died", "the process of the environment was stuck in code of trajectory 0")
        assert [waiting[key].result(60) for key in beside] == [lost] * 2
        begun(hosts, 0)
        assert hosts.step(0, "x", False).result(60).failure is None
        assert counts(hosts) == {"env_timeouts": 1, "env_deaths": 2}
    assert "trajectory 0: step ran for more" in caplog.records[0].getMessage()


def test_a_crash_loses_the_trajectories_of_its_process():
    """A reset is sent again when another one killed its process."""
    with hosts_of(memory_gib=0.25) as hosts:
        for response, status in (("exit", 3), ("hoard and keep", 1)):
            begun(hosts, "bad", "idle", "waiting")
            waiting = hosts.step("waiting", "long wait", False)
            died = Outcome(None, "died", f"the process died in step (exit status {status})")
            full = Outcome(None, "raised", "step: MemoryError")
            assert hosts.step("bad", response, False).result(60) == (died if response == "exit" else full)
            assert waiting.result(60).failure == "died"
            assert f"died (exit status {status})" in hosts.reward("idle").result(60).message
            assert sum(counts(hosts).values()) == 3
        problems = {0: "wait", 1: "slow exit", 2: "wait", 3: "exit", 4: "wait"}
        futures = [hosts.reset(key, {"reset": reset}) for key, reset in problems.items()]
        died = Outcome(None, "died", "the process died in reset (exit status 4)")
        assert [future.result(60) for future in futures] == [Outcome(None), died, Outcome(None), died, Outcome(None)]
        assert counts(hosts) == {"env_deaths": 2}


def test_thousands_run_at_once_without_a_thread_each():
    before = threading.active_count()
    with hosts_of(2) as hosts:
        keys = range(2000)
        begun(hosts, *keys)
        start = time.monotonic()
        futures = [hosts.step(key, "wait", False) for key in keys]
        assert threading.active_count() - before <= 4
        assert {future.result(60) for future in futures} == {Outcome(Reply("waited"))}
        assert time.monotonic() - start < 30.0  # the 2,000 calls would take 600 s one after the other
        assert {future.result(60) for future in [hosts.reward(key) for key in keys]} == {Outcome(0.25)}
        assert set(hosts.pop_metrics().values()) == {0}
    assert threading.active_count() <= before


def test_close_ends_every_process_and_cancels_what_waits():
    hosts = hosts_of(2)
    begun(hosts, *range(4))
    assert hosts.step(3, "modules", False).result(60) == Outcome(Reply(""))  # a child imports neither JAX nor its like
    pids = [pid for key in range(2) for pid in hosts.step(key, "child", False).result(60).value.content.split()]
    assert len(set(pids)) == 4
    waiting = [hosts.step(2, "hang", False), hosts.step(3, "block", False)]
    time.sleep(0.2)
    start = time.monotonic()
    hosts.close()
    assert time.monotonic() - start < 5.0
    assert all(is_gone(pid) for pid in pids)
    for future in waiting:
        with pytest.raises(CancelledError):
            future.result(timeout=1)
    hosts.close()
    for call in (lambda: hosts.reset(0, {}), lambda: hosts.step(2, "x", False), lambda: hosts.reward(2)):
        with pytest.raises(RuntimeError, match="the environments are closed"):
            call()
