"""Every arm of every study in configs/study is a configuration that a run accepts."""

from pathlib import Path

import pytest
from study import read_study, run_command

from rljax.run.config import Config
from rljax.run.config_file import load_config

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
        {seed for _, seed in STUDIES[name].runs()} for name in ("collapse", "remedies", "isolation", "family_sums", "dose")
    ]
    used = set().union(*seeds_of)
    assert len(used) == sum(map(len, seeds_of))
    assert not used & {*range(9), *range(900, 1000)}
