"""Programs of a few lines of bash that take the place of others on a test's PATH."""

from pathlib import Path


def program(path: Path, text: str) -> Path:
    """Writes an executable script of bash, and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path
