"""The end of a run, decided by two functions."""

from collections.abc import Callable


class StopWhen:
    """A ``Stopping`` that asks two functions, and counts the calls of ``progress``."""

    def __init__(self, is_requested: Callable[[], bool] = bool, gives_up: Callable[[], bool] = bool) -> None:
        self.is_requested, self.gives_up, self.moves = is_requested, gives_up, 0

    def progress(self) -> None:
        self.moves += 1
