"""Trains a policy of Qwen3-0.6B's shape with a real vLLM server on this machine, and resumes it.

    python experiments/real_size.py --json benchmarks/real_size.json

The weights are random, and the tokenizer is the toy's. ``launch/single_node.sh`` starts the server and the trainer,
both in bfloat16: blocks recomputed, 4 x 4 responses of 64 tokens, weights pulled over HTTP. Three steps are trained.
The same command then goes on to the fourth. The toy's reward of random weights is 0, so that no step changes them.
``--moving`` rewards every other response instead. The program needs 21 GB of free memory and 25 GB of disk, and runs
for about ten minutes on two cores. It prints Markdown tables.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOY = ROOT / "rljax" / "configs" / "toy-base"
MODEL = "Qwen/Qwen3-0.6B"
SETTINGS = {
    "data.batch-size": "4",
    "rollout.group-size": "4",
    "rollout.max-response-tokens": "64",
    "precision.remat": "blocks",
    "publish.store": "http",
    "eval.every": "0",
}
PARAMETERS = 596_049_920
_SCORED = itertools.count()
LONGEST_S = 1800.0
TRAINER = "rljax.train"  # stands in the command line of the trainer's processes
COLUMNS = {
    "step": "time/step_s",
    "rollout": "time/rollout_s",
    "train": "time/train_s",
    "publish": "publish/seconds",
    "stall": "publish/stall_s",
    "load": "publish/load_s",
    "changed": "publish/changed_fraction",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs both parts and prints what they took; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moving", action="store_true", help="reward every other response, so that the weights change")
    parser.add_argument("--directory", type=Path, help="parent of the run's files (default: the temporary directory)")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        made = multiprocessing.get_context("spawn").Process(target=make_model, args=(directory / "model",))
        made.start()
        made.join(LONGEST_S)
        settings = SETTINGS | {"model.path": str(directory / "model"), "run.dir": str(directory / "run")}
        settings["rollout.transfer-dir"] = str(directory)
        if options.moving:
            settings |= {"data.reward": "real_size:every_other", "optimizer.learning-rate": "1e-6"}
        parts = [run(directory, settings | {"run.steps": steps}) for steps in ("3", "4")]
        rows = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    found = {
        "command": shlex.join(["python", "experiments/real_size.py", *(arguments or sys.argv[1:])]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "parameters": PARAMETERS,
        "steps": [{short: row.get(key) for short, key in COLUMNS.items()} for row in rows],
        "parts": parts,
    }
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(len(rows) != 4 or any(part["status"] for part in parts))


def every_other(problem: dict[str, Any], response: str, truncated: bool) -> float:
    """Returns 1 for every other response that this process scores, because the texts of random weights are empty."""
    return float(next(_SCORED) % 2)


def make_model(directory: Path) -> None:
    """Writes random weights in another process, whose memory is free afterwards."""
    from dataclasses import replace

    from rljax.policy.hf import save_params
    from rljax.policy.hub import KNOWN_SHAPES
    from rljax.policy.model import init_params

    eos = json.loads((TOY / "config.json").read_text())["eos_token_id"]
    shape = replace(KNOWN_SHAPES[MODEL], eos_token_id=eos, bos_token_id=None)
    save_params(directory, init_params(shape, 0), shape, "bfloat16")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TOY / name, directory / name)


def run(directory: Path, settings: Mapping[str, str]) -> dict[str, Any]:
    """Runs server and trainer once, shows their output, and returns the time and the trainer's largest memory."""
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    command = ["bash", "launch/single_node.sh", "configs/quickstart.yaml", "--engine", "vllm", "--", *words]
    paths = [str(ROOT / "experiments"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "RLJAX_MIRROR_DIR": str(directory),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    began = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        watch = Watch()
        threading.Thread(target=watch.follow, args=(process,), daemon=True).start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr)
        status = process.wait(LONGEST_S)
    return {
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "trainer_gb": watch.most,
    }


class Watch:
    """A measurement of the largest memory (GB) of the trainer and its workers."""

    def __init__(self) -> None:
        """Starts with no memory seen."""
        self.most = 0.0

    def follow(self, process: subprocess.Popen[str]) -> None:
        """Measures twice a second until ``process`` has ended."""
        while process.poll() is None:
            held = 0.0
            for place in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    size = re.search(r"^Pss:\s+(\d+)", (place / "smaps_rollup").read_text(), re.MULTILINE)
                    if size and TRAINER in (place / "cmdline").read_text():
                        held += int(size[1]) * 1024 / 1e9
            self.most = round(max(self.most, held), 2)
            time.sleep(0.5)


def table(found: dict[str, Any]) -> str:
    """Returns the two tables in Markdown, with a row for each step and a row for each part of the run."""
    lines = ["| " + " | ".join(["step", *(f"{name} (s)" for name in COLUMNS if name != "changed"), "changed"]) + " |"]
    lines += ["|" + "---|" * (len(COLUMNS) + 1)]
    for number, row in enumerate(found["steps"], 1):
        cells = ["" if value is None else f"{value:.3g}" for value in row.values()]
        lines.append("| " + " | ".join([str(number), *cells]) + " |")
    lines += ["", "| part | seconds | trainer GB | bytes a parameter |", "|---|---|---|---|"]
    for name, part in zip(("steps 1 to 3", "step 4, resumed"), found["parts"], strict=True):
        each = part["trainer_gb"] * 1e9 / found["parameters"]
        lines.append(f"| {name} | {part['seconds']:.0f} | {part['trainer_gb']:.1f} | {each:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
