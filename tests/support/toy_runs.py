"""Helpers that run ``python -m rljax.train`` on the toy task, in this process or in its own."""

import _thread
import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
from toy_problems import load_for_path
from waiting import has_rows, until

from rljax import train
from rljax.errors import run_cli
from rljax.record.rows import read_rows

ROOT = Path(__file__).parents[2]
TOY_BASE = ROOT / "configs/toy-base"
TIMEOUT = 600


def environment(**settings):
    """Returns the environment of a child process, which imports this checkout. tests/conftest.py has set the rest."""
    return os.environ | {"PYTHONPATH": str(ROOT)} | settings


def command(base, run_dir, *options):
    return [str(ROOT / "configs/quickstart.yaml"), "--model.path", str(base), "--run.dir", str(run_dir), *options]


def tiny(base, run_dir, steps, *options):
    """Returns the arguments of a run whose steps take a few hundredths of a second, with a checkpoint every two."""
    size = ("--data.batch-size", "2", "--rollout.group-size", "4", "--rollout.max-response-tokens", "12")
    # Separate rows start faster: rows of trees are compared with them at the first step.
    rows = ("--packing.row-tokens", "64", "--packing.rows-per-micro-batch", "2", "--packing.share-prefixes", "false")
    rows = (*rows, "--diagnosis.grad-noise-every", "0")
    when = ("--run.steps", str(steps), "--eval.every", "0", "--checkpoint.every", "2")
    return command(base, run_dir, *size, *rows, *when, *options)


def resumed_rows(base, directory, *options):
    """Returns the rows of a run of four steps, which a run that stops after two of them and goes on must have, too."""
    completed(tiny(base, directory / "whole", 4, *options))
    completed(tiny(base, directory / "parts", 2, *options))
    completed(tiny(base, directory / "parts", 4, *options))
    rows = comparable(directory / "whole")
    assert comparable(directory / "parts") == rows
    return rows


def start(words, **settings):
    command, pipe = [sys.executable, "-m", "rljax.train", *words], subprocess.PIPE
    own = environment(**settings)
    return subprocess.Popen(command, env=own, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def outcome(main, words):
    """Runs a program's ``main`` in this process; returns (exit status, standard output, standard error)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run_cli(main, [str(word) for word in words])
    return status, out.getvalue(), err.getvalue()


def printed(main, words):
    status, out, err = outcome(main, words)
    assert status == 0, err
    return out


def refused(main, words):
    """Returns the only line that a program prints, with which it refuses its words."""
    status, out, err = outcome(main, words)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    return err


def complete(words, *, figure=False, is_sound=True):
    """Trains to the end in this process; returns (exit status, standard error followed by standard output).

    ``report.png`` is drawn only with ``figure``, because it takes longer than the steps of a tiny run. The toy's
    problems are kept for other runs. A run that ``is_sound`` must not say that its responses do not belong to their
    prompts or tokens (``rljax.run.watch``).
    """
    plotted = contextlib.nullcontext() if figure else mock.patch("rljax.record.figure.plot_report")
    with plotted, mock.patch("rljax.train.load_problems", load_for_path):
        status, out, err = outcome(train.main, words)
    assert not is_sound or "\nwarning: step " not in err, err
    return status, err + out


def completed(words, **options):
    status, output = complete(words, **options)
    assert status == 0, output
    return output


def _complete_until(is_over, words, *, every_s, again_s):
    """Runs the command like ``complete``, asks ``is_over`` every ``every_s`` seconds, and then sends SIGTERM.

    The signal comes again after ``again_s`` seconds.
    """
    ended = threading.Event()

    def watch():
        while not ended.wait(every_s):
            if is_over():
                _thread.interrupt_main(signal.SIGTERM)  # does nothing unless the run handles it
                ended.wait(again_s)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        return complete(words)
    finally:
        ended.set()
        watcher.join()


def complete_signalled(words, run_dir, count):
    """Runs the command like ``complete``, and sends SIGTERM as soon as the run has written ``count`` rows."""
    return _complete_until(lambda: has_rows(run_dir, count), words, every_s=0.01, again_s=TIMEOUT)


def complete_beside(server, words):
    """Runs the command like ``complete``. If ``server`` dies, the run receives SIGTERM and the test fails."""
    status, output = _complete_until(lambda: not server.alive(), words, every_s=1.0, again_s=1.0)
    if not server.alive():
        pytest.fail(f"the vLLM server ended; the end of {server.log_path}:\n{server.log_tail()}\n{output}")
    return status, output


def wait_for_rows(process, run_dir, count):
    def runs():
        return process.poll() is None

    until(lambda: has_rows(run_dir, count), TIMEOUT, said=lambda: runs() or process.stdout.read(), may_come=runs)


def kill_at(words, run_dir, count, **settings):
    process = start(words, **settings)
    wait_for_rows(process, run_dir, count)
    process.kill()
    process.communicate()


def without_clock(rows):
    """Returns the rows without the metrics that depend on the clock."""
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]


def comparable(run_dir):
    return without_clock(read_rows(run_dir / "metrics.jsonl"))
