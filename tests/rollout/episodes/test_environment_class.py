"""An environment is found by its name, and a class that does not fit is refused in one line."""

import pytest

from rljax.rollout.episodes.environment import find_environment

MODULE = """
class Good:
    async def reset(self, problem): ...
    async def step(self, response, truncated): ...
    async def reward(self): ...

class Heir(Good):
    def __init__(self, depth=3): ...
    async def step(self, response, truncated=False, *more): ...

class Plain(Good):
    def step(self, response, truncated): ...

class Short(Good):
    async def step(self, response): ...

class Unscored:
    reset, step = Good.reset, Good.step

class Needy(Good):
    def __init__(self, depth): ...

def function(): ...
"""


@pytest.fixture(autouse=True)
def environments_module(tmp_path, monkeypatch):
    (tmp_path / "named_environments.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("name", ["Good", "Heir"])
def test_a_class_with_three_async_methods_is_found(name):
    assert find_environment(f"named_environments:{name}").__name__ == name


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("named_environments:Missing", "cannot be imported: AttributeError: .* has no attribute 'Missing'"),
        ("named_environments:function", "environment 'named_environments:function' is function, not a class"),
        ("named_environments:Plain", "has no method 'async def step\\(self, response, truncated\\)'"),
        ("named_environments:Unscored", "has no method 'async def reward\\(self\\)'"),
        ("named_environments:Short", "must be step\\(self, response, truncated\\), but it takes \\(self, response\\)"),
        ("named_environments:Needy", "must be made without arguments, but Needy\\(\\) needs some"),
    ],
)
def test_what_does_not_fit_is_refused(path, message):
    with pytest.raises(ValueError, match=message) as refused:
        find_environment(path)
    assert "\n" not in str(refused.value)
