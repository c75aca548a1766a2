"""The commands of the pages that name a person's own code, typed as they stand there, in a directory with the code."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from toy_runs import ROOT

pytestmark = pytest.mark.slow

SHORT = "--run.steps 1 --eval.every 0 --data.batch-size 4 --rollout.max-response-tokens 8"
PAGES = ("docs/rewards.md", "docs/environments.md", "docs/tutorials/train.md")


def blocks(page):
    return re.findall(r"```[a-z]*\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def commands(page):
    """Returns the commands of a page that train with a person's own code."""
    lines = "\n".join(blocks(page)).replace("\\\n", " ").splitlines()
    named = re.compile(r"rljax train .*(--data\.reward|--rollout\.environment) \S+:\S+")
    return [line for line in lines if named.match(line)]


@pytest.fixture
def here(tmp_path):
    """A directory with the page's files. ``sys.path`` has rljax, and neither this directory nor the checkout."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "rljax").symlink_to(ROOT / "rljax")
    work = tmp_path / "work"
    work.mkdir()
    for name in ("configs", "examples"):
        (work / name).symlink_to(ROOT / name)
    (work / "CONFIG.yaml").symlink_to(ROOT / "configs" / "quickstart.yaml")
    for block in (block for page in PAGES for block in blocks(page)):
        if named := re.match(r"# (my_\w+\.py)\n", block):
            (work / named[1]).write_text(block)
    return work


@pytest.mark.parametrize("page", PAGES)
def test_the_documented_command_runs(page, here):
    (typed,) = commands(page)
    program = Path(sys.executable).with_name("rljax")
    words = [str(program), *shlex.split(typed)[1:], *shlex.split(SHORT), "--run.dir", "run"]
    environment = os.environ | {"PYTHONPATH": str(here.parent / "library")}
    done = subprocess.run(words, cwd=here, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    row = json.loads((here / "run" / "metrics.jsonl").read_text())
    assert row["reward/error_fraction"] == 0
