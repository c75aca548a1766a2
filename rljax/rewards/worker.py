"""The program of a worker process. Of the trainer it imports only the modules that it runs.

``multiprocessing`` would import the trainer's main module, and jax with it, into every worker. So this program gets one
end of a pipe. The first message is ``(sys.path, memory in bytes, program, settings)``; it runs the function
``program``, written ``module:name``, as ``program(connection, *settings)``.
"""

from __future__ import annotations

import functools
import os
import pkgutil
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

# A worker ends itself this many seconds after the parent's time limit; this happens only if the parent was killed.
GRACE_S = 5.0


def main() -> None:
    """Runs the program that the first message names."""
    signal.signal(signal.SIGTERM, _leave_to_parent)
    connection = Connection(int(sys.argv[1]))
    sys.path[:], memory_bytes, program, settings = connection.recv()
    run = pkgutil.resolve_name(program)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    run(connection, *settings)


def score_responses(connection: Connection, path: str) -> None:
    """Scores responses with the reward ``path``; a request is ``(problem, response, truncated)``, see ``score``."""
    from rljax.rewards.resolve import resolve_reward, score

    try:
        reward = resolve_reward(path)
    except ValueError as error:
        connection.send(str(error))
        return
    answer_requests(connection, functools.partial(score, reward))


def answer_requests(connection: Connection, answer: Callable[..., Any]) -> None:
    """Answers requests until the parent closes the pipe; each message is ``(arguments, limit in seconds)``."""
    connection.send(None)
    while True:
        try:
            arguments, limit_s = connection.recv()
        except EOFError:
            return
        end_by_alarm(limit_s + GRACE_S)
        reply = answer(*arguments)
        if os.getpid() != _OWN:
            os._exit(1)  # a fork that a person's code left behind must not answer for this process
        end_by_alarm(0.0)
        connection.send(reply)


def end_by_alarm(after_s: float) -> None:
    """Lets the system end this process in ``after_s`` seconds, even if it hangs then. 0 cancels this."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, after_s)


_OWN = os.getpid()


def _leave_to_parent(number: int, frame: FrameType | None) -> None:
    """Ignores SIGTERM in the worker, and lets it end forks that a person's code made.

    Slurm sends SIGTERM to every process of a job, but the parent still needs the answers of its current step.
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
