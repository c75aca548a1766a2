"""The command after each save: what it is given, what its failures cost, and how long a run waits for it."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
from unittest import mock

import pytest
from toy_runs import comparable, completed, tiny
from waiting import is_gone, until

from rljax.errors import OwnedError
from rljax.run.after_save import AfterSave
from rljax.run.checkpoint import CheckpointConfig
from rljax.run.stop import StopRequest

# Copies the run of the checkpoint in the last argument: the rows, then the first files of the checkpoint.
COPY = """
import pathlib, shutil, sys
target, most, checkpoint = pathlib.Path(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
run = checkpoint.parents[1]
target.mkdir(exist_ok=True)
for name in ("config.yaml", "metrics.jsonl"):
    shutil.copyfile(run / name, target / name)
for path in sorted(path for path in checkpoint.rglob("*") if path.is_file())[:most]:
    place = target / path.relative_to(run)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, place)
"""


@pytest.fixture
def program(tmp_path):
    def command(text, *words):
        path = tmp_path / f"program{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        return " ".join([sys.executable, str(path), *map(str, words)])

    return command


@pytest.mark.slow
def test_a_run_goes_on_from_the_last_whole_copy(toy_base, tmp_path, program):
    """The copy of checkpoint 4 breaks off after five files; the directory is lost, and the copy replaces it."""
    run_dir, copy = tmp_path / "run", tmp_path / "copy"
    for steps, count in ((2, 99), (4, 5)):
        words = tiny(toy_base, run_dir, steps, "--checkpoint.after-save", program(COPY, copy, count))
        assert "after_save" not in completed(words)
    shutil.rmtree(run_dir)
    shutil.copytree(copy, run_dir)
    said = completed(tiny(toy_base, run_dir, 6))
    assert f"warning: checkpoint 4 in {run_dir}/checkpoints is damaged: " in said
    completed(tiny(toy_base, tmp_path / "alone", 6))
    assert comparable(run_dir) == comparable(tmp_path / "alone")


def make_run(run_dir, *steps):
    for step in steps:
        (run_dir / "checkpoints" / str(step)).mkdir(parents=True)
    return run_dir


def calling(command, run_dir, grace_s=30.0, check_owner=lambda: None):
    return AfterSave(command, run_dir, grace_s, check_owner, StopRequest())


def read_calls(calls):
    return [json.loads(line) for line in calls.read_text().splitlines()]


CALLED = "import json, sys\nwith open(sys.argv[1], 'a') as file:\n    print(json.dumps(sys.argv[2:]), file=file)\n"


def test_words_are_split_once_and_the_path_comes_last(tmp_path, program):
    run_dir, calls = make_run(tmp_path / "a run", 2, 4), tmp_path / "calls"
    with calling(program(CALLED, calls, "'two words'", "$HOME", "'*'"), run_dir):
        pass
    assert read_calls(calls) == [["two words", "$HOME", "*", str(run_dir / "checkpoints/4")]]


def test_a_failure_is_a_warning_and_the_next_save_calls_again(tmp_path, program, capsys):
    run_dir, calls = make_run(tmp_path / "run", 2), tmp_path / "calls"
    fails = CALLED + "print('first line')\nif sys.argv[2].endswith('2'):\n    sys.exit('no room left')\n"
    with calling(program(fails, calls), run_dir):
        until(lambda: "no room left" in capsys.readouterr().err)
        make_run(run_dir, 4)
    assert capsys.readouterr().err == ""
    assert [path[-1] for (path,) in read_calls(calls)] == ["2", "4"]
    with calling(program(fails, calls), make_run(tmp_path / "other", 2)):
        pass
    said = "failed for checkpoint 2, status 1: no room left; it is called again after the next save"
    assert capsys.readouterr().err == f"\nwarning: checkpoint.after_save {said}\n"
    assert (tmp_path / "other/logs/after_save.log").read_text().split() == ["first", "line", "no", "room", "left"]


@pytest.mark.parametrize("grace_s", [1.5, 60.0], ids=["grace", "second Ctrl-C"])
def test_the_end_waits_no_longer_than_it_may(tmp_path, program, capsys, grace_s, request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # the background of a shell ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    sleeps = "import os, subprocess, sys\nfile = open(sys.argv[1], 'w')\nchild = subprocess.Popen(['sleep', '600'])\n"
    sleeps += "print(os.getpid(), child.pid, flush=True, file=file)\nchild.wait()\n"
    began, pids = time.monotonic(), tmp_path / "pids"
    interrupt = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    raised = pytest.raises(KeyboardInterrupt) if grace_s == 60.0 else contextlib.nullcontext()
    with raised, calling(program(sleeps, pids), make_run(tmp_path / "run", 2), grace_s):
        until(lambda: pids.exists() and pids.read_text().endswith("\n"))
        assert os.getsid(int(pids.read_text().split()[0])) != os.getsid(0)
        if grace_s == 60.0:
            interrupt.start()
    assert 1.5 <= time.monotonic() - began < 15
    assert capsys.readouterr().err.count("had not ended within run.grace_s, and was killed") == 1
    assert all(is_gone(pid, 20) for pid in pids.read_text().split())


def test_a_look_that_fails_is_tried_again(tmp_path, program, monkeypatch):
    look = mock.Mock(side_effect=itertools.chain([OSError(116, "Stale file handle")], itertools.repeat([2])))
    monkeypatch.setattr("rljax.run.after_save.saved_steps", look)
    with calling(program(CALLED, tmp_path / "calls"), make_run(tmp_path / "run", 2)):
        until((tmp_path / "calls").exists, 20)

    # A run that another process took over calls nothing.
    calls, lost = tmp_path / "more calls", mock.Mock(side_effect=OwnedError("taken over"))
    with calling(program(CALLED, calls), tmp_path / "run", check_owner=lost):
        pass
    assert not calls.exists()


def test_what_cannot_be_called_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match=r"^checkpoint\.after_save: there is no program no-such on the PATH: install"):
        calling("no-such s3://runs", tmp_path)
    with pytest.raises(ValueError, match=r"^after_save must be the words of a command, got .*No closing quotation"):
        CheckpointConfig(after_save="sh -c 'x")
