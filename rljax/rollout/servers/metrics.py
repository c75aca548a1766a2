"""Figures of one step that several threads add to."""

from __future__ import annotations

import threading


class Metrics:
    """Named numbers; all methods may be called from any thread."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, value: float) -> None:
        """Adds to what it was, or to 0."""
        with self._lock:
            self._values[name] = self._values.get(name, 0.0) + value

    def highest(self, name: str, value: float) -> None:
        """Keeps the larger of what it was and ``value``."""
        with self._lock:
            self._values[name] = max(self._values.get(name, value), value)

    def put(self, name: str, value: float) -> None:
        """Replaces what it was."""
        with self._lock:
            self._values[name] = value

    def pop(self) -> dict[str, float]:
        """All of them; they begin anew."""
        with self._lock:
            values, self._values = self._values, {}
            return values
