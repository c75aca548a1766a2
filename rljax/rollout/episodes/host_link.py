"""The trainer's side of one host process: one thread sends and one receives, for all trajectories together."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

from rljax.distributed.child import Child, decode
from rljax.distributed.frames import FrameError
from rljax.rollout.episodes.config import MAX_REPLY_CHARS, EpisodeConfig
from rljax.rollout.episodes.outcomes import HOST_MESSAGE, UTF8_BYTES, HostMessage
from rljax.rollout.episodes.progress import ProgressBoard, StuckWatch

_LOOK_S = 0.1
_JOIN_S = 1.0
_LONGEST = 1 << 26  # bytes of a message, apart from the text of a reply


class HostLink:
    """A host process that is replaced when it dies, is stuck, or sends what nobody asked for."""

    def __init__(
        self,
        path: str,
        limits: EpisodeConfig,
        on_message: Callable[[int, HostMessage], None],
        on_death: Callable[[str, bool, int], None],
        on_broken: Callable[[str], None],
    ):
        """Starts the process, whose environments have the class named ``path``. ``start`` makes it usable.

        Args:
          on_message: A function that is called with the number and the content of each message, on the receiving
            thread. If it raises ``FrameError``, the process is ended.
          on_death: A function that is called when the process has ended and the next one starts. It must call
            ``renew``. The first argument is the end in words. The second one says whether some code ran too long
            without awaiting. The third one is the number of the trajectory whose code ran then (0: none, or unknown).
          on_broken: A function that is called with the reason if no process can be started.
        """
        self._board = ProgressBoard()
        self._limits = limits
        self._on_message, self._on_death, self._on_broken = on_message, on_death, on_broken
        self._process = Child(
            "process of environments",
            "rljax.rollout.episodes.host_worker:host_environments",
            (path, self._board.descriptor, limits),
            limits.memory_gib,
            longest=_LONGEST + UTF8_BYTES * MAX_REPLY_CHARS,
            files=[self._board.descriptor],
        )
        self._outbox: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)

    def start(self) -> None:
        """Starts the thread that calls the functions."""
        self._thread.start()

    def send(self, number: int, message: bytes) -> None:
        """Sends a message that ``pack`` returned. It does not wait."""
        self._outbox.put((number, message))

    def renew(self) -> None:
        """Drops the messages that were not sent to the process that has ended. The next process gets later ones."""
        self._outbox = queue.SimpleQueue()

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
                outbox = self._outbox
                sender = threading.Thread(target=self._send_all, args=(outbox,), daemon=True)
                sender.start()
                said, stuck = self._receive_all()
                self._process.kill()
                outbox.put(None)
                sender.join(_JOIN_S)
                running, _ = self._board.read()
                status = self._process.replace()
                self._on_death(f"{said}, {status}" if said else status, stuck, running)
        except CancelledError:
            return
        except Exception as error:  # nobody else sees it, and a waiting caller must not wait for ever
            self._on_broken(str(error) or type(error).__name__)

    def _receive_all(self) -> tuple[str, bool]:
        """Handles messages until the process has ended, is stuck or has sent something wrong.

        Returns what it sent, or "", and whether it is stuck.
        """
        watch = StuckWatch(self._board, self._limits.busy_s, _LOOK_S)
        frames = self._process.frames
        while True:
            try:
                number, body = frames.receive(_LOOK_S)
                self._on_message(number, decode(HOST_MESSAGE, body))
            except TimeoutError:
                pass
            except (EOFError, OSError):
                return "", False
            except FrameError as error:
                return f"it sent {error}", False
            if watch.look():
                return "", True

    def _send_all(self, outbox: queue.SimpleQueue[tuple[int, bytes] | None]) -> None:
        frames = self._process.frames
        while (message := outbox.get()) is not None:
            try:
                frames.send(*message)
            except OSError:  # the thread that receives sees the end, too
                return


def pack(*message: Any) -> bytes:
    """Packs a message to a host process. Raises an error of any type if a part of it cannot be pickled."""
    return pickle.dumps(message)
