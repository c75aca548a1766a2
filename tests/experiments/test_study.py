"""Tests of a study's file, its command lines, its report, and arms that are one run until their rates part."""

import json
import sys
from pathlib import Path

import pytest
from pictures import coloured_share
from records import study_row, write_record
from study import main, read_study, run_command
from study_forks import check_forks, drawn_period, fork_checkpoint, parting_step, recorded_fork
from study_rows import read_table

from rljax.errors import ConfigError
from rljax.run.config import Config
from rljax.run.config_file import load_config

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
        **{"--run.steps": "30", "--model.path": "runs/base4-1", "--schedule.kind": "constant"},
        **{"--schedule.decay-period": "36", "--run.seed": "4", "--run.dir": str(tmp_path / "constant-4")},
    }


NO_STUDIES = {
    "arms: [": "is not YAML",
    "config: a\nseeds: [0]": "a study has config, seeds, arms",
    "config: a\nseeds: [0]\narms: {x: }\nfigure: {}": "a study has config, seeds, arms",
    "config: a\nseeds: [0]\narms: {x: }\nfigures: {f: [y]}": "seeds_of and trend name arms that are not there: y",
    "{like: bad.yaml, seeds: [0], arms: {x: }}": "bad.yaml: like leads back to bad.yaml",
    "{like: other.yaml, seeds: [0], arms: {x: }}": "other.yaml: like leads back to bad.yaml",
}


def test_what_is_no_study_is_one_line(tmp_path):
    path = tmp_path / "bad.yaml"
    path.with_name("other.yaml").write_text("{like: bad.yaml, seeds: [0], arms: {x: }}")
    for text, message in NO_STUDIES.items():
        path.write_text(text)
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


def test_arms_have_own_seeds_and_studies_settings_of_others(study_file):
    """The other study's own settings come on top. Seeds, arms and forks are not copied."""
    study_file.write_text(STUDY + "seeds_of: {triggered: [1, 2]}\n")
    study = read_study(study_file)
    assert study.runs() == [("constant", 0), ("constant", 1), ("triggered", 1), ("triggered", 2)]
    assert study.runs(["triggered"], [0, 2]) == [("triggered", 2)]
    assert study.runs([], [30, 1]) == [("constant", 1), ("triggered", 1), ("constant", 30), ("triggered", 30)]
    path = study_file.with_name("other.yaml")
    path.write_text(f"{{like: {study_file.name}, seeds: [7], arms: {{slow: }}, settings: {{run.steps: 99}}}}")
    first, other = read_study(study_file), read_study(path)
    assert other.config == first.config
    assert other.settings == first.settings | {"run.steps": 99} != first.settings
    assert (other.seeds, other.arms, other.forks) == ((7,), {"slow": {}}, {})


CONSTANT = {"schedule.kind": "constant"}
ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs/quickstart.yaml")
SOON = ["--schedule.surge.warmup", "10", "--schedule.surge.ratio", "2.0", "--optimizer.learning-rate", "1e-3"]


def rows(surge_from, steps=60):
    """Returns rows with a constant rate of 1e-3. Lengths are 5 tokens, and 20 from a step on."""
    same = {"response_length/truncated_fraction": 0.0, "schedule/learning_rate": 1e-3}
    lengths = ((step, 20.0 if step >= surge_from else 5.0) for step in range(1, steps + 1))
    return [same | {"step": step, "response_length/mean": length} for step, length in lengths]


def config(*words):
    return load_config(Config, [CONFIG, *SOON, *words], prog="test", description="")


def test_the_rates_part_at_the_first_decay():
    """The call comes a few steps after step 15. The first decay is at 1.8 times its step, rounded half up."""
    call = next(s for s in range(15, 40) if parting_step(rows(15), config("--schedule.multiplier", "1")) == s)
    assert 15 <= call <= 25
    period = int(1.8 * call + 0.5)
    steps = {kind: parting_step(rows(15), config("--schedule.kind", kind)) for kind in ("constant", "cosine")}
    assert steps == {"constant": None, "cosine": 2}
    assert [parting_step(rows(surge_from), config()) for surge_from in (15, 100)] == [period, None]


def test_the_last_checkpoint_before_they_part(tmp_path):
    source, words = tmp_path / "constant-0", [CONFIG, *SOON]
    source.mkdir()
    (source / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(15)))
    assert fork_checkpoint(source, words) is None
    period = parting_step(rows(15), config())
    for step in (period - 5, period - 1, period, 60):
        (source / "checkpoints" / str(step)).mkdir(parents=True)
    assert fork_checkpoint(source, words) == source / "checkpoints" / str(period - 1)
    constant = [*words, "--schedule.kind", "constant"]
    assert fork_checkpoint(source, constant) == source / "checkpoints/60"
    assert recorded_fork(tmp_path) is None
    for written, fork in (("run: {steps: 3}", ""), ("run: {fork: a/checkpoints/20}", "a/checkpoints/20")):
        (tmp_path / "config.yaml").write_text(written)
        assert recorded_fork(tmp_path) == fork


def test_arms_that_may_not_fork():
    arms = {
        **{"constant": CONSTANT, "decay": {}, "slow": {"schedule.multiplier": 3.0}},
        **{"corrected": {**CONSTANT, "correction.preset": "token_tis"}, "early": {"schedule.surge.ratio": 2.0}},
    }
    check_forks(Path("study.yaml"), arms, {"decay": "constant", "slow": "decay"})
    for forks, message in (
        ({"decay": "none"}, "decay: none must be two arms"),
        ({"decay": "slow", "slow": "decay"}, "decay forks from itself: decay from slow from decay$"),
        ({"corrected": "constant"}, "corrected and constant differ by correction.preset$"),
        ({"early": "decay"}, "early and decay differ by schedule.surge.ratio$"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_forks(Path("study.yaml"), arms, forks)


def test_a_period_drawn_from_the_next_seed_that_called_by_hand():
    """Seed 0 takes the period of seed 2, because seed 1 called nothing. The last seed takes that of the first."""
    surges = {0: 10, 1: None, 2: 20, 3: 30}
    called = {seed: [{"schedule/surge_step": None}, {"schedule/surge_step": surge}] for seed, surge in surges.items()}
    assert [drawn_period("constant", called, [0, 1, 2, 3], seed, 1.8) for seed in (0, 2, 3)] == [36, 54, 18]
    with pytest.raises(ConfigError, match="the period of seed 0 needs the run constant-1; run --arms constant first"):
        drawn_period("constant", {0: called[0]}, [0, 1], 0, 1.8)
    with pytest.raises(ConfigError, match="no other seed of constant called one"):
        drawn_period("constant", called, [0, 1], 0, 1.8)


STUDIES = {path.stem: read_study(path) for path in sorted((ROOT / "configs/study").glob("*.yaml"))}


def seed_of(name, arm):
    return STUDIES[name].seeds_of.get(arm, STUDIES[name].seeds)[0]


def words_of(name, arm, run_dir):
    """Returns the words that follow ``python -m rljax.train``."""
    period = 30 if arm in STUDIES[name].drawn else None
    return run_command(STUDIES[name], arm, seed_of(name, arm), run_dir, period=period)[3:]


def arms():
    """Yields every arm. An arm with the same keys of the same configuration as an earlier arm is for the harnesses."""
    seen = set()
    for name, study in STUDIES.items():
        for arm in study.arms:
            config, *words = words_of(name, arm, Path("run"))
            form = config, *(word for word in words if word.startswith("--"))
            marks = [pytest.mark.harness] if form in seen else []
            seen.add(form)
            yield pytest.param(name, arm, id=f"{name}-{arm}", marks=marks)


@pytest.mark.parametrize(("name", "arm"), arms())
def test_an_arm_is_a_configuration(name, arm, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(Config, words_of(name, arm, tmp_path), prog="test", description="")
    assert config.run.seed == seed_of(name, arm)
    assert config.run.dir == str(tmp_path)


def test_no_seed_of_the_search_is_used_again():
    """The search had the seeds 0 to 8 and 900 to 999. Each study of its policy has seeds of its own."""
    seeds_of = [
        {seed for _, seed in STUDIES[name].runs()}
        for name in ("collapse", "remedies", "isolation", "family_sums", "dose", "distance")
    ]
    used = set().union(*seeds_of)
    assert len(used) == sum(map(len, seeds_of))
    assert not used & {*range(9), *range(900, 1000)}
