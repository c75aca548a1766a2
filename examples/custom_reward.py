"""A custom reward: a function of three arguments, named in the configuration as ``module:function``.

    bash launch/quickstart.sh -- --data.reward examples.custom_reward:digits_right --run.dir runs/digits

This trains the quickstart's policy with partial credit for each right digit of the answer. The function runs in worker
processes, with a time limit for each response. If it raises, the response earns 0 and ``reward/errors`` counts it
(docs/rewards.md).
"""

from __future__ import annotations

from typing import Any


def digits_right(problem: dict[str, Any], response: str, truncated: bool) -> float:
    """Returns the share of the answer's digits that are right.

    Args:
      problem: The row of the data set; ``problem["answer"]`` is the right answer.
      response: The decoded text, without special tokens.
      truncated: Whether the length limit cut the response off.

    Returns:
      A number from 0 to 1. A truncated response, or one with another number of digits, earns 0.
    """
    right, stated = problem["answer"], response.rsplit(",", 1)[-1]
    if truncated or len(stated) != len(right):
        return 0.0
    return sum(a == b for a, b in zip(stated, right, strict=True)) / len(right)
