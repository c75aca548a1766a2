"""Where the processes other than 0 write what they print: one file each in the run directory."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def log_file(run_dir: Path, process: int) -> Path:
    """The file of one process."""
    return run_dir / "logs" / f"process_{process}.log"


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Inside it, what this process and the libraries in it print goes to the end of ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    with path.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)
