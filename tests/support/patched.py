"""Copies of installed packages with a patch of ``examples/patches``, and programs that run on such a copy."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rljax.schedule import LengthTriggeredLR, SurgeConfig, SurgeTracker

ROOT = Path(__file__).parents[2]


def patched_copy(package, directory):
    """Copies the installed package into ``directory`` and applies ``examples/patches/<package>.patch`` exactly."""
    (source,) = importlib.util.find_spec(package).submodule_search_locations
    shutil.copytree(source, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    patch = ROOT / "examples" / "patches" / f"{package}.patch"
    subprocess.run(["git", "init", "-q"], cwd=directory, check=True)  # so that git sees no repository above it
    subprocess.run(["git", "apply", "--verbose", str(patch)], cwd=directory, check=True)


def program_output(name, directory, settings, **variables):
    """Runs a program of tests/peers with the packages of ``directory`` first; returns the JSON of its last line."""
    programs = ROOT / "tests" / "peers"
    paths = os.pathsep.join(map(str, (directory, ROOT, programs)))
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, str(programs / name), json.dumps(settings)]
    done = subprocess.run(command, env=env, cwd=directory, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_rates_of_updates(program, directory, short, place, scheduler, **variables):
    """Checks that a patched trainer updates by the law, with two mini-batches and two epochs a batch.

    All updates of a batch have one rate. A new worker resumes from the trainer's checkpoint between the surge and the
    first decay. ``short`` is the mean length of the first four batches; the other 22 are four times as long.
    ``place`` and ``scheduler`` name the trainer's options: that of the optimizer's, and of the scheduler's kind and
    arguments.
    """
    lengths = [short] * 4 + [4 * short] * 22
    rules = SurgeConfig(window=6, warmup=3, smooth=1, persistence=1)
    law = LengthTriggeredLR(1e-6, tracker=SurgeTracker(rules), multiplier=1.2)
    rates = [law.step(length) for length in lengths]
    assert (law.surge_step, law.decay_period) == (5, 6)
    given = "{multiplier: 1.2, surge: {window: 6, warmup: 3, smooth: 1, persistence: 1}}"
    words = zip(("lr", *scheduler), ("1e-6", "length_triggered", given), strict=True)
    settings = {"overrides": [f"{place}.{name}={value}" for name, value in words], "lengths": lengths, "resume_at": 5}
    settings |= {"model": str(ROOT / "configs" / "toy-base"), "directory": str(directory / "checkpoint")}
    found = program_output(program, directory, settings, **variables)
    assert found == {"used": [rate for rate in rates for _ in range(4)], "logged": rates, "surge_step": 5}, found
    assert rates[-1] == pytest.approx(1e-7)
