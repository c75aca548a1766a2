"""A small file system that is soon full."""

import contextlib
import subprocess

import pytest


@contextlib.contextmanager
def small_disk(directory, size_mb):
    """Mounts a file system of ``size_mb`` MB at ``directory``; without the right to mount, the test is skipped."""
    words = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "none", directory]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("a small file system needs the right to mount one")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def fill(directory):
    """Fills one file until nothing more fits, and returns its path."""
    path = directory / "fill"
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return path
