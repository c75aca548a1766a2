"""A whole run with trackers that misbehave ends as it does without them, and its record is the same."""

import json

from planted_trackers import read
from toy_runs import TOY_BASE, comparable, completed, tiny

from rljax.record.rows import read_rows
from rljax.run.config import Config
from rljax.train import settings_of


def test_a_run_ends_the_same_whatever_its_trackers_do(tmp_path):
    completed(tiny(TOY_BASE, tmp_path / "plain", 3))
    names = [f"planted_trackers:{name}" for name in ("Kept", "FailsToLog", "FailsToStart")]
    output = completed(tiny(TOY_BASE, tmp_path / "tracked", 3, "--record.trackers", *names), figure=True)
    assert comparable(tmp_path / "tracked") == comparable(tmp_path / "plain")
    assert json.loads(output.splitlines()[-1])["run_dir"] == str(tmp_path / "tracked")
    assert output.count("warning: record.trackers: planted_trackers:Fails") == 2
    _, *rows, end = read(tmp_path / "tracked", "Kept")
    recorded = read_rows(tmp_path / "tracked/metrics.jsonl")
    assert [entry["row"] for entry in rows] == [{k: v for k, v in row.items() if v is not None} for row in recorded]
    assert end["summary"] == json.loads((tmp_path / "tracked/summary.json").read_text())
    assert (end["figures"], end["failed"]) == (["report"], False)
    # Settings are given nested, and by dotted key.
    nested, flat = settings_of(Config())
    assert nested["rollout"]["limits"]["max_outstanding"] == flat["rollout.limits.max_outstanding"] == 512
    assert not any(isinstance(value, dict) for value in flat.values())
