"""Programs of a few lines of bash that take the place of others on a test's PATH, and runs of scripts beside them."""

import os
import shutil
import subprocess
from pathlib import Path


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def bash(*words, **variables) -> tuple[int, str, str]:
    """Runs bash with these words and further environment variables; returns (exit status, output, errors)."""
    command = [shutil.which("bash"), *map(str, words)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def of_script(script: Path, function: str, *words, **variables) -> tuple[int, str, str]:
    """Runs a function of a script that other scripts source, in the same way."""
    return bash("-c", f'source {script}; {function} "$@"', "-", *words, **variables)
