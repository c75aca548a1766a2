"""The end of a run, decided by two functions."""

from collections.abc import Callable


class StopWhen:
    """A ``Stopping`` that asks two functions."""

    def __init__(self, is_requested: Callable[[], bool] = bool, gives_up: Callable[[], bool] = bool) -> None:
        self.is_requested, self.gives_up = is_requested, gives_up
