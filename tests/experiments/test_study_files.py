"""Every arm of every study in configs/study is a configuration that a run accepts."""

from pathlib import Path

import pytest
from study import read_study, run_command

from rljax.run.config import Config
from rljax.run.config_file import load_config

ROOT = Path(__file__).parents[2]
STUDIES = {path.stem: read_study(path) for path in sorted((ROOT / "configs/study").glob("*.yaml"))}
ARMS = [(name, arm) for name, study in STUDIES.items() for arm in study.arms]


@pytest.mark.parametrize(("name", "arm"), ARMS, ids=[f"{name}-{arm}" for name, arm in ARMS])
def test_an_arm_is_a_configuration(name, arm, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    study = STUDIES[name]
    seed = study.seeds_of.get(arm, study.seeds)[0]
    words = run_command(study, arm, seed, tmp_path, period=30 if arm in study.drawn else None)[3:]
    config = load_config(Config, words, prog="test", description="")
    assert config.run.seed == seed
    assert config.run.dir == str(tmp_path)


def test_no_seed_of_the_search_is_used_again():
    """Each study on the late collapse has seeds of its own."""
    names = ("subject", "subject_bases", "subject_sums", "collapse", "remedies", "detector", "rates", "caches")
    seeds_of = [{seed for _, seed in STUDIES[name].runs()} for name in names]
    searched, studies = set().union(*seeds_of[:3]), seeds_of[3:]
    assert all(studies)
    assert len(searched.union(*studies)) == len(searched) + sum(map(len, studies))
