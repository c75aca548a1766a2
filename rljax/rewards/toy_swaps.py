"""The swapping toy's reward: 1 when what follows the last colon (or the whole response) is the right order, else 0."""

from __future__ import annotations


def swaps_reward(problem: dict[str, str], response: str, truncated: bool) -> float:
    """Scores one response.

    Args:
      problem: with the right ``"answer"``.
      response: decoded text, special tokens removed.
      truncated: the length limit cut it off; such a response has no final answer.

    Returns:
      1.0 or 0.0.
    """
    final = response.rsplit(":", 1)[-1]
    return float(not truncated and final == problem["answer"])
