"""Tests of a study's file, its command lines, and the report made from run directories."""

import json
import sys

import pytest
from pictures import coloured_share
from records import study_row, write_record
from study import main, read_study, run_command
from study_rows import read_table

from rljax.errors import ConfigError

STUDY = """
config: configs/quickstart.yaml
seeds: [0, 1]
settings: {run.steps: 30, model.path: "runs/base{seed}-{third}"}
arms:
  constant: {schedule.kind: constant}
  triggered:
figures:
  both: [constant, triggered]
"""


@pytest.fixture
def study_file(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(STUDY)
    return path


def write_run(directory, rewards, surge):
    """Writes a run with what its end leaves, so that a study does not run it again."""
    rows = [study_row(step, reward, surge) | {"time/step_s": 36.0} for step, reward in enumerate(rewards, 1)]
    write_record(directory, rows)
    (directory / "summary.json").write_text(json.dumps({"steps": len(rewards)}))
    (directory / "report.png").touch()
    (directory / "config.yaml").write_text(f"run: {{steps: {len(rewards)}}}")


def test_a_study_becomes_command_lines(study_file, tmp_path):
    study = read_study(study_file)
    words = run_command(study, "constant", 4, tmp_path / "constant-4", period=36)
    assert words[:4] == [sys.executable, "-m", "rljax.train", "configs/quickstart.yaml"]
    options = dict(zip(words[4::2], words[5::2], strict=True))
    assert options == {
        "--run.steps": "30",
        "--model.path": "runs/base4-1",
        "--schedule.kind": "constant",
        "--schedule.decay-period": "36",
        "--run.seed": "4",
        "--run.dir": str(tmp_path / "constant-4"),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arms: [", "is not YAML"),
        ("config: a\nseeds: [0]", "a study has config, seeds, arms"),
        ("config: a\nseeds: [0]\narms: {x: }\nfigure: {}", "a study has config, seeds, arms"),
        ("config: a\nseeds: [0]\narms: {x: }\nfigures: {f: [y]}", "seeds_of and trend name arms that are not there: y"),
        ("{like: bad.yaml, seeds: [0], arms: {x: }}", "bad.yaml: like leads back to bad.yaml"),
        ("{like: other.yaml, seeds: [0], arms: {x: }}", "other.yaml: like leads back to bad.yaml"),
    ],
)
def test_what_is_no_study_is_one_line(text, message, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    path.with_name("other.yaml").write_text("{like: bad.yaml, seeds: [0], arms: {x: }}")
    with pytest.raises(ConfigError, match=message):
        read_study(path)


def test_the_report_is_made_from_run_directories_alone(study_file, tmp_path, capsys):
    out = tmp_path / "out"
    write_run(out / "constant-0", [0.75] * 20 + [0.0] * 30, surge=5)
    write_run(out / "constant-1", [0.5] * 50, surge=6)
    write_run(out / "triggered-0", [0.25] * 50, surge=7)
    assert main([str(study_file), "--out", str(out), "--report-only"]) == 0
    assert capsys.readouterr().out.startswith("3 runs, 1.5 hours of training time: ")
    # One of two runs collapsed. Its mean is under half of 0.75 from the sixth step without reward on, which is 21 steps
    # after the surge at 5.
    arms = json.loads((out / "outcomes.json").read_text())["arms"]
    first = arms["constant"]["0"]
    assert [first[key] for key in ("peak", "final", "collapse_step", "surge_step", "lead")] == [0.75, 0.0, 26, 5, 21]
    assert (arms["constant"]["1"]["collapse_step"], arms["triggered"]["0"]["peak"]) == (None, 0.25)
    assert all(coloured_share(out / f"both-{seed}.png") > 1e-3 for seed in (0, 1))
    # Runs of another machine are reported, and complete ones are not run again.
    other, rows = tmp_path / "other", ["--rows", str(out / "rows.parquet")]
    write_run(other / "triggered-1", [0.25] * 50, surge=7)
    assert main([str(study_file), "--out", str(other), "--seeds", "1", *rows]) == 0
    assert [path.name for path in other.glob("*-*/")] == ["triggered-1"]
    assert set(read_table(other / "rows.parquet")) == {("constant", 1), ("triggered", 1)}


def test_what_cannot_be_run_is_named(study_file, tmp_path, capsys):
    """A complete run is not run again. rljax.train itself refuses the other command line."""
    with pytest.raises(ConfigError, match="has no arm cosine; it has constant, triggered"):
        main([str(study_file), "--arms", "cosine"])
    with pytest.raises(ConfigError, match="holds no runs of this study"):
        main([str(study_file), "--out", str(tmp_path / "none"), "--report-only"])
    study_file.write_text(STUDY.replace("configs/quickstart.yaml", str(tmp_path / "nowhere.yaml")))
    write_run(tmp_path / "out" / "constant-0", [0.5] * 30, surge=6)
    assert main([str(study_file), "--out", str(tmp_path / "out"), "--seeds", "0", "--jobs", "2"]) == 1
    log = tmp_path / "out/triggered-0/log.txt"
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("failed")]
    assert lines == [f"failed: triggered-0 (exit 2, see {log})"]
    assert "nowhere.yaml" in log.read_text()


def test_arms_may_have_seeds_of_their_own(study_file):
    study_file.write_text(STUDY + "seeds_of: {triggered: [1, 2]}\n")
    study = read_study(study_file)
    assert study.runs() == [("constant", 0), ("constant", 1), ("triggered", 1), ("triggered", 2)]
    assert study.runs(["triggered"], [0, 2]) == [("triggered", 2)]
    assert study.runs([], [30, 1]) == [("constant", 1), ("triggered", 1), ("constant", 30), ("triggered", 30)]


def test_a_study_like_another_has_its_settings(study_file):
    """The other study's own settings come on top. Seeds, arms and forks are not copied."""
    path = study_file.with_name("other.yaml")
    path.write_text(f"{{like: {study_file.name}, seeds: [7], arms: {{slow: }}, settings: {{run.steps: 99}}}}")
    first, other = read_study(study_file), read_study(path)
    assert other.config == first.config
    assert other.settings == first.settings | {"run.steps": 99} != first.settings
    assert (other.seeds, other.arms, other.forks) == ((7,), {"slow": {}}, {})
