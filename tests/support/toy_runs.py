"""How the tests run ``python -m rljax.train``: as a process, as a person does, on one device."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rljax.report.rows import read_rows

ROOT = Path(__file__).parents[2]
TIMEOUT = 600


def environment(cache):
    """The many devices of the test session are not passed on; compiled programs are shared between the runs."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
        "XLA_FLAGS": "",
        "PYTHONPATH": str(ROOT),
    }
    return os.environ | settings


def command(base, run_dir, *options):
    config = str(ROOT / "configs/quickstart.yaml")
    where = ["--model.path", str(base), "--run.dir", str(run_dir)]
    return [sys.executable, "-m", "rljax.train", config, *where, *options]


def start(arguments, cache):
    return subprocess.Popen(
        arguments, env=environment(cache), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def complete(arguments, cache):
    """Runs to the end. Returns (exit status, output)."""
    process = start(arguments, cache)
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    return process.returncode, output


def wait_for_rows(process, run_dir, count):
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        path = run_dir / "metrics.jsonl"
        if path.exists() and len(path.read_text().splitlines()) >= count:
            return
        if process.poll() is not None:
            pytest.fail(f"the run ended by itself with {process.returncode}: {process.stdout.read()}")
        time.sleep(0.02)
    pytest.fail(f"no {count} rows within {TIMEOUT} s")


def comparable(run_dir):
    """The rows without what depends on the clock."""
    rows = read_rows(run_dir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]
