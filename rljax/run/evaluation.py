"""Accuracy of a policy on a list of problems: n responses to each, sampled by an engine and scored as they arrive."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from rljax.data.prompts import Problem
from rljax.data.tokenizer import Tokenizer
from rljax.report.rows import is_accuracy
from rljax.rewards.pool import RewardPool
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.types import Response, SamplingParams

SOLVED = 0.5  # a reward above it solves the problem, for pass@k


@dataclass(frozen=True)
class Scored:
    """One response and its reward.

    Attributes:
      problem_index: position of its problem.
      sample_index: 0 .. n-1 among the responses to it.
      text: decoded, special tokens removed.
      reward: what the pool gave.
      length: tokens, the stop token included.
      truncated: the length limit ended it.
    """

    problem_index: int
    sample_index: int
    text: str
    reward: float
    length: int
    truncated: bool


def score_responses(
    engine: RolloutEngine,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    rewards: RewardPool,
    sampling: SamplingParams,
    *,
    n: int = 1,
    seed: int = 0,
) -> Iterator[Scored]:
    """Samples ``n`` responses to each problem and yields them scored; each goes to the pool as soon as it arrives.

    Args:
      engine: with a published policy, or one that its server was started with.
      tokenizer: of the policy.
      problems: each ``prompt`` as the text that is tokenised.
      rewards: scores them.
      sampling: temperature, length limit and stop tokens.
      n: responses to each problem.
      seed: of the sampling.
    """
    prompts = [tokenizer.encode(problem["prompt"]) for problem in problems]
    waiting: deque[tuple[Response, str, Future[float]]] = deque()
    for response in engine.generate(prompts, n, sampling, seed=seed):
        text = tokenizer.decode(response.token_ids)
        waiting.append((response, text, rewards.submit(problems[response.prompt_index], text, response.truncated)))
        while waiting and waiting[0][2].done():
            yield _scored(*waiting.popleft())
    while waiting:
        yield _scored(*waiting.popleft())


def summarize_scores(scored: Sequence[Scored], *, n: int, pass_k: Sequence[int] = ()) -> dict[str, float]:
    """``accuracy`` (avg@n: the mean reward), ``response_length``, ``truncated_fraction`` and each ``pass@k``.

    pass@k is the mean over problems of the chance that at least one of k responses, chosen from the n, solves it.

    Args:
      scored: n responses of each problem, in any order.
      n: responses to each problem.
      pass_k: which k; at most n.
    """
    # Sorted, because float sums depend on the order.
    ordered = sorted(scored, key=lambda one: (one.problem_index, one.sample_index))
    result = {
        "accuracy": sum(one.reward for one in ordered) / len(ordered),
        "response_length": sum(one.length for one in ordered) / len(ordered),
        "truncated_fraction": sum(one.truncated for one in ordered) / len(ordered),
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


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of a run: its datasets through the engine it trains with.

    Attributes:
      engine: of the run; only ``generate`` is called.
      tokenizer: of the policy.
      datasets: problems by name.
      rewards: the run's; its counts here are not added to those of the rollouts.
      sampling: temperature, length limit and stop tokens.
      n: responses to each problem.
      pass_k: which pass@k.
      seed: of the sampling, the same each time, so that two evaluations differ only by the policy.
    """

    engine: RolloutEngine
    tokenizer: Tokenizer
    datasets: dict[str, Sequence[Problem]]
    rewards: RewardPool
    sampling: SamplingParams
    n: int = 1
    pass_k: tuple[int, ...] = ()
    seed: int = 0

    def __call__(self) -> dict[str, Any]:
        """``eval/<dataset>/...`` of the published policy; the run's own random numbers do not change."""
        row: dict[str, Any] = {}
        for name, problems in self.datasets.items():
            scored = score_responses(
                self.engine, self.tokenizer, problems, self.rewards, self.sampling, n=self.n, seed=self.seed
            )
            result = summarize_scores(list(scored), n=self.n, pass_k=self.pass_k)
            result["reward_errors"] = self.rewards.pop_metrics()["reward/errors"]
            row |= {f"eval/{name}/{key}": value for key, value in result.items()}
        return row


def mean_accuracy(row: dict[str, Any]) -> float | None:
    """The mean over datasets of ``eval/<dataset>/accuracy``; None in a step without an evaluation."""
    values = [value for key, value in row.items() if is_accuracy(key)]
    return sum(values) / len(values) if values else None


def _scored(response: Response, text: str, reward: Future[float]) -> Scored:
    return Scored(
        response.prompt_index, response.sample_index, text, reward.result(), response.length, response.truncated
    )
