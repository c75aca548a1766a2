"""The time that this process has spent on compiling."""

import functools

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class _Sum:
    def __init__(self) -> None:
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _EVENT:
            self.seconds += duration_secs


_sum = functools.cache(_Sum)


def compiled_s() -> float:
    """Returns the seconds that XLA has compiled since the first call; reads of its cache count, too."""
    return _sum().seconds
