"""A planted fault in one of several processes must end all of them in time, and the run must go on afterwards."""

import json
import shutil
import signal
import time

import numpy as np
import pytest
from process_runs import FLOAT32, TINY, Run, assert_alike, complete_together
from toy_runs import comparable, tiny
from waiting import until

from rljax.errors import START_AGAIN_STATUS

pytestmark = pytest.mark.processes
STEPS = 10
HEARTBEAT_S = 10


def words(base, run_dir, *options):
    return tiny(base, run_dir, STEPS, *FLOAT32, *TINY, *options)


@pytest.fixture(scope="module")
def alone(toy_base, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    complete_together(words(toy_base, run_dir), 1, run_dir.with_name("printed"))
    return comparable(run_dir)


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def begin(alone, toy_base, run_dir, tmp_path):
    """Yields a function that starts the run. After the test, two processes complete it with the rows of one process."""

    def start(*options, count=2, printed="first", heartbeat_s=HEARTBEAT_S, **planted):
        return Run(words(toy_base, run_dir, *options), count, tmp_path / printed, heartbeat_s, **planted)

    yield start
    complete_together(words(toy_base, run_dir), 2, tmp_path / "again", heartbeat_s=30)
    assert_alike(comparable(run_dir), alone)


@pytest.mark.parametrize(("seed", "count"), [(0, 2), (2, 4), (3, 4)])
def test_killed_at_any_time_the_others_end_in_time_and_name_it(seed, count, begin, run_dir):
    rng = np.random.default_rng(seed)
    with begin(count=count) as run:
        run.wait_for_rows(run_dir, int(rng.integers(2, 7)))
        time.sleep(rng.uniform(0, 1))
        victim = int(rng.integers(count))
        run.send(victim)
        began = time.monotonic()
        assert run.wait(but=[victim]) == [START_AGAIN_STATUS] * (count - 1), run.printed()
        assert time.monotonic() - began < HEARTBEAT_S + 2  # four processes run on two cores
        said = run.printed()[0] if victim else "".join(p.read_text() for p in (run_dir / "logs").iterdir())
    assert f"error: process {victim} on " in said


@pytest.mark.parametrize(("seed", "count"), [(0, 4), (1, 2)])
def test_killed_while_all_start_the_others_end_in_time(seed, count, begin, run_dir):
    """The last process is killed at a random moment after its log appears, as it reads the model and checkpoints."""
    with begin(count=count) as run:
        until((run_dir / f"logs/process_{count - 1}.log").exists, every_s=0.01)
        time.sleep(np.random.default_rng(seed).uniform(0, 4))
        run.send(count - 1)
        began = time.monotonic()
        assert run.wait(but=[count - 1]) == [START_AGAIN_STATUS] * (count - 1), run.printed()
        assert time.monotonic() - began < HEARTBEAT_S + 2


@pytest.mark.parametrize("victim", [0, 1])
def test_a_frozen_process_ends_the_others_and_then_itself(victim, begin, run_dir):
    with begin() as run:
        run.wait_for_rows(run_dir, 3)
        run.send(victim, signal.SIGSTOP)
        began = time.monotonic()
        assert run.wait(but=[victim]) == [START_AGAIN_STATUS], run.printed()
        assert time.monotonic() - began < HEARTBEAT_S + 2
        run.send(victim, signal.SIGCONT)
        assert run.wait(timeout=HEARTBEAT_S + 20)[victim] == START_AGAIN_STATUS, run.printed()


# A process loads this at its start (PYTHONPATH). If its number is WHO, it does what FAULT says at its fourth update.
SITE = """
import os, sys, time

def plant():
    import rljax.trainer.step as step
    calls, plain = [], step.TrainStep.__call__

    def call(self, *args, **options):
        calls.append(None)
        if len(calls) == 4:
            if os.environ["FAULT"] == "raise":
                raise ValueError("planted")
            time.sleep(600)
        return plain(self, *args, **options)

    step.TrainStep.__call__ = call

words = sys.orig_argv
if "--run.process-id" in words and os.environ["WHO"] == words[words.index("--run.process-id") + 1]:
    plant()
"""


@pytest.mark.parametrize("who", ["0", "1"])
def test_an_error_in_one_process_ends_all_with_its_status(who, begin, run_dir, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITE)
    with begin(FAULT="raise", WHO=who, path=tmp_path) as run:
        assert run.wait(timeout=180) == [1, 1], run.printed()
        outputs = [run.printed()[0], (run_dir / "logs/process_1.log").read_text()]
    assert all("ValueError: planted" in each for each in outputs)  # a traceback, or the message of the other process


def test_of_a_hanging_step_each_process_says_where_it_is(begin, run_dir, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITE)
    with begin("--run.stuck-s", "60", FAULT="hang", WHO="1", path=tmp_path) as run:
        assert run.wait(timeout=300) == [START_AGAIN_STATUS] * 2, run.printed()
        printed, log = run.printed()[0], (run_dir / "logs/process_1.log").read_text()
    assert "nothing moved for run.stuck_s = 60 s: process 0 on " in printed
    assert ": update for " in printed
    assert "sitecustomize.py" in log, "the traceback does not show where it hangs"


@pytest.mark.parametrize("who", [0, 1])
def test_a_stop_at_any_process_saves_one_step_of_all(who, begin, run_dir):
    with begin("--checkpoint.every", "0") as run:
        run.wait_for_rows(run_dir, 3)
        run.send(who, signal.SIGTERM)
        assert run.wait(timeout=60) == [128 + signal.SIGTERM] * 2, run.printed()
        assert f"stopped after step {len(comparable(run_dir))}, saved" in run.printed()[0]


@pytest.mark.parametrize("damage", ["arrays", "host"])
def test_a_damaged_checkpoint_is_left_for_the_one_before_it(damage, begin, run_dir):
    with begin("--run.steps", "6", printed="before", heartbeat_s=30) as run:
        assert run.wait() == [0, 0], run.printed()
    place = run_dir / "checkpoints" / "6"
    if damage == "host":
        (place / "host" / "metadata").write_text("{")
    else:
        largest = max((path for path in (place / "state").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2 : len(content) // 2 + 400] = bytes(400)
        largest.write_bytes(content)
    with begin() as run:
        statuses = run.wait(timeout=120)
        printed = [*run.printed(), (run_dir / "logs/process_1.log").read_text()]
    assert statuses == [START_AGAIN_STATUS] * 2, printed
    assert any("checkpoint 6 in " in each and "is damaged" in each for each in printed)
    assert [path.name for path in (run_dir / "damaged").iterdir()] == ["6"]


def test_a_process_lost_during_a_save_keeps_the_last_one(begin, run_dir):
    """A process is killed as soon as the folder of an incomplete save appears, several times."""
    caught = 0
    for attempt in range(3):
        with begin("--checkpoint.every", "1", printed=f"kill_{attempt}") as run:
            seen, deadline = {p.name for p in run_dir.glob("checkpoints/*")}, time.monotonic() + 120
            while time.monotonic() < deadline and run.processes[1].poll() is None:
                if any(p.name not in seen and not p.name.isdecimal() for p in run_dir.glob("checkpoints/*")):
                    run.send(1)
                    caught += 1
                    break
                time.sleep(0.002)
            assert run.wait(timeout=60)[0] in (0, START_AGAIN_STATUS), run.printed()
    assert caught
    for path in (path for path in (run_dir / "checkpoints").iterdir() if path.name.isdecimal()):
        assert json.loads((path / "_CHECKPOINT_METADATA").read_text())["commit_timestamp_nsecs"]


@pytest.mark.parametrize(("every", "is_removed"), [("0", False), ("1", True)])
def test_a_lost_run_directory_ends_all_with_one_line(every, is_removed, toy_base, tmp_path):
    """With ``every`` at 1 a save is under way when the directory goes."""
    run_dir, moved = tmp_path / "run", tmp_path / "moved"
    long = tiny(toy_base, run_dir, 400, *FLOAT32, *TINY, "--checkpoint.every", every)
    with Run(long, 2, tmp_path / "first", heartbeat_s=HEARTBEAT_S) as run:
        run.wait_for_rows(run_dir, 3)
        run_dir.rename(moved)
        if is_removed:
            shutil.rmtree(moved, ignore_errors=True)
        assert run.wait(timeout=120) == [2, 2], run.printed()
        (line,) = [line for line in run.printed()[0].splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {run_dir} was {'' if is_removed else f'moved to {moved} '}")
