"""The failures of a request after which the client sends it again."""

from __future__ import annotations

import math
import time

from rljax.errors import ServerError, ServerPausedError, ServerRefusedError


class Pauses:
    """The refusals of one request by paused servers. They count as failed attempts only after ``longest_s`` seconds."""

    def __init__(self, longest_s: float) -> None:
        self.count, self._waits, self._longest_s, self._end = 0, False, longest_s, math.inf

    def may_end(self, error: ServerError) -> bool:
        """Returns whether ``error`` is the refusal of a paused server, and the wait may go on. Counts the refusal."""
        # The server may resume between its refusal and the question whether it is paused. One refusal 503 counts, too.
        waits, self._waits = self._waits, isinstance(error, ServerPausedError)
        if not self._waits and not (waits and isinstance(error, ServerRefusedError) and error.status == 503):
            return False
        self._end = min(self._end, time.monotonic() + self._longest_s)
        self.count += 1
        return time.monotonic() < self._end


def may_pass(error: ServerError) -> bool:
    """Returns whether the same request may be answered later."""
    return not isinstance(error, ServerRefusedError) or error.status >= 500 or error.status in (408, 429)
