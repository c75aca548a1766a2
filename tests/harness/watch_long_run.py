"""Watches what grows in a long training run: memory, open files, threads, logs, the time of a step and of a row.

    python tests/harness/watch_long_run.py --steps 2000 --json benchmarks/long_run.json

A run of configs/toy-base with tiny settings trains in its own process. Its resident memory, open files and threads are
read from /proc about once in 20 steps. A slope is the slope of a straight line through the readings after the first
tenth of the steps. In this first tenth, programs are compiled and caches fill. For the cost of a row, the run's own
rows are written again into a new record. The cost is the median of the rows around step 20, and of the last 20.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from kill_run import ROOT, words
from tqdm import tqdm

from rljax.errors import run_cli
from rljax.record.rows import read_rows
from rljax.record.writers import Recorder

SETTINGS = ("--checkpoint.every", "50", "--eval.every", "500", "--rollout.dump-every", "0")
READ_EVERY = 20
EARLY_ROW = 20
AROUND = 10  # the number of rows before and after
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Arguments:
    """The arguments of the command."""

    steps: int = 2000
    """The number of steps of the run."""
    json: Path | None = None
    """The file for the figures."""


def reading(pid: int, run_dir: Path) -> dict[str, float]:
    """Returns what a process holds now: memory in MiB, counts, and the bytes of its logs."""
    process = Path(f"/proc/{pid}")
    resident = int((process / "statm").read_text().split()[1])
    return {
        "resident_mib": resident * PAGE / 2**20,
        "open_files": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
        "metrics_bytes": (run_dir / "metrics.jsonl").stat().st_size,
        "tensorboard_bytes": sum(path.stat().st_size for path in (run_dir / "tb").iterdir()),
    }


def watch(process: subprocess.Popen[bytes], run_dir: Path, steps: int) -> dict[str, list[float]]:
    """Reads until the run's last row; returns the list of values for each name, and for ``step``."""
    readings: dict[str, list[float]] = {}
    step, read = 0, 0
    rows = run_dir / "metrics.jsonl"
    with tqdm(total=steps, unit="step", file=sys.stderr) as bar:
        while process.poll() is None and not rows.exists():
            time.sleep(0.1)
        with rows.open("rb") as file:
            while process.poll() is None and step < steps:
                time.sleep(0.02)
                step += file.read().count(b"\n")
                bar.update(step - bar.n)
                if step - read >= READ_EVERY:
                    read = step
                    for name, value in {"step": step, **reading(process.pid, run_dir)}.items():
                        readings.setdefault(name, []).append(value)
    return readings


def slope(steps: Sequence[float], values: Sequence[float]) -> float:
    """Returns the slope by step of the straight line that fits the values after the first tenth of the steps."""
    x, y = np.asarray(steps), np.asarray(values)
    late = x > x[-1] / 10
    return float(np.polyfit(x[late], y[late], 1)[0])


def row_costs(rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """Returns the microseconds to write each row, float64 [rows]."""
    taken = []
    with tempfile.TemporaryDirectory() as directory:
        recorder = Recorder(directory, len(rows), progress=False)
        for row in rows:
            values = {key: value for key, value in row.items() if key != "nonfinite_keys"}
            began = time.perf_counter()
            recorder.write(values)
            taken.append((time.perf_counter() - began) * 1e6)
        recorder.close()
    return np.asarray(taken)


def summarize(readings: dict[str, list[float]], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the first value, the last value and the slope of each figure, with early and late times.

    The times are those of a step and of a row.
    """
    figures: dict[str, Any] = {}
    for name, values in readings.items():
        if name != "step":
            rise = slope(readings["step"], values)
            figures[name] = {"first": values[0], "last": values[-1], "slope_per_1000_steps": 1000 * rise}
    step_ms = np.asarray([row["time/step_s"] for row in rows]) * 1e3
    for name, values in (("step_ms", step_ms), ("row_us", row_costs(rows))):
        early, late = slice(EARLY_ROW - AROUND, EARLY_ROW + AROUND), slice(-2 * AROUND, None)
        figures[name] = {"early": float(np.median(values[early])), "late": float(np.median(values[late]))}
    return figures


def main(argv: Sequence[str]) -> int:
    """Runs, watches and prints; returns the exit status."""
    arguments = tyro.cli(Arguments, args=argv, description=__doc__)
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        command = [sys.executable, "-m", "rljax.train", *words(run_dir, 0, arguments.steps), *SETTINGS]
        with (Path(directory) / "log").open("w+b") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
            try:
                readings = watch(process, run_dir, arguments.steps)
                status = process.wait()
            finally:
                process.kill()
        if status != 0:
            print((Path(directory) / "log").read_text()[-2000:], file=sys.stderr)
            return 1
        figures = summarize(readings, read_rows(run_dir / "metrics.jsonl"))
    for name, values in figures.items():
        print(f"{name:18}" + "  ".join(f"{key} {value:12.3f}" for key, value in values.items()))
    if arguments.json:
        hardware = f"{platform.machine()}, {os.cpu_count()} cores"
        record = {
            "command": "python tests/harness/watch_long_run.py " + " ".join(argv),
            "hardware": hardware,
            **figures,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
