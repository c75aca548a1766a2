"""The accuracy of a policy on lists of problems, from n scored responses to each."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from rljax.data.prompts import Problem
from rljax.errors import StoppedWaitingError
from rljax.record.rows import Row, is_accuracy
from rljax.run.config import EvalConfig
from rljax.run.sampling import Sampler, Scored
from rljax.run.timers import Timers

SOLVED = 0.5
"""The reward above which a response solves its problem, for pass@k."""


class Evaluation:
    """Evaluates the policy that the engine holds, at the steps at which that is due.

    The random numbers of the run itself do not change with it.
    """

    def __init__(
        self, config: EvalConfig, steps: int, sampler: Sampler, datasets: Mapping[str, Sequence[Problem]]
    ) -> None:
        """Evaluates nothing yet.

        Args:
          config: The settings of evaluation.
          steps: The last step of the run, which is evaluated in any case.
          sampler: The sampler with the settings of evaluation.
          datasets: The problems of each dataset by its name. Empty: nothing is ever evaluated.
        """
        self._config, self._steps, self._sampler, self._datasets = config, steps, sampler, datasets

    def is_due(self, step: int) -> bool:
        """Returns whether the policy is evaluated after ``step``."""
        every = self._config.every
        return bool(self._datasets) and every > 0 and (step % every == 0 or step == self._steps)

    def at_start(self, step: int, timers: Timers) -> Row:
        """Evaluates the policy before step 1, where ``eval.at_start`` asks for it.

        Returns:
          ``eval/<dataset>/..._at_start``; {} if no evaluation is due.
        """
        if step != 1 or not self._config.at_start or not self._datasets:
            return {}
        with timers.phase("eval_at_start"):
            return {f"{key}_at_start": value for key, value in self.evaluate().items()}

    def after(self, step: int, timers: Timers) -> Row:
        """Evaluates the policy after ``step`` if that is due.

        When the run is asked to stop, the evaluation alone is given up, with a line on stderr.

        Returns:
          ``eval/<dataset>/...``; {} if no evaluation is due, or if it was given up.
        """
        if not self.is_due(step):
            return {}
        try:
            with timers.phase("eval"):
                return self.evaluate()
        except StoppedWaitingError as error:
            print(f"the evaluation of step {step} is given up: {error}", file=sys.stderr)
            return {}

    def evaluate(self) -> Row:
        """Evaluates the policy on all datasets.

        The seed is the same each time, so that two evaluations differ only by the policy.

        Returns:
          ``eval/<dataset>/...``.

        Raises:
          RuntimeError: The engine is broken.
          StoppedWaitingError: The run was asked to stop, and sampling is given up.
        """
        row: Row = {}
        for name, problems in self._datasets.items():
            scored = list(self._sampler.scored(problems, self._config.seed))
            result = summarize_scores(scored, n=self._config.n, pass_k=self._config.pass_k)
            # Taken here, so that these failures are not counted with those of the rollouts.
            result["reward_errors"] = self._sampler.rewards.pop_metrics()["reward/errors"]
            row |= {f"eval/{name}/{key}": value for key, value in result.items()}
        return row


def summarize_scores(scored: Sequence[Scored], *, n: int, pass_k: Sequence[int] = ()) -> dict[str, float]:
    """Computes the accuracy (avg@n: the mean reward) and other means of scored responses.

    pass@k is the mean over problems of the chance that at least one of k responses, chosen from the n, solves it.

    Args:
      scored: The n responses to each problem, in any order.
      n: The number of responses to each problem.
      pass_k: The values of k, each at most n.

    Returns:
      ``accuracy``, ``response_length`` (tokens), ``truncated_fraction`` and each ``pass@k``.
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
    """Computes the unbiased estimate 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    Args:
      n: The number of responses to a problem.
      solved: The number c of them that solve it.
      k: The number of responses that are drawn from the n.

    Raises:
      ValueError: The arguments do not satisfy 1 <= k <= n and 0 <= solved <= n.
    """
    if not 1 <= k <= n or not 0 <= solved <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= solved <= n, got k = {k}, n = {n}, solved = {solved}")
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k)


def mean_accuracy(row: Row) -> float | None:
    """Returns the mean over datasets of ``eval/<dataset>/accuracy``; None for a step without an evaluation."""
    values = [value for key, value in row.items() if is_accuracy(key)]
    return sum(values) / len(values) if values else None
