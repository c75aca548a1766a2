"""Tools run isolated. Each failure becomes a text with a count of its own, and waiting for a process is no failure."""

import asyncio
import sys
import time

import pytest
from counting_environments import play

from rljax.rollout.episodes.config import MAX_REPLY_CHARS, EpisodeConfig
from rljax.rollout.episodes.environment import Reply
from rljax.rollout.episodes.hosts import EnvironmentHosts
from rljax.rollout.episodes.outcomes import Outcome
from rljax.rollout.episodes.tool_calls import ToolCall
from rljax.rollout.episodes.tool_environment import ToolEnvironment
from rljax.rollout.episodes.tools import ToolResult, call_tool

pytestmark = pytest.mark.slow

MODULE = """
import asyncio, os, time
from rljax.rollout.episodes.environment import Reply
from rljax.rollout.episodes.tool_environment import ToolEnvironment
from rljax.rollout.episodes.tools import call_tool
kept = []
def add(a: float, b: float):
    return a + b
def slow(seconds):
    time.sleep(seconds)
    return os.getpid()
def crash():
    os._exit(3)
def hoard():
    while True:
        kept.append(bytearray(1 << 20))
def flood(size):
    return "x" * size
def table():
    return {"rows": [1, None], "name": "é"}
async def later():
    await asyncio.sleep(0.01)
    return "later"
def equals(problem, response, truncated):
    return float(response == problem["answer"] and not truncated)
class Tools(ToolEnvironment):
    scored_by = "persons_tools:equals"
    tools = {name: f"persons_tools:{name}" for name in "add slow crash hoard flood table later missing".split()}
class Late(Tools):
    scored_by = "persons_late_tools:equals"
class Direct:
    async def reset(self, problem):
        self.calls = problem.get("calls")
    async def step(self, response, truncated):
        results = [await call_tool(__name__ + ":slow", {"seconds": 0.4}) for _ in range(self.calls)]
        return Reply(results[-1].text)
    async def reward(self):
        return 0.0
class Unreadable:
    def __reduce__(self):
        return int, ("no number",)
class Unsent(Direct):
    async def step(self, response, truncated):
        numbers = [1, 2]
        asked = asyncio.ensure_future(call_tool(__name__ + ":add", numbers))
        await asyncio.sleep(0)
        numbers.append(3)
        results = [await asked, *[await call_tool(__name__ + ":add", [1, odd]) for odd in (Unreadable(), lambda: 0)]]
        return Reply("\\n".join(result.text for result in results))
"""
PAIR = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


@pytest.fixture(autouse=True)
def tools_module(tmp_path, monkeypatch):
    (tmp_path / "persons_tools.py").write_text(MODULE)
    late = "import time; time.sleep(1.0); from persons_tools import equals"
    (tmp_path / "persons_late_tools.py").write_text(late)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("persons_tools", None)


def hosts_of(name, tool_workers=None, **options):
    return EnvironmentHosts(f"persons_tools:{name}", EpisodeConfig(**options), tool_workers=tool_workers)


def calls_of(*calls):
    texts = (f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
    return "".join(f"<tool_call>{text}</tool_call>" for text in texts)


def texts(hosts, key, turn):
    outcome = hosts.step(key, turn, False).result(60)
    assert outcome.failure is None, outcome
    return [message["content"] for message in outcome.value.content]


def tool_counts(hosts):
    return {name.removeprefix("turns/"): count for name, count in hosts.pop_metrics().items() if count}


def test_results_and_failures_are_texts_and_counted_apart():
    """Tools that hang, crash, flood or eat memory are bounded."""
    with hosts_of("Tools", tool_workers=2, tool_timeout_s=2.0, memory_gib=0.125) as hosts:
        assert hosts.reset(0, {"answer": "3"}).result(60) == Outcome(None)
        good = calls_of(("add", '{"a": 1, "b": 2}'), ("table", "{}"), ("later", "{}"))
        assert texts(hosts, 0, good) == ["3", '{"rows": [1, null], "name": "é"}', "later"]
        assert tool_counts(hosts) == {"tool_calls": 3}
        wrong = calls_of(("add", '{"a": 1}'), ("add", '{"a": 1, "b": "2"}'), ("missing", "{}"), ("other", "{}"))
        assert texts(hosts, 0, wrong + "<tool_call>add</tool_call>") == [
            "error: TypeError: add() missing 1 required positional argument: 'b'",
            "error: TypeError: unsupported operand type(s) for +: 'int' and 'str'",
            "error: AttributeError: module 'persons_tools' has no attribute 'missing'",
            "error: there is no tool 'other', only add, slow, crash, hoard, flood, table, later, missing",
            "error: a call is not JSON (Expecting value)",
        ]
        assert tool_counts(hosts) == {"tool_calls": 5, "tool_errors": 5}
        assert texts(hosts, 0, calls_of(("flood", '{"size": 100000000}'))) == ["x" * MAX_REPLY_CHARS]
        assert tool_counts(hosts) == {"tool_calls": 1, "tool_cut": 1}
        bad = calls_of(("slow", '{"seconds": 300}'), ("crash", "{}"), ("hoard", "{}"), ("flood", '{"size": 10}'))
        assert texts(hosts, 0, bad) == [
            "error: the tool took more than 2 s",
            "error: the tool's process died (exit status 3)",
            "error: the tool ran out of memory",
            "x" * 10,
        ]
        assert tool_counts(hosts) == {"tool_calls": 4, "tool_timeouts": 1, "tool_deaths": 2}
        assert texts(hosts, 0, PAIR) == ["3"]


def test_arguments_are_those_of_the_call_and_may_be_refused():
    with hosts_of("Unsent", tool_workers=1) as hosts:
        hosts.reset(0, {}).result(60)
        added, unread, unsent = hosts.step(0, "x", False).result(60).value.content.split("\n")
        assert added == "3"
        assert unread == "error: ValueError: invalid literal for int() with base 10: 'no number'"
        assert unsent.startswith("error: ")
        assert "lambda" in unsent
        assert tool_counts(hosts) == {"tool_calls": 3, "tool_errors": 2}


def test_waiting_for_a_free_process_takes_no_time():
    """Six calls of 0.4 s in one process take 2.4 s, though each may take 1 s. Four in a row are too long for a step."""
    with hosts_of("Direct", tool_workers=1, call_timeout_s=1.0) as hosts:
        start = time.monotonic()
        for future in [hosts.reset(key, {"calls": 1}) for key in range(6)]:
            future.result(60)
        outcomes = [future.result(60) for future in [hosts.step(key, "", False) for key in range(6)]]
        assert [outcome.failure for outcome in outcomes] == [None] * 6
        assert len({outcome.value.content for outcome in outcomes}) == 1
        assert time.monotonic() - start > 2.4
        hosts.reset("long", {"calls": 4}).result(60)
        assert hosts.step("long", "", False).result(60) == Outcome(None, "timeout", "step took more than 1 s")
        counts = hosts.pop_metrics()
        assert (counts["turns/env_timeouts"], counts["turns/tool_timeouts"]) == (1, 0)


def test_an_answer_without_a_call_is_scored_by_the_named_reward():
    """The time of the reward's import does not count."""
    with hosts_of("Tools") as hosts:
        for key, answer, truncated, expected in (("a", "3", False, 1.0), ("b", "4", False, 0.0), ("c", "3", True, 0.0)):
            hosts.reset(key, {"answer": "3"}).result(60)
            assert texts(hosts, key, PAIR) == ["3"]
            assert hosts.step(key, answer, truncated).result(60) == Outcome(Reply(None, True))
            assert hosts.reward(key).result(60) == Outcome(expected)
        hosts.reset("none", {"question": ""}).result(60)
        assert hosts.reward("none").result(60).failure == "raised"
        assert tool_counts(hosts) == {"tool_calls": 3, "env_errors": 1}
    with hosts_of("Late", tool_timeout_s=0.5) as hosts:
        hosts.reset("late", {"answer": "3"}).result(60)
        assert hosts.step("late", "3", False).result(60) == Outcome(Reply(None, True))
        assert hosts.reward("late").result(60) == Outcome(1.0)


class Text(ToolEnvironment):
    tools = {"now": "time:time", "join": "posixpath:join"}  # noqa: RUF012 - a person writes it so
    scored_by = "addition"
    max_calls = 2

    def parse(self, response):
        return [ToolCall("join", {"a": word}) for word in response.split()[1:]]

    def write(self, results):
        return "".join(f"[{result.text}]" for result in results)


def test_a_test_may_use_an_environment_without_hosts():
    replies, reward = play(Text(), {"answer": "5"}, "use x y z", "5")
    assert replies == [Reply("[x][y][error: more than 2 calls in one turn]"), Reply(None, True)]
    assert reward == 1.0
    failed = asyncio.run(call_tool("posixpath:join", {}))
    assert failed == ToolResult("error: TypeError: join() missing 1 required positional argument: 'a'", "error")
