"""The program of a child process. Of the trainer it imports only the modules that it runs.

``multiprocessing`` would import the trainer's main module, and jax with it, into every child. Here standard input is
one end of a pair of sockets. The first frame is a pickle of ``(sys.path, bytes of memory or None, program, settings)``,
in which the settings are pickled once more. The function ``program``, written ``module:name``, gets ``(frames,
*settings)`` in a process of its own. A process between that one and the trainer ends all that the function leaves.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import pkgutil
import resource
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

_REQUEST_BYTES = 1 << 40  # The trainer's frames need no bound.
_SWEEPS = 10  # processes may start others while they are being killed
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Starts the process that runs the program, and waits for its end."""
    sys.path.append(str(Path(__file__).parents[2]))
    from rljax.distributed.frames import take_stdin

    end = take_stdin()
    # On Linux the descendants of this process whose parents end become its children, daemons included.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # The program answers it.
    worker = os.fork()
    if worker == 0:
        _work(end)
    else:
        end.close()
        _end_after(worker)


def _work(end: socket.socket) -> None:
    """Runs the program that the first frame names."""
    from rljax.distributed.frames import Frames

    own = os.getpid()

    def leave_to_parent(number: int, frame: FrameType | None) -> None:
        """Ignores SIGTERM in this process, and lets it end forks that the user's code made.

        Slurm sends SIGTERM to every process of a job, but the trainer still needs the answers of its current step.
        """
        if os.getpid() != own:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, leave_to_parent)
    frames = Frames(end, _REQUEST_BYTES)
    _, body = frames.receive()
    sys.path[:], memory_bytes, program, settings = pickle.loads(body)
    run = pkgutil.resolve_name(program)
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    run(frames, *pickle.loads(settings))


def _end_after(worker: int) -> NoReturn:
    """Waits for a child process, ends the processes that it left behind, and ends with its exit status."""
    ended, status = os.wait()
    while ended != worker:
        ended, status = os.wait()
    end_followers(os.getpid())
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(max(code, 1) if code < 0 else code)


def end_followers(leader: int) -> None:
    """Kills the descendants of a process, and the processes of the session that it leads, except itself.

    A descendant whose parent has ended is found only if ``leader`` adopts orphans, or if it stayed in the session.
    """
    for _ in range(_SWEEPS):
        found = followers(leader)
        if not found:
            return
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def followers(leader: int) -> list[int]:
    """Returns the ids of the living processes that ``end_followers`` would kill; none if there is no /proc."""
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


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, EOFError, KeyboardInterrupt):
        # The trainer has ended, so nobody can get a report.
        os._exit(1)
