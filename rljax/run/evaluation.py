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
from rljax.run.stop import Timers

EVAL_SEED = 0  # the seed of the sampling in an evaluation
SOLVED = 0.5  # the reward above which a response solves its problem, for pass@k


class Evaluation:
    """Evaluates the policy that the engine holds, after the steps that ``eval.every`` chooses.

    It does not change the random numbers of the run itself.
    """

    def __init__(
        self, config: EvalConfig, steps: int, sampler: Sampler, datasets: Mapping[str, Sequence[Problem]]
    ) -> None:
        """Evaluates nothing yet. ``steps`` is the last step, and ``datasets`` has the problems by name of dataset."""
        self._config, self._steps, self._sampler, self._datasets = config, steps, sampler, datasets

    def is_due(self, step: int) -> bool:
        """Returns whether the policy is evaluated after ``step``."""
        every = self._config.every
        return bool(self._datasets) and every > 0 and (step % every == 0 or step == self._steps)

    def at_start(self, step: int, timers: Timers) -> Row:
        """Returns ``eval/<dataset>/..._at_start`` of the policy before step 1 if ``eval.at_start`` is set; else {}."""
        if step != 1 or not self._config.at_start or not self._datasets:
            return {}
        with timers.phase("eval_at_start"):
            return {f"{key}_at_start": value for key, value in self.evaluate().items()}

    def after(self, step: int, timers: Timers) -> Row:
        """Returns ``eval/<dataset>/...`` of the policy after ``step``; {} if no evaluation is due, or it is given up.

        A request to stop may end the evaluation. The step itself is then kept, and a line on stderr says so.
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
        """Returns the metrics ``eval/<dataset>/...`` of the policy in the engine, on all datasets.

        The seed is the same each time, so that two evaluations differ only by the policy. Raises the errors of
        ``ResponseSource.begin``.
        """
        row: Row = {}
        for name, problems in self._datasets.items():
            scored = list(self._sampler.scored(problems, EVAL_SEED))
            result = summarize_scores(scored, n=self._config.n, pass_k=self._config.pass_k)
            # The counts are taken here, so that these failures are not counted among the failures of rollouts.
            errors = result["reward_errors"] = self._sampler.source.pop_metrics()["reward/errors"]
            if line := all_failed_line(errors, len(scored)):
                print(f"\nwarning: evaluation of {name}: {line}", file=sys.stderr)
            row |= {f"eval/{name}/{key}": value for key, value in result.items()}
        return row


def all_failed_line(errors: int, responses: int) -> str:
    """Returns a line about an evaluation in which no response could be scored; "" if one could be scored."""
    if errors < responses:
        return ""
    return f"none of the {responses} responses could be scored, so the accuracy says nothing"


def summarize_scores(scored: Sequence[Scored], *, n: int, pass_k: Sequence[int] = ()) -> dict[str, float]:
    """Computes the accuracy (avg@n: the mean reward) and other means of scored responses.

    There are ``n`` responses to each problem, in any order. A failed response, whose reward is NaN, counts as 0. pass@k
    is the chance that at least one of k responses, chosen from the n, solves the problem; it is a mean over problems.
    The result has ``accuracy``, ``response_length`` (tokens), ``truncated_fraction`` and each ``pass@k``. Lengths
    leave out trajectories without a token, unless there are no others.
    """
    # Sorted, because float sums depend on the order.
    ordered = sorted(scored, key=lambda one: one.place)
    sampled = [one.response for one in ordered if one.response.length] or [one.response for one in ordered]
    result = {
        "accuracy": sum(one.reward for one in ordered if not math.isnan(one.reward)) / len(ordered),
        "response_length": sum(one.length for one in sampled) / len(sampled),
        "truncated_fraction": sum(one.truncated for one in sampled) / len(sampled),
    }
    solved = np.asarray([one.reward > SOLVED for one in ordered]).reshape(-1, n).sum(axis=1)
    return result | {f"pass@{k}": sum(pass_at_k(n, int(c), k) for c in solved) / len(solved) for k in pass_k}


def pass_at_k(n: int, solved: int, k: int) -> float:
    """Computes the unbiased estimate 1 - C(n - c, k) / C(n, k), where c of n responses are ``solved``.

    Source: Chen et al. 2021, arXiv 2107.03374, eq. 1. Raises ValueError unless 1 <= k <= n and 0 <= solved <= n.
    """
    if not 1 <= k <= n or not 0 <= solved <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= solved <= n, got k = {k}, n = {n}, solved = {solved}")
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k)


def mean_accuracy(row: Row) -> float | None:
    """Returns the mean over datasets of ``eval/<dataset>/accuracy``; None for a step without an evaluation."""
    values = [value for key, value in row.items() if is_accuracy(key)]
    return sum(values) / len(values) if values else None
