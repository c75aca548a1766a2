"""The limits of trajectories of several turns."""

from __future__ import annotations

from dataclasses import dataclass

from rljax.errors import check_at_least, check_finite, check_positive

_BUSY_S = 10.0
MAX_REPLY_CHARS = 16384
"""The longest reply of an environment or a tool (characters). A longer reply is cut, and counted in the metrics."""


@dataclass(frozen=True)
class EpisodeConfig:
    """The limits of one trajectory with an environment. ``rollout.max_response_tokens`` limits its tokens."""

    max_turns: int = 8
    """The most turns of a trajectory. The policy does not read the reply to the last turn."""
    max_turn_tokens: int = 0
    """The most tokens that the policy samples in one turn. 0: as many as ``rollout.max_response_tokens`` leaves."""
    max_rows: int = 1
    """The most rows of tokens of one trajectory. Another row begins where a turn's prompt does not extend the tokens
    before it, which only happens with ``rollout.trajectories``. A trajectory with more rows is refused."""
    call_timeout_s: float = 30.0
    """The longest time of one call of an environment (seconds). After it the trajectory has failed."""
    tool_timeout_s: float = 10.0
    """The longest time of one call of a tool (seconds). After it the policy reads that the tool took too long."""
    workers: int = 1
    """The number of processes that environments run in. Each may hold thousands of them."""
    memory_gib: float = 4.0
    """The memory limit of each process of environments and of each tool's process (GiB)."""

    @property
    def busy_s(self) -> float:
        """The longest time that code of an environment may run without awaiting (seconds)."""
        return min(self.call_timeout_s, _BUSY_S)

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_turns", "max_rows", "workers")
        check_at_least(self, 0, "max_turn_tokens")
        check_finite(self, "call_timeout_s", "tool_timeout_s", "memory_gib")
        check_positive(self, "call_timeout_s", "tool_timeout_s", "memory_gib")
