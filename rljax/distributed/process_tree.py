"""Ends a process with everything that it has started, as far as the system still knows that."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_SWEEPS = 10  # processes may start others while they are being killed
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants whose parents end, daemons included. Linux only."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_followers(leader: int) -> None:
    """Kills the descendants of a process, and the processes of the session that it leads, except itself.

    A descendant of a process that had ended is found only if ``leader`` adopts orphans or it stayed in the session.
    """
    for _ in range(_SWEEPS):
        followers = _followers(leader)
        if not followers:
            return
        for process in followers:
            end_process(process)


def end_process(process: int) -> None:
    """Kills one process, if it still runs and belongs to this user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, signal.SIGKILL)


def _followers(leader: int) -> list[int]:
    """Returns the ids of the living followers of a process; none if the system has no /proc."""
    parents, found, living = {}, {leader}, set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # it has ended meanwhile
            continue
        process = int(stat.parent.name)
        parents[process] = int(parent)
        if int(session) == leader:
            found.add(process)
        if state != "Z":
            living.add(process)
    grown = 0
    while len(found) > grown:
        grown = len(found)
        found |= {process for process, parent in parents.items() if parent in found}
    return sorted(found & living - {leader})
