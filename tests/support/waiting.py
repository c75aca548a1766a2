"""The wait for a condition."""

import time


def until(holds, timeout_s=120.0):
    """Waits until ``holds()`` is true, and fails after a time limit."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.02)
