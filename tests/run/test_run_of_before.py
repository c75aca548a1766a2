"""Runs of an earlier rljax go on: configurations with keys that are no more, and a checkpoint.

``rljax train configs/quickstart.yaml`` at commit a478350f made the run in tests/data. Its model has 1,030 parameters.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from toy_runs import comparable, completed, outcome, printed

from rljax.commands.config import main
from rljax.record.rows import read_rows
from rljax.run.config import REMOVED, Config
from rljax.run.config_file import dotted
from rljax.run.directory import recorded_config

BEFORE = Path(__file__).parents[1] / "data/run_of_a478350f"


def test_it_goes_on_from_its_checkpoint(tmp_path):
    config = recorded_config(BEFORE)
    assert (config.data.batch_size, config.rollout.group_size, config.data.reward) == (2, 4, "parity_reward:reward")
    assert config.diagnosis.position_edges == (4, 8, 16, 24)
    run_dir = shutil.copytree(BEFORE, tmp_path / "run")
    words = [run_dir / "config.yaml", "--run.dir", run_dir, "--model.path", BEFORE / "base", "--run.steps", "3"]
    output = completed(words)
    assert "damaged" not in output
    rows = read_rows(run_dir / "metrics.jsonl")
    assert rows[:2] == read_rows(BEFORE / "metrics.jsonl")
    assert len(comparable(run_dir)) == 3
    assert rows[2]["optimizer/grad_norm"] == pytest.approx(0.463695, rel=1e-3)  # of the run that was not interrupted


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_may_have_its_default_alone(key, tmp_path):
    assert key not in dict(dotted(dataclasses.asdict(Config())))
    default, remedy = REMOVED[key]
    file = tmp_path / "old.yaml"
    above = "\n".join(f"{'  ' * depth}{name}:" for depth, name in enumerate(key.split(".")))
    file.write_text(f"{above} {json.dumps(default)}\n")
    printed(main, [file])
    file.write_text(f"{above} [7]\n")
    status, _, said = outcome(main, [file])
    assert status == 2
    assert f"{file}:{key.count('.') + 1}: {key} was removed " in said
    assert f"got [7]: {remedy}; delete this key" in said
    status, _, said = outcome(main, [f"--{key.replace('_', '-')}", "7"])
    assert (status, said.strip()) == (2, f"error: command line: {key} was removed: {remedy}; leave this option out")
