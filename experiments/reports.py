"""Writes the JSON file of a benchmark."""

import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import jax


def write_report(path: Path | None, cases: Any, *versions: str) -> None:
    """Writes the command, the machine with the ``versions`` of further packages, and the cases. No path: nothing."""
    if path is None:
        return
    machine = f"{platform.machine()}, {os.cpu_count()} cores; {', '.join([f'jax {jax.__version__}', *versions])}"
    report = {"command": shlex.join(["python", *sys.argv]), "machine": machine, "cases": cases}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
