"""Batches whose groups without signal are replaced by groups of further problems (``rollout.refill``).

A group without signal carries no loss, so a batch with such groups makes a noisier update. A further *round* samples
exactly as many new problems as groups are missing. So no group with signal is thrown away, and the order in which
responses arrive does not matter. Rewards and lengths of replaced groups still count in the row of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rljax.algorithms.advantages import compute_advantages, groups_with_loss
from rljax.data.prompts import Problem, PromptStream
from rljax.record.rows import Row
from rljax.run.config import Config
from rljax.run.sampling import Rollouts, SampledStep, Sampler

REFILL_LIMIT = 4  # the most further rounds of a step


class RefillingSampler:
    """Samples batches as ``Sampler`` does, and replaces their groups without signal."""

    def __init__(self, sampler: Sampler, stream: PromptStream, config: Config) -> None:
        """Samples nothing yet. The problems of further rounds are the next ones of ``stream``."""
        self._sampler, self._stream, self._config = sampler, stream, config

    def sample(self, problems: Sequence[Problem], step: int) -> SampledStep:
        """Samples the rollouts of ``step``, as many groups as there are ``problems``.

        The groups with signal come first, in the order of their problems. After ``REFILL_LIMIT`` further rounds the
        earliest groups without signal fill up the batch. Raises the errors of ``ResponseSource.begin``.
        """
        rollouts, row = self._sampler.sample(problems, step)
        signal, rows, counts = self.has_signal(rollouts), [row], [len(problems)]
        while not signal.all() and len(rows) <= REFILL_LIMIT:
            more, row = self._sampler.sample(self._stream.take(int((~signal).sum())), step, len(rows))
            rows.append(row)
            counts.append(len(more.responses))
            signal = np.concatenate([signal, self.has_signal(more)])
            order = np.argsort(~signal, kind="stable")
            rollouts = split(join(rollouts, more), order[: len(problems)], order[len(problems) :])
            signal = signal[order[: len(problems)]]
        dropped = rollouts.dropped
        replaced: Row = {
            "rollout/refilled_groups": 0 if dropped is None else len(dropped.rewards),
            "rollout/refill_rounds": len(rows) - 1,
            "rollout/refilled_tokens": 0 if dropped is None else int(dropped.lengths.sum()),
        }
        return SampledStep(rollouts, sum_rows(rows, counts) | replaced)

    def has_signal(self, rollouts: Rollouts) -> np.ndarray:
        """Marks the groups that carry loss, bool [b]: their rewards differ, with the penalty of long responses."""
        longest, outcomes = self._config.rollout.max_response_tokens, rollouts.outcomes()
        return groups_with_loss(
            compute_advantages(
                outcomes.rewards, self._config.advantage, lengths=outcomes.lengths, max_response_tokens=longest
            )
        )


def join(first: Rollouts, second: Rollouts) -> Rollouts:
    """Returns the groups of both, and the dropped groups of ``first``."""
    return Rollouts(
        [*first.responses, *second.responses],
        np.concatenate([first.rewards, second.rewards]),
        first.dropped,
    )


def split(rollouts: Rollouts, kept: np.ndarray, dropped: np.ndarray) -> Rollouts:
    """Returns the groups with the numbers ``kept``, in that order, and drops the groups with the numbers ``dropped``.

    Only rewards and lengths are kept of a dropped group, because its tokens may take much memory.
    """
    gone = rollouts.outcomes().select(dropped)
    return replace(
        rollouts,
        responses=[rollouts.responses[i] for i in kept],
        rewards=rollouts.rewards[kept],
        dropped=gone if rollouts.dropped is None else rollouts.dropped.join(gone),
    )


def sum_rows(rows: Sequence[Row], counts: Sequence[int]) -> Row:
    """Returns the row of all rounds: counts and seconds are added up, and fractions are averaged over the groups.

    ``counts`` has the number of groups of each round.
    """
    summed: Row = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(key, 0) for row in rows]
        is_fraction = key.endswith("_fraction")
        summed[key] = float(np.average(values, weights=counts)) if is_fraction else sum(values)
    return summed
