"""A reward of your own: a function of three arguments, named in the configuration as ``module:function``.

    bash launch/quickstart.sh -- --data.reward examples.custom_reward:digits_right --run.dir runs/digits

trains the quickstart's policy with partial credit: the share of the answer's digits that are right, from the last one
on. The function runs in worker processes, each response within a time limit; a response that raises earns 0 and is
counted in ``reward/errors`` (docs/rewards.md).
"""

from __future__ import annotations

from typing import Any


def digits_right(problem: dict[str, Any], response: str, truncated: bool) -> float:
    """Share of digits that are right.

    Args:
      problem: the row of the data set; ``problem["answer"]`` is the right answer.
      response: the decoded text, without special tokens.
      truncated: whether the length limit cut the response off.

    Returns:
      A number from 0 to 1. A truncated response, and one with more or fewer digits, earns 0.
    """
    wanted, given = problem["answer"], response.rsplit(",", 1)[-1]
    if truncated or len(given) != len(wanted):
        return 0.0
    return sum(a == b for a, b in zip(given, wanted, strict=True)) / len(wanted)
