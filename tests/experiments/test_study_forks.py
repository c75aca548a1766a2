"""Every arm of a study is a configuration, and arms that are one run until their rates part may fork."""

import json
from pathlib import Path

import pytest
from study import read_study, run_command
from study_forks import check_forks, drawn_period, fork_checkpoint, parting_step, recorded_fork

from rljax.errors import ConfigError
from rljax.run.config import Config
from rljax.run.config_file import load_config

CONSTANT = {"schedule.kind": "constant"}
CONFIG = str(Path(__file__).parents[2] / "configs/quickstart.yaml")
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
    assert parting_step(rows(15), config()) == period
    assert parting_step(rows(15), config("--schedule.kind", "constant")) is None
    assert parting_step(rows(15), config("--schedule.kind", "cosine")) == 2
    assert parting_step(rows(100), config()) is None


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


@pytest.mark.parametrize(
    ("forks", "message"),
    [
        ({"decay": "none"}, "decay: none must be two arms"),
        ({"decay": "slow", "slow": "decay"}, "decay forks from itself: decay from slow from decay$"),
        ({"corrected": "constant"}, "corrected and constant differ by correction.preset$"),
        ({"early": "decay"}, "early and decay differ by schedule.surge.ratio$"),
    ],
)
def test_arms_that_may_not_fork(forks, message):
    arms = {
        "constant": CONSTANT,
        "decay": {},
        "slow": {"schedule.multiplier": 3.0},
        "corrected": {**CONSTANT, "correction.preset": "token_tis"},
        "early": {"schedule.surge.ratio": 2.0},
    }
    with pytest.raises(ConfigError, match=message):
        check_forks(Path("study.yaml"), arms, forks)
    check_forks(Path("study.yaml"), arms, {"decay": "constant", "slow": "decay"})


def test_a_period_drawn_from_the_next_seed_that_called_by_hand():
    """Seed 0 takes the period of seed 2, because seed 1 called nothing. The last seed takes that of the first."""
    surges = {0: 10, 1: None, 2: 20, 3: 30}
    called = {seed: [{"schedule/surge_step": None}, {"schedule/surge_step": surge}] for seed, surge in surges.items()}
    assert [drawn_period("constant", called, [0, 1, 2, 3], seed, 1.8) for seed in (0, 2, 3)] == [36, 54, 18]
    with pytest.raises(ConfigError, match="the period of seed 0 needs the run constant-1; run --arms constant first"):
        drawn_period("constant", {0: called[0]}, [0, 1], 0, 1.8)
    with pytest.raises(ConfigError, match="no other seed of constant called one"):
        drawn_period("constant", called, [0, 1], 0, 1.8)


ROOT = Path(__file__).parents[2]
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
