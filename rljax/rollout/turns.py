"""The requests for the turns of trajectories, and the queue by which they come to an engine.

One side runs the environments. It puts a request for each turn into the queue, and says which trajectories have ended.
The other side is ``RolloutEngine.answer``. It takes the requests and samples one turn for each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from rljax.rollout.engine import Stopping, check_wanted

_LOOK_S = 0.25  # The time between two checks whether the run gives the responses up (seconds).


class TurnRequest(NamedTuple):
    """The request for one turn of a trajectory."""

    key: int  # the number of the trajectory
    turn: int  # the number of the turn in the trajectory, from 1
    # All tokens of the trajectory so far, int32 [s]. The turn continues them.
    tokens: np.ndarray
    max_tokens: int  # the most tokens of the turn

    def check_room(self, room: int, owner: str) -> None:
        """Raises ValueError if the tokens and the turn may exceed ``room``. The message names the room's ``owner``."""
        if len(self.tokens) + self.max_tokens > room:
            before = f"turn {self.turn} of trajectory {self.key} would have {len(self.tokens)} tokens before it"
            raise ValueError(f"{before} and up to {self.max_tokens} of its own; {owner} {room}")


class TurnQueue:
    """The requests that wait for an engine. All methods may be called from any thread.

    A trajectory is open until ``end`` is called for it. While an open trajectory has no waiting request, either the
    engine samples its turn or its environment works. So a further request may still come.
    """

    def __init__(self, keys: int | Iterable[int], stop: Stopping | None = None, group_size: int = 1) -> None:
        """Opens all trajectories, whose numbers are ``keys``. An integer means that many, numbered from 0.

        ``stop`` says whether waits are given up. None: they never are. Each ``group_size`` numbers in a row, from 0 on,
        are trajectories of one problem.
        """
        self.group_size = group_size
        self._turns = dict.fromkeys(range(keys) if isinstance(keys, int) else keys, 0)
        self._open, self._stop = set(self._turns), stop
        self._waiting: dict[int, TurnRequest] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._wake: Callable[[], None] = lambda: None

    @property
    def is_over(self) -> bool:
        """Whether all trajectories have ended."""
        with self._changed:
            return not self._open

    def put(self, request: TurnRequest) -> None:
        """Adds the request for the next turn of an open trajectory.

        Raises:
          ValueError: The trajectory is not open or has a waiting request, the turn is not a later one, or ``tokens`` is
            empty or ``max_tokens`` below 1.
        """
        key, turn = request.key, request.turn
        with self._changed:
            self._check_known(key)
            why = ""
            if key not in self._open:
                why = "it has ended; put requests before end"
            elif key in self._waiting:
                why = f"its turn {self._waiting[key].turn} still waits; put one request at a time"
            elif turn <= self._turns[key]:
                why = f"its last turn was {self._turns[key]}; count turns from 1"
            elif len(request.tokens) < 1 or request.max_tokens < 1:
                why = f"with {len(request.tokens)} tokens and max_tokens = {request.max_tokens}; give 1 or more"
            if why:
                raise ValueError(f"trajectory {key} asks for turn {turn}, but {why}")
            self._turns[key], self._waiting[key] = turn, request
            self._changed.notify_all()
        self._wake()

    def end(self, key: int) -> None:
        """Ends a trajectory, and drops its waiting request. It may be called twice.

        A request that the engine has taken is still answered. Raises ValueError if no trajectory has the number
        ``key``.
        """
        with self._changed:
            self._check_known(key)
            self._open.discard(key)
            self._waiting.pop(key, None)
            self._changed.notify_all()
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Makes every waiting or later call of ``take`` and ``take_round`` raise ``error``.

        The side that runs the environments calls it if it cannot go on.
        """
        with self._changed:
            self._error = error
            self._changed.notify_all()
        self._wake()

    def watch(self, wake: Callable[[], None]) -> None:
        """Sets the function that is called after each change, on the thread that made the change.

        It replaces the function of an earlier call.
        """
        self._wake = wake

    def take(self) -> list[TurnRequest]:
        """Returns the requests that wait now, in order of key.

        Raises StoppedWaitingError if the run gives the responses up, and the error that was given to ``fail``.
        """
        return self._take(lambda: True)

    def take_round(self) -> list[TurnRequest]:
        """Waits until each open trajectory has a waiting request, and returns all of them in order of key.

        The list is empty once all trajectories have ended. It raises the errors of :meth:`take`.
        """
        return self._take(lambda: len(self._waiting) == len(self._open))

    def _check_known(self, key: int) -> None:
        if key not in self._turns:
            raise ValueError(f"no trajectory has the number {key}; the queue was made for {len(self._turns)} of them")

    def _take(self, is_ready: Callable[[], bool]) -> list[TurnRequest]:
        with self._changed:
            while True:
                if self._stop is not None:
                    check_wanted(self._stop)
                if self._error is not None:
                    raise self._error
                if is_ready():
                    break
                self._changed.wait(_LOOK_S)
            taken = [self._waiting[key] for key in sorted(self._waiting)]
            self._waiting.clear()
        return taken
