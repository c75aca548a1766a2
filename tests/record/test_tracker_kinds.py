"""Real trackers, each with a store on this machine, keep a whole run, a killed run and a fork of a run."""

import importlib.util
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toy_runs import ROOT, TOY_BASE, environment, kill_at, start, tiny, wait_for_rows, without_clock

from rljax.record.rows import NONFINITE_KEYS, read_rows
from rljax.run.directory import recorded_config
from rljax.train import settings_of

pytestmark = pytest.mark.trackers

MLFLOW = "examples/mlflow_tracker.py:MlflowTracker"
KINDS = {"wandb": "wandb", "trackio": "trackio", "mlflow": MLFLOW}  # by the package that each needs
INSTALLED = [kind for package, kind in KINDS.items() if importlib.util.find_spec(package)]
STEPS = 8


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Yields the folder of the runs and of the trackers' stores, for this process and its children."""
    root = tmp_path_factory.mktemp("tracked")
    settings = {"HOME": str(root / "home"), "TRACKIO_DIR": str(root / "trackio"), "WANDB_MODE": "offline"}
    settings |= {"MLFLOW_TRACKING_URI": f"sqlite:///{root}/mlflow.db", "MLFLOW_DISABLE_TELEMETRY": "true"}
    (root / "home").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        patch.delenv("WANDB_API_KEY", raising=False)
        if MLFLOW in INSTALLED:
            from mlflow import MlflowClient

            MlflowClient().create_experiment("rljax", artifact_location=str(root / "artifacts"))
        yield root


def words(run_dir, *options, kinds=INSTALLED):
    return tiny(TOY_BASE, run_dir, STEPS, "--record.trackers", *kinds, *options)


def ended(process, status=0):
    """Returns the output of a process, and checks that it ends with this status."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == status, output
    return output


@pytest.fixture(scope="module")
def whole(root):
    output = ended(start(words(root / "whole")))
    assert "warning" not in output
    return root / "whole"


@pytest.fixture(scope="module")
def killed(root):
    """Returns a run that is killed after five rows and goes on to its end from step 4 or before."""
    run_dir = root / "killed"
    kill_at(words(run_dir, "--checkpoint.every", "3"), run_dir, 5)
    assert "warning" not in ended(start(words(run_dir, "--checkpoint.every", "3")))
    return run_dir


@pytest.fixture(scope="module")
def forked(root, whole):
    """Returns a fork of the whole run from its last checkpoint. The fork is two steps longer."""
    point = str(whole / "checkpoints" / str(STEPS))
    ended(start(words(root / "forked", "--run.fork", point, "--run.steps", str(STEPS + 2))))
    return root / "forked"


def kept(run_dir, kind):
    return json.loads((run_dir / "trackers" / f"{kind.replace('/', '_')}.json").read_text())["id"]


def wandb_records(run_dir):
    """Yields the records of a run's ``.wandb`` files, which have framed messages in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(run_dir.glob(f"trackers/wandb/offline-run-*/run-{kept(run_dir, 'wandb')}.wandb")):
        data, place, whole = path.read_bytes(), 7, b""
        while place + 7 <= len(data):
            if 32768 - place % 32768 < 7:
                place += 32768 - place % 32768
                continue
            _, size, kind = struct.unpack("<IHB", data[place : place + 7])
            whole = (b"" if kind in (1, 2) else whole) + data[place + 7 : place + 7 + size]
            place += 7 + size
            if kind in (1, 4):
                yield Record.FromString(whole)


def wandb_rows(run_dir):
    rows = []
    for record in wandb_records(run_dir):
        if record.WhichOneof("record_type") == "history":
            values = [("/".join(item.nested_key) or item.key, item.value_json) for item in record.history.item]
            rows.append({key: json.loads(value) for key, value in values if not key.startswith("_")})
    return rows


def trackio_rows(run_dir):
    """Returns all entries. A picture or a text is named by its type."""
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("rljax", run_dir.name, run_id=kept(run_dir, "trackio"))
    rows = [{key: value for key, value in log.items() if key != "timestamp"} for log in logs]
    return [{k: v["_type"] if isinstance(v, dict) else v for k, v in row.items()} for row in rows]


def mlflow_run(run_dir):
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("rljax").experiment_id
    (found,) = client.search_runs([experiment], f"tags.`rljax.run` = '{kept(run_dir, MLFLOW)}'")
    return client, found


def mlflow_rows(run_dir):
    client, found = mlflow_run(run_dir)
    rows = {}
    for key in found.data.metrics:
        for point in client.get_metric_history(found.info.run_id, key):
            row = rows.setdefault(point.step, {})
            assert key not in row, f"two values of {key} at step {point.step}"
            row[key] = point.value
    return [rows[step] for step in sorted(rows)]


def expected(run_dir, *, numbers=False, clock=True):
    """Returns the rows of metrics.jsonl in the form that a tracker should have."""
    rows = []
    for row in read_rows(run_dir / "metrics.jsonl"):
        values = {k: v for k, v in row.items() if v is not None and k != NONFINITE_KEYS}
        values |= dict.fromkeys(row.get(NONFINITE_KEYS, ()), "nan")
        rows.append({k: v for k, v in values.items() if not numbers or not isinstance(v, str) or v == "nan"})
    return rows if clock else without_clock(rows)


def plain(rows):
    """Returns the rows with "nan" in the place of NaN, because NaN does not equal itself."""
    return [{key: "nan" if value != value or value == "NaN" else value for key, value in row.items()} for row in rows]


def test_wandb_has_all_of_a_run(whole):
    pytest.importorskip("wandb")
    assert plain(wandb_rows(whole)) == expected(whole)
    config, summary = {}, {}
    for record in wandb_records(whole):
        if record.HasField("run"):
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("summary"):
            summary |= {item.key: json.loads(item.value_json) for item in record.summary.update if item.key}
    nested, _ = settings_of(recorded_config(whole))
    assert {key: config[key] for key in nested} == json.loads(json.dumps(nested))
    assert summary["summary"] == json.loads((whole / "summary.json").read_text())
    (files,) = whole.glob("trackers/wandb/offline-run-*/files")
    assert (files / summary["report"]["path"]).read_bytes() == (whole / "report.png").read_bytes()


def test_trackio_has_all_of_a_run(root, whole):
    trackio = pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    *rows, results = trackio_rows(whole)
    assert plain(rows) == expected(whole)
    assert results == {"step": STEPS, "report": "trackio.image", "summary": "trackio.table"}
    (run,) = [run for run in trackio.Api().runs("rljax") if run.id == kept(whole, "trackio")]
    _, settings = settings_of(recorded_config(whole))
    assert (run.name, run.config["_Username"]) == ("whole", None)
    assert {key: run.config[key] for key in settings} == json.loads(json.dumps(settings))
    logs = SQLiteStorage.get_logs("rljax", "whole", run_id=run.id)
    table = {row["name"]: json.loads(row["value"]) for row in logs[-1]["summary"]["_value"]}
    assert table == json.loads((whole / "summary.json").read_text())
    pictures = list((root / "trackio" / "media").rglob("*.png"))
    assert (whole / "report.png").read_bytes() in [path.read_bytes() for path in pictures]


def test_mlflow_has_all_numbers_of_a_run(whole):
    pytest.importorskip("mlflow")
    assert plain(mlflow_rows(whole)) == expected(whole, numbers=True)
    client, found = mlflow_run(whole)
    _, settings = settings_of(recorded_config(whole))
    assert (found.info.run_name, found.info.status) == ("whole", "FINISHED")
    assert found.data.params == {key: str(value) for key, value in settings.items()}
    folder = Path(client.download_artifacts(found.info.run_id, ""))
    assert sorted(os.listdir(folder)) == ["report.png", "summary.json"]
    assert json.loads((folder / "summary.json").read_text()) == json.loads((whole / "summary.json").read_text())


ROWS_OF = {"wandb": wandb_rows, "trackio": trackio_rows, "mlflow": mlflow_rows}


@pytest.mark.parametrize("kind", ["wandb", "trackio", "mlflow"])
def test_a_killed_run_has_no_double_steps_and_a_fork_is_its_own(whole, killed, forked, kind):
    pytest.importorskip(kind)

    def rows_of(run_dir):
        return [row for row in ROWS_OF[kind](run_dir) if "report" not in row]

    rows = rows_of(killed)
    if kind == "wandb":  # files overlap by rows that may not have been on the disk; wandb sync drops steps that it has
        rows = list({row["step"]: row for row in reversed(rows)}.values())[::-1]
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps))
    assert steps[-5:] == list(range(STEPS - 4, STEPS + 1))  # the last process made these
    of_step = {row["step"]: row for row in expected(killed, numbers=kind == "mlflow", clock=False)}
    assert without_clock(plain(rows)) == [of_step[step] for step in steps]
    assert kept(whole, KINDS[kind]) != kept(forked, KINDS[kind])
    assert [row["step"] for row in rows_of(forked)] == [STEPS + 1, STEPS + 2]
    assert [row["step"] for row in rows_of(whole)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("on_terminal", [False, True])
def test_wandb_without_a_login_is_refused_at_once(root, monkeypatch, on_terminal):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE")
    command = [sys.executable, "-m", "rljax.train", *words(root / "no_login", kinds=["wandb"])]
    parent, child = os.openpty()
    streams = {"stdin": child, "stdout": child, "stderr": child} if on_terminal else {"stderr": child}
    process = subprocess.Popen(command, env=environment(), cwd=ROOT, **streams)
    try:
        assert process.wait(timeout=120) == 2
        said = os.read(parent, 100_000).decode().splitlines()
    finally:
        process.kill()
        os.close(parent)
        os.close(child)
    assert said[-1].startswith("error: record.trackers: wandb: no login: run `wandb login`, set WANDB_API_KEY")
    assert not (root / "no_login").exists()


def test_trackers_whose_stores_are_away_do_not_end_a_run(root, monkeypatch):
    kinds = [kind for kind in INSTALLED if kind != "wandb"]  # wandb falls back to a folder under /tmp
    monkeypatch.setenv("TRACKIO_DIR", "/proc/nowhere")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/no.db")
    output = ended(start(words(root / "away", kinds=kinds)))
    assert len(read_rows(root / "away" / "metrics.jsonl")) == STEPS
    for kind in kinds:
        assert output.count(f"warning: record.trackers: {kind} ") == 1


def test_a_server_that_does_not_answer_is_left_behind(root, monkeypatch):
    pytest.importorskip("wandb")
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:  # it takes connections and says nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for name, value in {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": url}.items():
            monkeypatch.setenv(name, value)
        output = ended(start(words(root / "silent", kinds=["wandb"])))
    assert time.time() - (root / "silent" / "report.png").stat().st_mtime < 20
    assert "wandb gets no more rows: it did not end in time" in output
    assert len(read_rows(root / "silent" / "metrics.jsonl")) == STEPS


def test_a_stop_ends_trackers_within_the_grace(root):
    run_dir = root / "stopped"
    process = start(words(run_dir, "--run.steps", "1000", "--run.grace-s", "20"))
    wait_for_rows(process, run_dir, 3)
    process.send_signal(signal.SIGTERM)
    assert "warning" not in ended(process, 128 + signal.SIGTERM)
    if "trackio" in INSTALLED:
        assert "report" in trackio_rows(run_dir)[-1]
