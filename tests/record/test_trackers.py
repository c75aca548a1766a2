"""Tests of a run's trackers: what they get, failures, hangs and lags, and runs that go on in the same tracker."""

import contextlib
import math
import time

import planted_trackers
import pytest
from planted_trackers import read
from waiting import until

from rljax.errors import ConfigError, OwnedError
from rljax.record.trackers import SHIPPED, WAITING, RecordConfig, Trackers
from rljax.record.writers import Recorder


@contextlib.contextmanager
def tracked(run_dir, *classes, first_step=1, seconds=math.inf, **options):
    """Yields a recorder of rows for trackers of these classes. ``seconds`` bounds the end of the block."""
    names = tuple(name if ":" in name else f"planted_trackers:{name}" for name in classes)
    config = RecordConfig(trackers=names, **options)
    with Trackers(config) as trackers:
        recorder = Recorder(run_dir, 100, first_step=first_step, tensorboard=False, progress=False, more=[trackers])
        with contextlib.closing(recorder):
            trackers.start(run_dir, {"seed": 7}, {"a.b": 1}, lambda: seconds)
            yield recorder


def write(recorder, *steps, **values):
    for step in steps:
        recorder.write({"step": step, "reward/mean": step / 8} | values)


def steps_of(run_dir):
    return [entry["row"]["step"] for entry in read(run_dir) if "row" in entry]


def test_a_tracker_gets_settings_rows_and_results(tmp_path):
    """Infinity is NaN for a tracker, and None is nothing."""
    with tracked(tmp_path, "Kept", project="adds", run_name="seed 7") as recorder:
        write(recorder, 1, 2)
        until(lambda: steps_of(tmp_path) == [1, 2])  # while the run goes on
        write(recorder, 3, **{"eval/x/accuracy": None, "said": "yes", "is_last": True, "loss": math.inf})
        (tmp_path / "summary.json").write_text('{"steps": 3}')
        (tmp_path / "report.png").write_bytes(b"")
    begun, *rows, end = read(tmp_path)
    assert begun["begun"] | {"id": ""} == {"id": "", "name": "seed 7", "project": "adds"}
    assert (begun["seed"], begun["nested"]) == (7, 1)
    rows = [entry["row"] for entry in rows]
    assert math.isnan(rows[2].pop("loss"))
    last = {"step": 3, "reward/mean": 0.375, "said": "yes", "is_last": True}
    assert rows == [{"step": 1, "reward/mean": 0.125}, {"step": 2, "reward/mean": 0.25}, last]
    assert end == {"summary": {"steps": 3}, "figures": ["report"], "failed": False}


@pytest.mark.parametrize(
    ("planted", "said", "kept"),
    [
        ("FailsToStart", "gets no more rows: OSError: no server", []),
        ("FailsToLog", "gets no more rows: SystemExit: out of quota", [1, 2]),
        ("FailsToFinish", "gets no more rows: ValueError: ", [1, 2, 3, 4]),
    ],
)
def test_a_tracker_that_fails_is_told_once_and_abandoned(tmp_path, capfd, planted, said, kept):
    with tracked(tmp_path, planted) as recorder:
        write(recorder, 1, 2, 3, 4)
    warning = f"warning: record.trackers: planted_trackers:{planted} {said}; metrics.jsonl has all"
    assert sorted(capfd.readouterr().err.splitlines()[-2:]) == [f"{planted} is abandoned", warning]
    assert steps_of(tmp_path) == kept


@pytest.mark.parametrize("planted", ["HangsAtStart", "HangsAtLog", "HangsAtFinish"])
def test_a_tracker_that_hangs_is_abandoned(tmp_path, capfd, planted):
    with tracked(tmp_path, planted, seconds=1.0) as recorder:
        write(recorder, 1, 2, 3, 4)
        ended = time.monotonic()
    assert 0.9 < time.monotonic() - ended < 5.0
    said = f"planted_trackers:{planted} gets no more rows: it did not end in time; metrics.jsonl has all"
    last = [f"warning: record.trackers: {said}", f"{planted} is abandoned"]
    assert capfd.readouterr().err.splitlines()[-2:] == last


def test_a_slow_tracker_delays_no_step_and_has_a_bound(tmp_path, capfd):
    with tracked(tmp_path, "Slow", seconds=2.0) as recorder:
        began = time.monotonic()
        write(recorder, *range(1, 41))
        assert time.monotonic() - began < 1.0  # 40 rows take the tracker four seconds
    assert "planted_trackers:Slow gets no more rows: it did not end in time; " in capfd.readouterr().err
    given = steps_of(tmp_path)
    assert given == list(range(1, len(given) + 1))
    with tracked(tmp_path / "waiting", "HangsAtLog") as recorder:
        write(recorder, *range(1, WAITING + 6))
        assert "planted_trackers:HangsAtLog gets no more rows: it was too slow; " in capfd.readouterr().err
    assert "HangsAtLog is abandoned" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["Kept", f"{planted_trackers.__file__}:Kept"])
def test_a_run_that_goes_on_in_its_project_is_the_same_run(tmp_path, capfd, kind):
    """The directory names the run. A damaged state begins a new one."""
    run_dir = tmp_path / "seed3"
    with tracked(run_dir, kind) as recorder:
        write(recorder, 1, 2, 3, 4)
    with tracked(run_dir, kind, first_step=3) as recorder:  # from the checkpoint of step 2
        write(recorder, 3, 4, 5)
    with tracked(run_dir, kind, first_step=6, project="other"):
        pass
    (state,) = run_dir.glob("trackers/*.json")
    assert "abandoned" not in capfd.readouterr().err
    state.write_text('{"project": "other"}')
    with tracked(run_dir, kind, first_step=6, project="other") as recorder:
        write(recorder, 6)
    begun = [entry["begun"] for entry in read(run_dir) if "begun" in entry]
    assert {each["name"] for each in begun} == {"seed3"}
    first, second, *others = (each["id"] for each in begun)
    assert (first == second, len({first, *others})) == (True, 3)
    assert steps_of(run_dir) == [1, 2, 3, 4, 3, 4, 5, 6]


def test_a_run_that_raises_has_failed_unless_it_was_taken(tmp_path):
    def end_with(error, run_dir):
        with tracked(run_dir, "Kept") as recorder:
            write(recorder, 1)
            until(lambda: steps_of(run_dir) == [1])
            raise error

    taken = ConfigError("taken")
    taken.__cause__ = OwnedError("taken")
    for error, run_dir in ((RuntimeError("boom"), tmp_path / "failed"), (taken, tmp_path / "taken")):
        run_dir.mkdir()
        (run_dir / "summary.json").write_text('{"steps": 0}')  # an earlier process wrote it
        with pytest.raises(type(error), match=str(error)):
            end_with(error, run_dir)
    assert read(tmp_path / "failed")[-1] == {"summary": {}, "figures": [], "failed": True}
    time.sleep(1.0)
    assert "row" in read(tmp_path / "taken")[-1]  # it is left open


def test_a_tracker_that_cannot_be_used_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(SHIPPED, "absent_tracker", None)
    (tmp_path / "absent_tracker").mkdir()  # such a folder, like the one that wandb makes, is no package
    monkeypatch.syspath_prepend(tmp_path)
    for names, said in (
        (["wandbb"], r"record.trackers must name wandb, trackio, .*package.module:Class or FILE.py:Class, "),
        (["mlflow"], "mlflow_tracker.py:MlflowTracker of the repository's examples, got 'mlflow'"),
        (["planted_trackers:Refuses"], "record.trackers: planted_trackers:Refuses: not logged in"),
        (["planted_trackers:Absent"], "planted_trackers:Absent: AttributeError"),
        (["no_such_module:Tracker"], "no_such_module:Tracker: ModuleNotFoundError"),
        (["absent_tracker"], r"absent_tracker is not installed: pip install '\.\[absent_tracker\]'"),
        (["wandb", "wandb"], "trackers must be different"),
    ):
        with pytest.raises(ValueError, match=said):
            Trackers(RecordConfig(trackers=tuple(names)))
    with pytest.raises(ValueError, match="project must not be empty"):
        RecordConfig(project="")
