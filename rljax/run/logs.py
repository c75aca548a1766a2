"""Where the processes other than 0 write what they print: one file each in the run directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def log_file(run_dir: Path, process: int) -> Path:
    """The file of one process."""
    return run_dir / "logs" / f"process_{process}.log"


def send_output_to(path: Path) -> None:
    """From now on, what this process and the libraries in it print goes to the end of ``path``, up to its last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
