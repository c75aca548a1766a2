"""Copies of installed packages with a patch of ``examples/patches`` in them, and programs that run on such a copy."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def patched_copy(package, directory):
    """Copies the installed package into ``directory`` and applies ``examples/patches/<package>.patch`` exactly."""
    (source,) = importlib.util.find_spec(package).submodule_search_locations
    shutil.copytree(source, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    patch = ROOT / "examples" / "patches" / f"{package}.patch"
    subprocess.run(["git", "init", "-q"], cwd=directory, check=True)  # so that git knows no repository above it
    subprocess.run(["git", "apply", "--verbose", str(patch)], cwd=directory, check=True)


def program_output(name, directory, settings, **variables):
    """Runs a program of tests/peers with the packages of ``directory`` first, and returns the JSON of its last line."""
    programs = ROOT / "tests" / "peers"
    paths = os.pathsep.join(map(str, (directory, ROOT, programs)))
    done = subprocess.run(
        [sys.executable, str(programs / name), json.dumps(settings)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | variables,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
