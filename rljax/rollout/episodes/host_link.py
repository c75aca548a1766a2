"""The trainer's side of one host process: one thread sends and one receives, for all trajectories together."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from multiprocessing.reduction import ForkingPickler
from typing import Any

from rljax.rewards.processes import WorkerProcess
from rljax.rollout.episodes.config import EpisodeConfig
from rljax.rollout.episodes.progress import ProgressBoard, StuckWatch

log = logging.getLogger(__name__)

_LOOK_S = 0.1
_JOIN_S = 1.0


class HostLink:
    """A host process that is replaced when it dies or is stuck."""

    def __init__(
        self,
        path: str,
        limits: EpisodeConfig,
        on_message: Callable[..., None],
        on_death: Callable[[str, bool, int], None],
        on_broken: Callable[[str], None],
    ):
        """Starts the process and the thread that receives. ``path`` is the name of the environment's class.

        Args:
          on_message: A function that is called with the parts of each message of the process, on the receiving thread.
          on_death: A function that is called when the process has ended. Later messages go to the next process. Its
            arguments are the exit status in words, whether the process was ended because some code ran too long without
            awaiting, and the number of the trajectory whose code ran at the end (0: none, or not known).
          on_broken: A function that is called with the reason if no process can be started.
        """
        self._board = ProgressBoard()
        self._limits = limits
        self._on_message, self._on_death, self._on_broken = on_message, on_death, on_broken
        program = "rljax.rollout.episodes.host_worker:host_environments"
        settings = (path, self._board.descriptor, limits)
        self._process = WorkerProcess(
            "process of environments", program, settings, limits.memory_gib, [self._board.descriptor]
        )
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> None:
        """Sends a message that ``pack`` returned. It does not wait."""
        self._outbox.put(message)

    def close(self) -> None:
        """Ends the process."""
        self._process.stop()
        self._outbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while True:
                self._process.wait_until_ready()
                sender = threading.Thread(target=self._send_all, args=(self._outbox,), daemon=True)
                sender.start()
                stuck = self._receive_all()
                self._process.kill()
                # Messages that were not sent are lost with the process. New ones wait in a new queue from here on.
                outbox, self._outbox = self._outbox, queue.SimpleQueue()
                outbox.put(None)
                sender.join(_JOIN_S)
                running = self._board.read().running
                self._on_death(self._process.replace(), stuck, running)
        except CancelledError:
            return
        except Exception as error:  # nobody else sees it, and a waiting caller must not wait for ever
            self._on_broken(str(error) or type(error).__name__)

    def _receive_all(self) -> bool:
        """Handles messages until the process has ended or is stuck. Returns whether it is stuck."""
        watch = StuckWatch(self._board, self._limits.busy_s, _LOOK_S)
        connection = self._process.connection
        while True:
            try:
                message = connection.recv() if connection.poll(_LOOK_S) else None
            except Exception:  # the process has ended, or a person's code wrote into the pipe
                return False
            if message is not None:
                self._on_message(*message)
            if watch.look():
                return True

    def _send_all(self, outbox: queue.SimpleQueue[Any]) -> None:
        connection = self._process.connection
        while (message := outbox.get()) is not None:
            try:
                connection.send_bytes(message)
            except OSError:  # the thread that receives sees the end, too
                return


def pack(*message: Any) -> bytes:
    """Packs a message to a host process. Raises an error of any type if a part of it cannot be pickled."""
    return bytes(ForkingPickler.dumps(message))
