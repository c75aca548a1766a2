"""A reward is found by its name: a shipped one or a person's own. Everything else gives one clear line."""

import sys

import pytest

from rljax.rewards.pool import RewardPool
from rljax.rewards.resolve import SHIPPED, resolve_reward

MODULE = """
CONSTANT = 3

def three(problem, response, truncated):
    return 0.5

def more(problem, response, truncated, scale=2.0, **options):
    return scale

def any_number(*arguments):
    return float(len(arguments))

def two(problem, response):
    return 0.0

def four(problem, response, truncated, scale):
    return 0.0

class Graded:
    @staticmethod
    def score(problem, response, truncated):
        return 0.75
"""


@pytest.fixture(autouse=True)
def rewards_module(tmp_path, monkeypatch):
    (tmp_path / "named_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("import nothing_of_that_name")
    (tmp_path / "raising_rewards.py").write_text("raise RuntimeError('two\\nlines')")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("named_rewards", "broken_rewards", "raising_rewards"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_worker_can_import_every_shipped_reward(name):
    if name.startswith("reasoning_gym"):
        pytest.importorskip("reasoning_gym")
    assert callable(resolve_reward(name))


def test_the_shipped_rewards_are_few():
    assert set(SHIPPED) == {"addition", "swaps", "math", "reasoning_gym", "reasoning_gym_library"}


@pytest.mark.parametrize(
    ("name", "reward"), [("three", 0.5), ("more", 2.0), ("any_number", 3.0), ("Graded.score", 0.75)]
)
def test_a_dotted_path_is_the_function_itself(name, reward):
    assert resolve_reward(f"named_rewards:{name}")({}, "", False) == reward
    with RewardPool(f"named_rewards:{name}", 1) as pool:
        assert pool.submit({}, "", False).result(timeout=60) == reward


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "",
            "reward '' is none of addition, math, reasoning_gym, reasoning_gym_library, swaps, package.module:function",
        ),
        ("maths", "reward 'maths' is none of addition, math, reasoning_gym, reasoning_gym_library, swaps, package."),
        ("named_rewards.three", "is none of"),
        (":three", "is not of the form package.module:name or FILE.py:name"),
        ("nowhere.at_all:three", "cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("broken_rewards:f", "cannot be imported: ModuleNotFoundError: No module named 'nothing_of_that_name' (/"),
        ("raising_rewards:f", "raising_rewards.py:1)"),
        ("raising_rewards:f", "cannot be imported: RuntimeError: two lines (/"),
        ("named_rewards:missing", "module 'named_rewards' has no attribute 'missing'"),
        ("named_rewards:CONSTANT", "'named_rewards:CONSTANT' is int, not a function"),
        (
            "named_rewards:two",
            "takes (problem, response); a reward takes (problem, response, truncated), verl's (data_",
        ),
        ("named_rewards:four", "takes (problem, response, truncated, scale); a reward takes (problem, response, trunc"),
    ],
)
def test_what_is_no_reward_is_said_in_one_line(path, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        resolve_reward(path)
    assert message in str(raised.value)
    assert repr(path) in str(raised.value)
    assert "\n" not in str(raised.value)
