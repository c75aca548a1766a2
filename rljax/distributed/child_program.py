"""The program of a child process. Of the trainer it imports only the modules that it runs.

``multiprocessing`` would import the trainer's main module, and jax with it, into every child. Here standard input is
one end of a pair of sockets. The first frame is a pickle of ``(sys.path, bytes of memory or None, program, settings)``,
in which the settings are pickled once more. The function ``program``, written ``module:name``, gets ``(frames,
*settings)``. It runs in a process of its own, and the process between it and the trainer ends what it leaves behind.
"""

from __future__ import annotations

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


def main() -> None:
    """Starts the process that runs the program, and waits for its end."""
    sys.path.append(str(Path(__file__).parents[2]))
    from rljax.distributed.frames import take_stdin
    from rljax.distributed.process_tree import adopt_orphans

    end = take_stdin()
    adopt_orphans()
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
        """Ignores SIGTERM in this process, and lets it end forks that a person's code made.

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
    """Waits for a child process, ends all that it left behind, and ends with its exit status."""
    from rljax.distributed.process_tree import end_followers

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


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, EOFError, KeyboardInterrupt):
        # The trainer has ended, so nobody can get a report.
        os._exit(1)
