"""The toy tasks' rewards: 1 when a response's final part is the right answer, else 0."""

from __future__ import annotations


def addition_reward(problem: dict[str, str], response: str, truncated: bool) -> float:
    """Scores one response by the number after its last comma, or the whole of it.

    Args:
      problem: with the right ``"answer"``.
      response: decoded text, special tokens removed.
      truncated: the length limit cut it off; such a response has no final answer.

    Returns:
      1.0 or 0.0.
    """
    return _final_part_is_right(problem, response, truncated, ",")


def swaps_reward(problem: dict[str, str], response: str, truncated: bool) -> float:
    """Scores one response by the order after its last colon, or the whole of it; arguments as above."""
    return _final_part_is_right(problem, response, truncated, ":")


def _final_part_is_right(problem: dict[str, str], response: str, truncated: bool, separator: str) -> float:
    return float(not truncated and response.rsplit(separator, 1)[-1] == problem["answer"])
