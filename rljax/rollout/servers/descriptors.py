"""File descriptors: each connection takes one, and shells commonly allow 1,024."""

from __future__ import annotations

import contextlib
import os
import resource

_SPARE = 256  # left to the rest of the run: checkpoints, rows, reward workers, the accelerator's driver


def room_for(connections: int) -> int:
    """How many of ``connections`` can be open at a time; raises this process's soft limit to that, never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return connections
    taken = _open_now() + _SPARE
    if soft < taken + connections:
        wanted = taken + connections if hard == resource.RLIM_INFINITY else min(taken + connections, hard)
        with contextlib.suppress(OSError, ValueError):  # a kernel that allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
            soft = max(soft, wanted)
    return max(1, min(connections, soft - taken))


def _open_now() -> int:
    """Descriptors that are open (0 where there is no /proc)."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return 0
