"""The process in which a reward runs; it imports the reward and nothing else of the trainer.

``multiprocessing`` would import the trainer's main module, and jax with it, into every worker. Here the process gets
one end of a pipe, and on it, pickled: ``(sys.path, reward path, memory in bytes or None)``, answered by None or by what
went wrong; then one ``(problem, response, truncated, limit in seconds)`` after the other, each answered by
``(reward, None)`` or ``(None, what went wrong)``. It ends when the other end is closed.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from types import FrameType

# Seconds after the parent's time limit at which a worker ends itself; reached only when the parent was killed.
_GRACE_S = 5.0


def main() -> None:
    """Serves until the parent closes the pipe."""
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
            os._exit(1)  # a fork that the reward left behind; it must not answer in this process's place
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        connection.send(verdict)


_OWN = os.getpid()


def _leave_to_parent(number: int, frame: FrameType | None) -> None:
    """Slurm sends SIGTERM to every process of a step: the parent finishes its own, and needs the rewards of that.

    Processes that a reward starts are ended by it as usual: a program has its own handlers, a fork is none of this.
    """
    del frame
    if os.getpid() != _OWN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, EOFError, KeyboardInterrupt):
        # The parent has ended: there is no one to report to.
        os._exit(1)
