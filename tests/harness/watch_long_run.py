"""Watches what grows in a long training run: memory, open files, threads, logs, the time of a step and of a row.

    python tests/harness/watch_long_run.py --steps 2000 --json benchmarks/long_run.json

A run of configs/toy-base with tiny settings trains in its own process. Its resident memory, open files and threads are
read from /proc about once in 20 steps. A slope is the slope of a straight line through the readings after the first
tenth of the steps. In this first tenth, programs are compiled and caches fill. For the cost of a row, the run's own
rows are written again into a new record. The cost is the median of the rows around step 20, and of the last 20.
"""

import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tyro
from kill_run import ROOT, report, words

from rljax.errors import run_cli
from rljax.record.rows import read_rows
from rljax.record.writers import Recorder

SETTINGS = ("--checkpoint.every", "50", "--eval.every", "500", "--rollout.dump-every", "0")
READ_EVERY = 20
EARLY, LATE = slice(10, 30), slice(-20, None)


def reading(pid, run_dir):
    """Returns what a process holds now: memory in MiB, counts, and the bytes of its logs."""
    process = Path(f"/proc/{pid}")
    return {
        "resident_mib": int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "open_files": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
        "metrics_bytes": (run_dir / "metrics.jsonl").stat().st_size,
        "tensorboard_bytes": sum(path.stat().st_size for path in (run_dir / "tb").iterdir()),
    }


def watch(process, run_dir, steps):
    """Reads until the run's last row; returns the list of values for each name, and for ``step``."""
    readings, step, read, rows = {}, 0, 0, run_dir / "metrics.jsonl"
    while process.poll() is None and not rows.exists():
        time.sleep(0.1)
    with rows.open("rb") as file:
        while process.poll() is None and step < steps:
            time.sleep(0.02)
            step += file.read().count(b"\n")
            if step - read >= READ_EVERY:
                read = step
                for name, value in {"step": step, **reading(process.pid, run_dir)}.items():
                    readings.setdefault(name, []).append(value)
    return readings


def row_costs(rows):
    taken = []
    with tempfile.TemporaryDirectory() as directory:
        recorder = Recorder(directory, len(rows), progress=False)
        for row in rows:
            values = {key: value for key, value in row.items() if key != "nonfinite_keys"}
            began = time.perf_counter()
            recorder.write(values)
            taken.append((time.perf_counter() - began) * 1e6)
        recorder.close()
    return taken


def summarize(readings, rows):
    """Returns the first value, the last value and the slope of each figure, and early and late times in medians."""
    steps = np.asarray(readings["step"])
    figures, late = {}, steps > steps[-1] / 10
    for name, values in readings.items():
        if name != "step":
            rise = 1000 * float(np.polyfit(steps[late], np.asarray(values)[late], 1)[0])
            figures[name] = {"first": values[0], "last": values[-1], "slope_per_1000_steps": rise}
    for name, values in (("step_ms", [1e3 * row["time/step_s"] for row in rows]), ("row_us", row_costs(rows))):
        figures[name] = {"early": float(np.median(values[EARLY])), "late": float(np.median(values[LATE]))}
    return figures


def main(argv):
    def arguments(steps: int = 2000, json: Path | None = None):
        return steps, json

    steps, file = tyro.cli(arguments, args=argv, description=__doc__)
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        command = [sys.executable, "-m", "rljax.train", *words(run_dir, 0, steps), *SETTINGS]
        with (Path(directory) / "log").open("w+b") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
            try:
                readings = watch(process, run_dir, steps)
                status = process.wait()
            finally:
                process.kill()
        if status != 0:
            print((Path(directory) / "log").read_text()[-2000:], file=sys.stderr)
            return 1
        figures = summarize(readings, read_rows(run_dir / "metrics.jsonl"))
    report(argv, {"hardware": f"{platform.machine()}, {os.cpu_count()} cores", **figures}, file)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
