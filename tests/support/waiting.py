"""The wait for a condition, such as the end of a process, and a free port for one."""

import contextlib
import socket
import time

import psutil


def until(holds, timeout_s=120.0, *, said=str, may_come=lambda: True, every_s=0.02):
    """Waits until ``holds()`` is true. It fails with ``said()`` after a time limit, or when ``may_come()`` is false."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert may_come() or holds(), f"in vain: {said()}"
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {said()}"
        time.sleep(every_s)


def has_rows(run_dir, count):
    path = run_dir / "metrics.jsonl"
    return path.exists() and len(path.read_text().splitlines()) >= count


def is_gone(pid, within_s=10.0):
    """Returns whether a process ends in time. It may stay as a zombie, because some containers wait for no orphan."""
    deadline = time.monotonic() + within_s
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
    return True


def free_port() -> int:
    """Returns a TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
