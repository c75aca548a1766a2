"""The program of a worker process; it imports the reward and nothing else of the trainer.

``multiprocessing`` would import the trainer's main module, and jax with it, into every worker. So this program gets one
end of a pipe. The first message is ``(sys.path, reward path, memory in bytes or None)``; the answer is None or an
error. Each later message is ``(problem, response, truncated, limit in seconds)``; the answer is ``(reward, None)`` or
``(None, error)``. The program ends when the other end is closed.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from types import FrameType

# A worker ends itself this many seconds after the parent's time limit; this happens only if the parent was killed.
_GRACE_S = 5.0


def main() -> None:
    """Scores responses until the parent closes the pipe."""
    signal.signal(signal.SIGTERM, _leave_to_parent)
    connection = Connection(int(sys.argv[1]))
    sys.path[:], path, memory_bytes = connection.recv()
    from rljax.rewards.resolve import resolve_reward, score

    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    try:
        reward = resolve_reward(path)
    except ValueError as error:
        connection.send(str(error))
        return
    connection.send(None)
    while True:
        try:
            problem, response, truncated, limit_s = connection.recv()
        except EOFError:
            return
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit_s + _GRACE_S)
        verdict = score(reward, problem, response, truncated)
        if os.getpid() != _OWN:
            os._exit(1)  # a fork that the reward left behind must not answer for this process
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        connection.send(verdict)


_OWN = os.getpid()


def _leave_to_parent(number: int, frame: FrameType | None) -> None:
    """Ignores SIGTERM in the worker, and lets it end forks that a reward made.

    Slurm sends SIGTERM to every process of a job, but the parent still needs the rewards of its current step.
    """
    del frame
    if os.getpid() != _OWN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, EOFError, KeyboardInterrupt):
        # The parent has ended, so nobody can get a report.
        os._exit(1)
