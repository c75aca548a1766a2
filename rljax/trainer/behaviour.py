"""The mismatch of stale rollouts told apart: what the engines' numerics make, and what the policy's change makes.

A token that was sampled with policy version v and is trained from version w has, for the weights of v and of w,
log_ratio = trainer_w - rollout = (trainer_v - rollout) + (trainer_w - trainer_v): numerics, and drift. The first part
needs a forward under the policy that sampled the token, of which copies are kept. It is taken of a sample of the
responses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.mismatch import mismatch_metrics
from rljax.policy.model import Params
from rljax.sharding import fetch
from rljax.trainer.packing import PackedBatch, TrainSequence, unpack
from rljax.trainer.state import TrainState
from rljax.trainer.update import Forward, Pack, Update, Updated, UpdateOptions

NAMES = ("kl", "k3_kl", "log_ppl_abs_diff", "log_ppl_diff", "logprob_abs_diff_mean", "logprob_abs_diff_max")
"""Mismatch metrics that each part is given."""


class SplitUpdate:
    """``Update`` that also gives ``mismatch_numerics/<name>`` and ``mismatch_drift/<name>`` of a sample of responses.

    Both are absent where no response was sampled with an older version that is kept. Drift is given by the number of
    versions, too, as ``mismatch_drift/<versions>/<name>``. Each number of versions takes a forward of the sample.
    """

    def __init__(
        self,
        update: Update,
        forward: Forward,
        pack_sample: Pack,
        *,
        copy: Callable[[Params], Params],
        versions: int,
        sample: int,
    ):
        """Wraps ``update``.

        Args:
          update: makes the updates.
          forward: log-probabilities of a batch under a policy that ``copy`` gave.
          pack_sample: packs ``sample`` responses.
          copy: of a state's parameters, which their update leaves as it is.
          versions: that are kept, besides the newest.
          sample: responses of a step, at most, that are taken.
        """
        self._update, self._forward, self._pack_sample, self._copy = update, forward, pack_sample, copy
        self._sample, self._kept = sample, deque[Params](maxlen=versions + 1)
        self.pack = update.pack

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """See ``Update``."""
        self._kept.appendleft(self._copy(state.params))
        chosen = np.unique(np.linspace(0, len(sequences) - 1, min(self._sample, len(sequences))).round().astype(int))
        sampled = [sequences[i] for i in chosen]
        behaviour = self._behaviour_logprobs(sampled)
        updated = self._update(state, batch, sequences, options)
        if not behaviour:
            return updated
        every = updated.trainer_logprobs()
        row = split_metrics(sampled, behaviour, [every[i] for i in chosen])
        return updated._replace(row=updated.row | row, trainer_logprobs=lambda: every)

    def _behaviour_logprobs(self, sampled: Sequence[TrainSequence]) -> dict[int, list[np.ndarray]]:
        """By versions behind, of those among the tokens that are kept: float32 [r] of each response."""
        behind = {int(d) for s in sampled if s.staleness is not None for d in np.unique(s.staleness)}
        batch: PackedBatch | None = None
        found = {}
        for versions in sorted(behind & set(range(1, len(self._kept)))):
            batch = batch or self._pack_sample(sampled)
            logprobs: Any = self._forward(self._kept[versions], batch)[1]
            found[versions] = unpack(fetch(logprobs), batch, sampled)
        return found


def split_metrics(
    sampled: Sequence[TrainSequence], behaviour: dict[int, list[np.ndarray]], trainer: Sequence[np.ndarray]
) -> dict[str, float]:
    """``mismatch_numerics/`` and ``mismatch_drift/`` of responses.

    Args:
      sampled: the responses; tokens of the newest version have no drift.
      behaviour: by versions behind, log-probabilities float32 [r] of each response under that policy.
      trainer: likewise under the newest.

    Returns:
      The metrics over tokens of versions in ``behaviour`` and of the newest.
    """
    shape = len(sampled), max(len(s.response) for s in sampled)
    rollout, then, now = (np.zeros(shape) for _ in range(3))
    behind = np.full(shape, -1)
    for i, s in enumerate(sampled):
        end = len(s.response)
        rollout[i, :end], now[i, :end], then[i, :end] = s.rollout_logprobs, trainer[i], trainer[i]
        behind[i, :end] = 0 if s.staleness is None else s.staleness
        for versions, logprobs in behaviour.items():
            older = behind[i, :end] == versions
            then[i, :end][older] = logprobs[i][older]
    known = np.isin(behind, [0, *behaviour])
    parts = {"mismatch_numerics": (then, rollout, known), "mismatch_drift": (now, then, known)}
    parts |= {f"mismatch_drift/{versions}": (now, then, behind == versions) for versions in behaviour}
    row: dict[str, float] = {}
    for part, arrays in parts.items():
        metrics = mismatch_metrics(*arrays)
        row |= {f"{part}/{name}": float(metrics[name]) for name in NAMES}
    return row | {"mismatch_numerics/token_count": float(known.sum())}


def copy_of(dtype: Any) -> Callable[[Params], Params]:
    """Parameters in ``dtype``, in memory of their own, where they lie."""

    @jax.jit
    def copy(params: Params) -> Params:
        return jax.tree.map(lambda leaf: jnp.array(leaf, dtype=dtype, copy=True), params)

    return copy
