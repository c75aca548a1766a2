"""A study's signals are described from rows made by hand, and the rows go through the Parquet file."""

import numpy as np
import pytest
from records import study_run
from study_outcome import outcome_of
from study_rows import read_table, write_table
from study_signals import change_step, filled, main, signal_row

from rljax.errors import ConfigError

STUDY = """
config: configs/quickstart.yaml
seeds: [0, 1]
arms: {constant: {schedule.kind: constant}, triggered: {}}
"""


def test_rows_come_back_as_they_were(tmp_path):
    runs = {("constant", 0): study_run(0.0), ("triggered", 1): study_run(0.75)}
    write_table(tmp_path / "rows.parquet", runs)
    found = read_table(tmp_path / "rows.parquet")
    assert list(found) == list(runs)
    for run, expected in runs.items():
        for row, line in zip(expected, found[run], strict=True):
            assert {key: line[key] for key in row if row[key] is not None} == {
                key: value if isinstance(value, int) else float(np.float32(value))
                for key, value in row.items()
                if value is not None
            }
            assert line["mismatch/k3_kl"] is line["policy/entropy"] is None
    (tmp_path / "other.parquet").write_text("no table")
    with pytest.raises(ValueError, match=r"other.parquet cannot be read"):
        read_table(tmp_path / "other.parquet")


def test_a_signal_changes_when_it_stays_away_from_its_reference():
    """The signal is a trailing mean of ten steps. Its reference is steps 20 to 59, all 1.

    It must be above 1.5 for five steps.
    """
    values = [1.0] * 100
    values[69] = 9.0  # after one such step the trailing mean is 1.8 for ten steps
    assert change_step(values, 20) == 70
    values[69] = 5.0  # the trailing mean is 1.4
    assert change_step(values, 20) is None
    assert change_step([1.0] * 69 + [0.0] * 31, 20) == 73  # the trailing mean is below 2 / 3 with the fourth 0
    assert change_step([1.0] * 96 + [9.0] * 4, 20) is None  # only four steps


def test_a_step_without_a_measurement_has_the_value_before():
    assert filled([None, 2.0, None, float("inf"), 3.0, None]) == [None, 2.0, 2.0, 2.0, 3.0, 3.0]


def test_a_signal_that_is_no_longer_measured_does_not_change():
    found = study_run(0.0, lambda step: 1.0 if step < 70 else None)
    assert signal_row("optimizer/grad_norm", [(outcome_of(found), found)])["missed"] == 1


def test_leads_misses_and_false_alarms():
    def run(last, grad_norm):
        found = study_run(last, grad_norm)
        return outcome_of(found), found

    early = run(0.0, lambda step: 1.0 if step < 70 else 3.0)
    silent = run(0.0, lambda step: 1.0)
    healthy = run(0.75, lambda step: 1.0 if step < 70 else 3.0)
    # Accuracy falls by 0.075 a step from step 81. It is half of 0.75 at the fifth step and less at the sixth. The mean
    # of three 3s and seven 1s is 1.6.
    assert early[0].collapse_step == 86
    found = signal_row("optimizer/grad_norm", [early, silent, healthy])
    assert found == {"leads": [86 - 72], "lead_median": 14.0, "missed": 1, "false_alarms": 1, "healthy": 1}


def test_the_program_prints_the_signals(tmp_path, capsys):
    study, table = tmp_path / "study.yaml", tmp_path / "rows.parquet"
    study.write_text(STUDY)
    write_table(table, {("constant", 0): study_run(0.0), ("constant", 1): study_run(0.4)})
    assert main([str(study), str(table), "--arms", "constant"]) == 0
    assert "| gradient norm | - |  | 1 | 0 of 1 |" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="has no arm fast"):
        main([str(study), str(table), "--arms", "fast"])
