"""The growth of a run's mismatch is described from rows made by hand, and the study of engines loads."""

import json
from pathlib import Path

import numpy as np
import pytest
from mismatch_growth import growth_of, main, rank_correlation
from study import read_study, run_command

from rljax.errors import ConfigError
from rljax.rollout.build import check_engine
from rljax.run.config import Config
from rljax.run.config_file import load_config

ROOT = Path(__file__).parents[2]


def rows(steps=40):
    """Returns rows whose accuracy is highest between steps 20 and 21. The mismatch doubles while the entropy halves."""
    return [
        {
            "step": step,
            "reward/mean": 1.0 - abs(step - 20.5) / 20,
            "mismatch/log_ppl_abs_diff": 0.01 * 2 ** (step / 40),
            "mismatch/log_ppl_abs_diff_sum": 0.1,
            "mismatch/logprob_abs_diff_mean": 0.02,
            "policy/entropy": 0.4 * 2 ** (-step / 40),
            "response_length/mean": 5.0 + step % 2,
            "optimizer/grad_norm": 0.5,
        }
        for step in range(1, steps + 1)
    ]


def test_the_hand_worked_growth():
    found = growth_of(rows())
    assert (found["steps"], found["largest_step"], found["peak_step"]) == (40, 40, 25)
    assert [found["accuracy_peak"], found["accuracy_last"]] == pytest.approx([0.875, 0.25])
    assert found["steps_in_band"] == 40
    windows = found["windows"]
    assert windows["first"]["log_ppl_abs_diff"] == pytest.approx(np.mean([0.01 * 2 ** (s / 40) for s in range(1, 11)]))
    assert windows["last"]["gap_per_entropy"] == pytest.approx(np.mean([0.05 * 2 ** (s / 40) for s in range(31, 41)]))
    assert windows["peak"]["response_length"] == 5.5
    related = found["rank_correlation_of_log_ppl_abs_diff"]
    assert related["step"] == pytest.approx(1.0)
    assert related["entropy"] == pytest.approx(-1.0)
    assert related["grad_norm"] == related["log_ppl_abs_diff_sum"] == 0.0
    assert abs(related["response_length"]) < 0.05


def test_ranks_of_equal_values_are_their_mean():
    """The ranks are 1.5, 1.5, 3 against 1, 2, 3. Their correlation is 0.75 / sqrt(0.75) = sqrt(3) / 2."""
    assert rank_correlation(np.array([5.0, 5.0, 9.0]), np.array([0.1, 0.2, 0.3])) == pytest.approx(np.sqrt(3) / 2)


def test_the_program_reads_complete_runs_alone(tmp_path, capsys):
    with pytest.raises(ConfigError, match="holds no complete run"):
        main([str(tmp_path)])
    for name in ("done", "running"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    (tmp_path / "done" / "summary.json").write_text("{}")
    assert main([str(tmp_path), "--json", str(tmp_path / "growth.json")]) == 0
    assert list(json.loads((tmp_path / "growth.json").read_text())["runs"]) == ["done"]
    assert "| done | 0.8" in capsys.readouterr().out


def test_each_arm_of_the_engine_study_is_a_valid_run(tmp_path):
    study = read_study(ROOT / "configs/study/engines.yaml")
    engines = set()
    for arm in study.arms:
        words = run_command(study, arm, 100, tmp_path)[3:]
        config = load_config(Config, [str(ROOT / words[0]), *words[1:]], prog="test", description="")
        check_engine(config.rollout)
        rollout = config.rollout
        engines.add(
            (
                rollout.engine,
                rollout.weight_quantization,
                rollout.kv_cache_dtype,
                rollout.inject.staleness,
                config.precision.compute_dtype,
            )
        )
    assert len(engines) == len(study.arms)
