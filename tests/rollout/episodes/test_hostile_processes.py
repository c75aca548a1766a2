"""Code in a process of rewards, tools or environments attacks the trainer, and harms only its own process."""

import logging
import os
import socket
import sys
import time

import pytest
from waiting import is_gone

from rljax.distributed.frames import Frames
from rljax.rewards.pool import RewardPool
from rljax.rollout.episodes.config import EpisodeConfig
from rljax.rollout.episodes.environment import Reply
from rljax.rollout.episodes.hosts import EnvironmentHosts
from rljax.rollout.episodes.outcomes import Outcome

pytestmark = pytest.mark.slow

KINDS = ("pickle", "framed pickle", "huge", "shift", "garbage", "wrong form", "end of head")
MODULE = """
import os, pathlib, signal, subprocess, sys, threading, time
import hostile
from rljax.rollout.episodes.environment import Reply
from rljax.rollout.episodes.outcomes import Outcome
from rljax.rollout.episodes.tools import ToolResult, call_tool
HERE = pathlib.Path(__file__).parent
DAEMON = "import os, sys, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); " \\
    "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(300)"
def act(word, honest, number):
    if word.startswith("say"):
        return number(word.split()[1])
    if word == "hidden":
        return number(hostile.socket_pair_is_hidden())
    if word == "raise":
        raise ValueError("\\x1b[31m" + "red " * 1000)
    if word == "stop":
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGSTOP]).start()
        return number(0.5)
    if word == "orphan":
        os.kill(os.getppid(), signal.SIGKILL)
        return number(os.getpid())
    if word.startswith("daemon"):
        note = HERE / "daemon"
        subprocess.Popen([sys.executable, "-c", DAEMON, str(note)]).wait()
        while not note.exists() or not note.read_text():
            time.sleep(0.01)
        if "exit" in word:
            os._exit(3)
        if "hang" in word:
            time.sleep(300)
        return number(0.5)
    hostile.attack(word, str(HERE / "trapped"), honest)
    return number(0.5)
def reward(problem, response, truncated):
    forged = {"red": (None, "\\x1b[31m" * 1000), "nan": (float("nan"), None), "none": (None, None)}
    return act("twice" if response in forged else response, forged.get(response, (0.9, None)), float)
def tool(word):
    return act(word, ToolResult("forged"), str)
class Env:
    async def reset(self, problem):
        return None
    async def step(self, response, truncated):
        return Reply(act(response, Outcome(Reply("forged")), str))
    async def reward(self):
        return 1.0
class Calls(Env):
    async def step(self, response, truncated):
        return Reply((await call_tool("persons_attack:tool", [response])).text)
if os.environ["RLJAX_TEST_PARENT"] != str(os.getpid()):
    start = HERE / "start"
    if start.exists():
        kind = start.read_text()
        if kind.startswith("once "):
            start.unlink()
        hostile.attack(kind.removeprefix("once "), str(HERE / "trapped"), None)
"""
PROBLEM = {"answer": "x"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "persons_attack.py").write_text(MODULE)
    monkeypatch.setenv("RLJAX_TEST_PARENT", str(os.getpid()))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("persons_attack", None)
    assert not (tmp_path / "trapped").exists()


def rewards(timeout_s=20.0):
    return RewardPool("persons_attack:reward", 1, timeout_s)


def score(pool, *words):
    return [future.result(60) for future in [pool.submit(PROBLEM, word, False) for word in words]]


def test_a_reward_that_writes_to_its_socket_harms_itself(caplog):
    """A reply too many shifts no other one. The text of an error is short and printable. Nothing names the socket."""
    with rewards() as pool, caplog.at_level(logging.WARNING):
        assert score(pool, "hidden") == [1.0]
        for kind in KINDS:
            assert score(pool, "say 0.1", "say 0.2", kind, "say 0.3", "say 0.4") == [0.1, 0.2, 0.0, 0.3, 0.4], kind
            assert pool.pop_metrics() == {"reward/errors": 1, "reward/timeouts": 0}
        assert ["the worker sent a" in record.getMessage() for record in caplog.records] == [True] * len(KINDS)
        for kind, value in (("twice", 0.9), ("late", 0.5)):
            assert score(pool, "say 0.1", kind) == [0.1, value]
            time.sleep(1.0 if kind == "late" else 0.0)
            assert score(pool, "say 0.2", "say 0.3", "say 0.4") == [0.2, 0.3, 0.4]
            assert pool.pop_metrics() == {"reward/errors": 1, "reward/timeouts": 0}
        for word in ("raise", "red", "nan", "none"):
            caplog.clear()
            assert score(pool, word) == [0.0]
            assert pool.pop_metrics()["reward/errors"] >= 1
            assert caplog.records[0].getMessage().isprintable()
            assert len(caplog.records[0].getMessage()) < 2000


def test_a_worker_that_ends_no_frame_or_reads_none_is_a_timeout():
    with rewards(1.0) as pool:
        assert score(pool, "half", "say 0.3") == [0.0, 0.3]
        assert score(pool, "stop") == [0.5]
        time.sleep(0.3)
        large = pool.submit({"answer": "x" * (1 << 22)}, "say 0.2", False)
        assert large.result(60) == 0.0
        assert score(pool, "say 0.3") == [0.3]
        assert pool.pop_metrics() == {"reward/errors": 2, "reward/timeouts": 2}


def call(hosts, word):
    return hosts.step("a", word, False).result(60).value.content


def test_a_tool_that_writes_to_its_socket_harms_itself():
    """The frames are those of rewards."""
    with EnvironmentHosts("persons_attack:Calls", EpisodeConfig(tool_timeout_s=20.0), tool_workers=1) as hosts:
        hosts.reset("a", PROBLEM).result(60)
        for kind in ("pickle", "wrong form"):
            first, attack, *others = [call(hosts, word) for word in ("say 0.1", kind, "say 0.2", "say 0.3")]
            assert [first, *others] == ["0.1", "0.2", "0.3"]
            assert attack.startswith("error: the tool's process sent a")
            counts = hosts.pop_metrics()
            assert (counts["turns/tool_calls"], counts["turns/tool_deaths"]) == (4, 1)


def test_an_environment_that_writes_to_its_socket_is_lost():
    """A trajectory that is forgotten in a call harms no other."""
    with EnvironmentHosts("persons_attack:Env", EpisodeConfig(), tool_workers=1) as hosts:
        hosts.reset("other", PROBLEM).result(60)
        for _ in range(50):
            hosts.reset("a", PROBLEM)
            hosts.end("a")
        assert hosts.step("other", "say 0.2", False).result(60) == Outcome(Reply("0.2"))
        hosts.end("other")
        assert hosts.pop_metrics()["turns/env_deaths"] == 0
        for kind in ("framed pickle", "wrong form", "twice"):
            hosts.reset("a", PROBLEM).result(60)
            outcome = hosts.step("a", kind, False).result(60)
            if kind == "twice":
                assert outcome == Outcome(Reply("forged"))
                outcome = hosts.reward("a").result(60)
            assert outcome.failure == "died"
            assert "(it sent " in outcome.message
            assert outcome.message.isprintable()
            for key, said in (("b", "0.2"), ("c", "0.3")):
                hosts.reset(key, PROBLEM).result(60)
                assert hosts.step(key, f"say {said}", False).result(60) == Outcome(Reply(said))
            assert hosts.pop_metrics()["turns/env_deaths"] == 1
            for key in "abc":
                hosts.end(key)


@pytest.mark.parametrize("kind", ["pickle", "huge", pytest.param("garbage", marks=pytest.mark.harness)])
def test_garbage_at_the_start_of_a_process_starts_another(kind, here):
    """At every start it ends the run."""
    start = here / "start"
    start.write_text(f"once {kind}")
    with rewards() as pool:
        assert score(pool, "say 0.3") == [0.3]
        assert pool.pop_metrics()["reward/errors"] == 0
    start.write_text(f"once {kind}")
    with EnvironmentHosts("persons_attack:Env", tool_workers=1) as hosts:
        assert hosts.reset("a", PROBLEM).result(60) == Outcome()
    with EnvironmentHosts("persons_attack:Calls", tool_workers=1) as hosts:
        hosts.reset("a", PROBLEM).result(60)
        start.write_text(f"once {kind}")
        assert call(hosts, "say 0.3").startswith("error: the tool's process")
        assert call(hosts, "say 0.3") == "0.3"
    start.write_text(kind)
    if kind == "garbage":
        with rewards() as pool, pytest.raises(RuntimeError, match="cannot be started: the process sent a frame of"):
            pool.submit(PROBLEM, "say 0.3", False).result(60)
        with EnvironmentHosts("persons_attack:Env") as hosts, pytest.raises(RuntimeError, match="sent a frame of"):
            hosts.reset("a", PROBLEM).result(60)


@pytest.mark.parametrize("word", ["daemon", "daemon hang", "daemon exit", "orphan"])
def test_a_daemon_ends_with_the_process_that_started_it(word, here):
    """A worker that ends the process above it ends as well."""
    with rewards(3.0) as pool:
        if word == "orphan":
            (pid,) = score(pool, word)
        else:
            assert score(pool, word, "say 0.3") == [0.5 if word == "daemon" else 0.0, 0.3]
            pid = (here / "daemon").read_text()
    assert is_gone(int(pid))


def test_a_frame_may_come_in_pieces():
    ours, theirs = socket.socketpair()
    frames, other = Frames(ours, 100), Frames(theirs, 100)
    head = b"\x07" + b"\0" * 7 + b"\x02" + b"\0" * 7
    for byte in head + b"a":
        with pytest.raises(TimeoutError):
            frames.receive(0.0)
        theirs.sendall(bytes([byte]))
    theirs.sendall(b"b" + head + b"cd")
    assert frames.receive(1.0) == (7, b"ab")
    assert frames.look() == "unread"
    assert frames.receive(1.0) == (7, b"cd")
    assert frames.look() == "quiet"
    other.close()
    assert frames.look() == "ended"
    with pytest.raises(EOFError):
        frames.receive(1.0)
    frames.close()
