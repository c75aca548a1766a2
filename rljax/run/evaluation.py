"""Accuracy of a policy on a list of problems, from n scored responses to each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rljax.data.prompts import Problem
from rljax.data.tokenizer import Tokenizer
from rljax.record.rows import Row, is_accuracy
from rljax.rewards.pool import RewardPool
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.types import SamplingParams
from rljax.run.sampling import Scored, score_responses

SOLVED = 0.5  # a reward above it solves the problem, for pass@k


def summarize_scores(scored: Sequence[Scored], *, n: int, pass_k: Sequence[int] = ()) -> dict[str, float]:
    """``accuracy`` (avg@n: the mean reward), ``response_length``, ``truncated_fraction`` and each ``pass@k``.

    pass@k is the mean over problems of the chance that at least one of k responses, chosen from the n, solves it.

    Args:
      scored: n responses of each problem, in any order.
      n: responses to each problem.
      pass_k: which k; at most n.
    """
    # Sorted, because float sums depend on the order.
    ordered = sorted(scored, key=lambda one: one.place)
    result = {
        "accuracy": sum(one.reward for one in ordered) / len(ordered),
        "response_length": sum(one.response.length for one in ordered) / len(ordered),
        "truncated_fraction": sum(one.response.truncated for one in ordered) / len(ordered),
    }
    solved = np.asarray([one.reward > SOLVED for one in ordered]).reshape(-1, n).sum(axis=1)
    return result | {f"pass@{k}": sum(pass_at_k(n, int(c), k) for c in solved) / len(solved) for k in pass_k}


def pass_at_k(n: int, solved: int, k: int) -> float:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) from c solved of n (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    Raises:
      ValueError: not 1 <= k <= n, or not 0 <= solved <= n.
    """
    if not 1 <= k <= n or not 0 <= solved <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= solved <= n, got k = {k}, n = {n}, solved = {solved}")
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k)


def evaluate_datasets(
    engine: RolloutEngine,
    tokenizer: Tokenizer,
    datasets: Mapping[str, Sequence[Problem]],
    rewards: RewardPool,
    sampling: SamplingParams,
    *,
    n: int,
    pass_k: Sequence[int],
    seed: int,
    gives_up: Callable[[], bool] = lambda: False,
) -> Row:
    """``eval/<dataset>/...`` of the engine's policy; the run's own random numbers do not change.

    Args:
      engine: of the run; only ``generate`` is called.
      tokenizer: of the policy.
      datasets: problems by name.
      rewards: the run's; its counts here are not added to those of the rollouts.
      sampling: temperature, length limit and stop tokens.
      n: responses to each problem.
      pass_k: which pass@k.
      seed: of the sampling, the same each time, so that two evaluations differ only by the policy.
      gives_up: true ends it, as in ``score_responses``.
    """
    row: Row = {}
    for name, problems in datasets.items():
        responses = score_responses(engine, tokenizer, problems, rewards, sampling, n=n, seed=seed, gives_up=gives_up)
        scored = list(responses)
        result = summarize_scores(scored, n=n, pass_k=pass_k)
        result["reward_errors"] = rewards.pop_metrics()["reward/errors"]
        row |= {f"eval/{name}/{key}": value for key, value in result.items()}
    return row


def mean_accuracy(row: Row) -> float | None:
    """The mean over datasets of ``eval/<dataset>/accuracy``; None in a step without an evaluation."""
    values = [value for key, value in row.items() if is_accuracy(key)]
    return sum(values) / len(values) if values else None
