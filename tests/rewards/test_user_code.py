"""A reward is found by its name: a shipped one, or a person's code in a module or a file. Else there is one line."""

import sys

import pytest

from rljax import user_code
from rljax.rewards.pool import RewardPool
from rljax.rewards.resolve import SHIPPED, resolve_reward, score
from rljax.rollout.episodes.hosts import EnvironmentHosts

REWARD = """
import helper_of_rewards

def reward(problem, response, truncated):
    return helper_of_rewards.VALUE

def fails(problem, response, truncated):
    import json
    return json.loads(response)

def large(problem, response, truncated):
    return float(response)
"""
MODULE = """
CONSTANT = 3

def three(problem, response, truncated):
    return 0.5

def two(problem, response):
    return 0.0

class Graded:
    @staticmethod
    def score(problem, response, truncated):
        return 0.75
"""
ENVIRONMENT = """
from rljax.rollout.episodes.tool_environment import ToolEnvironment

class Adds(ToolEnvironment):
    tools = {"add": "./code/envs.py:add"}
    scored_by = "./code/envs.py:reward"

def add(a, b):
    return a + b

def reward(solution_str, ground_truth):
    return 0.5 if solution_str == ground_truth else 0.0
"""


FILES = {
    **{"code/my-rewards.py": REWARD, "code/helper_of_rewards.py": "VALUE = 0.75", "code/envs.py": ENVIRONMENT},
    **{"code/ends.py": "import sys\nsys.exit(3)", "code/halved.py": "def f(:", "named_rewards.py": MODULE},
    **{"broken_rewards.py": "import nothing_of_that_name", "raising_rewards.py": "raise RuntimeError('two\\nlines')"},
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The current directory, which is not in ``sys.path``, as under the console script."""
    (tmp_path / "code").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("named_rewards", "broken_rewards", "raising_rewards", "helper_of_rewards"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("named_rewards:three", 0.5), ("named_rewards:Graded.score", 0.75)),
        *(("./code/my-rewards.py:reward", 0.75), ("code/my-rewards.py:reward", 0.75)),
    ],
)
def test_a_worker_finds_what_the_trainer_finds(path, value, here):
    for name in (path, f"{here}/{path}" if ".py" in path else path):
        assert resolve_reward(name)({}, "", False) == value
    with RewardPool(path, 1) as pool:
        assert pool.submit({}, "", False).result(timeout=60) == value


def test_the_directory_of_a_file_hides_no_installed_module(here):
    (here / "code" / "yaml.py").write_text("raise RuntimeError('not the package')")
    user_code.find("code/my-rewards.py:reward", "reward")
    assert sys.path[-1] == str(here / "code")
    assert sys.path.count(str(here / "code")) == 1


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("code/none.py:f", "'code/none.py:f' cannot be imported: FileNotFoundError: there is no file /"),
        ("code/my-rewards.py:none", "my-rewards.py has no none, only: helper_of_rewards, reward, fails, large"),
        ("code/ends.py:f", "cannot be imported: SystemExit: 3 (code/ends.py:2)"),
        ("code/halved.py:f", "cannot be imported: SyntaxError: invalid syntax (halved.py, line 1)"),
        ("./named_rewards:three", "is not of the form package.module:name or FILE.py:name"),
        (":three", "is not of the form package.module:name or FILE.py:name"),
        ("code/my-rewards.py", "is none of"),
        ("", f"reward '' is none of {', '.join(sorted(SHIPPED))}, package.module:function"),
        ("maths", "is none of"),
        ("nowhere.at_all:three", "cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("broken_rewards:f", "imported: ModuleNotFoundError: No module named 'nothing_of_that_name' (broken_"),
        ("raising_rewards:f", "cannot be imported: RuntimeError: two lines (raising_rewards.py:1)"),
        ("named_rewards:missing", "module 'named_rewards' has no attribute 'missing'"),
        ("named_rewards:CONSTANT", "'named_rewards:CONSTANT' is int, not a function"),
        ("named_rewards:two", "takes (problem, response); a reward takes (problem, response, truncated), verl's (d"),
    ],
)
def test_what_cannot_be_found_is_one_line(path, said):
    with pytest.raises(ValueError, match="reward") as refused:
        resolve_reward(path)
    assert said in str(refused.value)
    assert repr(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_failure_names_the_line_of_the_persons_file():
    value, reason = score(resolve_reward("code/my-rewards.py:fails"), {}, "{", False)
    assert value is None
    assert reason.startswith("JSONDecodeError: Expecting property name enclosed in double quotes")
    assert reason.endswith(" (code/my-rewards.py:9)")


def test_what_float32_cannot_hold_is_an_error():
    with RewardPool("code/my-rewards.py:large", 0) as pool:
        for response in ("1e39", "-1e39", "3.4028235e38", "inf", "nan"):
            assert pool.submit({}, response, False).result() == 0.0
            assert pool.pop_metrics()["reward/errors"] == 1
        assert pool.submit({}, "-3.4028234663852886e38", False).result() == -3.4028234663852886e38


def test_an_environment_its_tools_and_its_reward_are_files():
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 5}}</tool_call>'
    with EnvironmentHosts("code/envs.py:Adds", tool_workers=1) as hosts:
        hosts.reset("one", {"prompt": "2+5", "answer": "7", "data_source": "", "extra_info": {}}).result(60)
        assert hosts.step("one", call, False).result(60).value.content == [{"role": "tool", "content": "7"}]
        assert hosts.step("one", "7", False).result(60).value.done
        assert hosts.reward("one").result(60).value == 0.5
