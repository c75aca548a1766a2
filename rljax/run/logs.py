"""The output of the processes other than 0: one log file each in the run directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def log_file(run_dir: Path, process: int) -> Path:
    """Returns the path of the log file of one process."""
    return run_dir / "logs" / f"process_{process}.log"


def send_output_to(path: Path) -> None:
    """Appends everything that this process and the libraries in it print from now on to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
