"""The commands of the pages that name a person's own code, typed as they stand there, in a directory with the code."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from toy_runs import ROOT, completed, tiny

pytestmark = pytest.mark.slow

PAGES = ("docs/rewards.md", "docs/environments.md", "docs/tutorials/train.md")


def blocks(page):
    return re.findall(r"```[a-z]*\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def commands(page):
    """Returns the commands of a page that train with a person's own code."""
    lines = "\n".join(blocks(page)).replace("\\\n", " ").splitlines()
    named = re.compile(r"rljax train .*(--data\.reward|--rollout\.environment) \S+:\S+")
    return [line for line in lines if named.match(line)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current directory, with the page's files. ``sys.path`` has neither it nor the checkout."""
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "CONFIG.yaml").symlink_to(ROOT / "configs" / "quickstart.yaml")
    for block in (block for page in PAGES for block in blocks(page)):
        if named := re.match(r"# (my_\w+\.py)\n", block):
            (tmp_path / named[1]).write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).resolve() not in (ROOT, tmp_path)])
    return tmp_path


@pytest.mark.parametrize("page", [*PAGES[:2], pytest.param(PAGES[2], marks=pytest.mark.harness)])
def test_the_documented_command_runs(page, here):
    (typed,) = commands(page)
    completed([*shlex.split(typed)[2:], *tiny("configs/toy-base", "run", 1)[1:]])
    row = json.loads((here / "run" / "metrics.jsonl").read_text())
    assert row["reward/error_fraction"] == 0
