"""The wait for a condition, such as the end of a process."""

import time
from pathlib import Path


def until(holds, timeout_s=120.0):
    """Waits until ``holds()`` is true, and fails after a time limit."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.02)


def is_gone(pid, within_s=10.0):
    """Returns whether a process ends in time. It may stay as a zombie, because some containers wait for no orphan."""
    stat, deadline = Path("/proc", str(pid), "stat"), time.monotonic() + within_s
    while True:
        try:
            if stat.read_text().rpartition(") ")[2].startswith("Z"):
                return True
        except OSError:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
