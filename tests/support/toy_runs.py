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
    flags = os.environ.get("XLA_FLAGS", "").split()
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
        "XLA_FLAGS": " ".join(flag for flag in flags if "device_count" not in flag),
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


def complete(arguments, cache, server=None, timeout=TIMEOUT):
    """Runs to the end. Returns (exit status, output). When ``server`` dies, the test fails at once."""
    process = start(arguments, cache)
    deadline = time.monotonic() + timeout
    try:
        while True:
            try:
                output, _ = process.communicate(timeout=1)
                return process.returncode, output
            except subprocess.TimeoutExpired:
                if server is not None and not server.alive():
                    pytest.fail(f"the vLLM server ended; the end of {server.log_path}:\n{server.log_tail()}")
                if time.monotonic() > deadline:
                    raise
    finally:
        process.kill()


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
