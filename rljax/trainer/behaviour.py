"""The mismatch of stale rollouts told apart: what the engines' numerics make, and what the policy's change makes.

A token that was sampled with policy version v and is trained from version w has, for the weights of v and of w,
log_ratio = trainer_w - rollout = (trainer_v - rollout) + (trainer_w - trainer_v): numerics, and drift. The first part
needs a forward under the policy that sampled the token, of which copies are kept. It is taken of a sample of the
responses, or of all of them where the correction is of one part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.mismatch import mismatch_metrics, read_tokens
from rljax.mismatch.importance import finalize_importance, importance_statistics
from rljax.policy.model import Params
from rljax.sharding import fetch
from rljax.trainer.packing import PackedBatch, TrainSequence, unpack
from rljax.trainer.state import TrainState
from rljax.trainer.update import Forward, Pack, Update, Updated, UpdateOptions

NAMES = ("kl", "k3_kl", "log_ppl_abs_diff", "log_ppl_diff", "logprob_abs_diff_mean", "logprob_abs_diff_max")
"""Mismatch metrics that each part is given."""
RATIOS = ("token_ratio_max", "token_fraction_above", "token_effective_sample_size", "sequence_effective_sample_size")
"""Metrics of the importance ratio that numerics and drift are given, as ``is_numerics/<name>``, ``is_drift/<name>``."""


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
        is_threshold: float = 2.0,
        for_correction: bool = False,
    ):
        """Wraps ``update``.

        Args:
          update: makes the updates.
          forward: log-probabilities of a batch under a policy that ``copy`` gave.
          pack_sample: packs ``sample`` responses.
          copy: of a state's parameters, which their update leaves as it is.
          versions: that are kept, besides the newest.
          sample: responses of a step, at most, that are taken.
          is_threshold: C of ``is_numerics/`` and ``is_drift/``.
          for_correction: whether ``update`` is to have ``behaviour_logprobs``; all responses are taken then.
        """
        self._threshold, self._for_correction = is_threshold, for_correction
        self._update, self._forward, self._pack_sample, self._copy = update, forward, pack_sample, copy
        self._sample, self._kept = sample, deque[Params](maxlen=versions + 1)
        self.pack = update.pack

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """See ``Update``."""
        self._kept.appendleft(self._copy(state.params))
        if self._for_correction:
            behaviour = self._behaviour_logprobs(sequences, batch)
            known = [np.full(len(s.response), np.nan, np.float32) for s in sequences]
            for versions, logprobs in behaviour.items():
                for s, of_sequence, values in zip(sequences, known, logprobs, strict=True):
                    np.copyto(of_sequence, values, where=s.staleness == versions)
            sequences = [s._replace(behaviour_logprobs=values) for s, values in zip(sequences, known, strict=True)]
            updated = self._update(state, self.pack(sequences), sequences, options)
            return self._with_parts(updated, sequences, behaviour, np.arange(len(sequences)))
        chosen = np.unique(np.linspace(0, len(sequences) - 1, min(self._sample, len(sequences))).round().astype(int))
        behaviour = self._behaviour_logprobs([sequences[i] for i in chosen])
        return self._with_parts(self._update(state, batch, sequences, options), sequences, behaviour, chosen)

    def _with_parts(
        self,
        updated: Updated,
        sequences: Sequence[TrainSequence],
        behaviour: dict[int, list[np.ndarray]],
        chosen: np.ndarray,
    ) -> Updated:
        """``updated`` with the metrics of the two parts; ``behaviour`` is of the ``chosen`` of the sequences."""
        if not behaviour:
            return updated
        every = updated.trainer_logprobs()
        sampled, trainer = [sequences[i] for i in chosen], [every[i] for i in chosen]
        row = split_metrics(sampled, behaviour, trainer, self._threshold)
        return updated._replace(row=updated.row | row, trainer_logprobs=lambda: every)

    def _behaviour_logprobs(
        self, sampled: Sequence[TrainSequence], batch: PackedBatch | None = None
    ) -> dict[int, list[np.ndarray]]:
        """By versions behind, of those among the tokens that are kept: float32 [r] of each response.

        ``batch`` holds them packed; None: ``pack_sample`` packs them, if they are needed.
        """
        behind = {int(d) for s in sampled if s.staleness is not None for d in np.unique(s.staleness)}
        found = {}
        for versions in sorted(behind & set(range(1, len(self._kept)))):
            batch = batch or self._pack_sample(sampled)
            logprobs: Any = self._forward(self._kept[versions], batch)[1]
            found[versions] = unpack(fetch(logprobs), batch, sampled)
        return found


def split_metrics(
    sampled: Sequence[TrainSequence],
    behaviour: dict[int, list[np.ndarray]],
    trainer: Sequence[np.ndarray],
    is_threshold: float = 2.0,
) -> dict[str, float]:
    """``mismatch_numerics/`` and ``mismatch_drift/`` of responses, and ``is_numerics/`` and ``is_drift/``.

    Args:
      sampled: the responses; tokens of the newest version have no drift.
      behaviour: by versions behind, log-probabilities float32 [r] of each response under that policy.
      trainer: likewise under the newest.
      is_threshold: C >= 1 of the ratios.

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
    for part in ("numerics", "drift"):
        ratios = finalize_importance(importance_statistics(read_tokens(*parts[f"mismatch_{part}"]), is_threshold))
        row |= {f"is_{part}/{name}": float(ratios[name]) for name in RATIOS}
    return row | {"mismatch_numerics/token_count": float(known.sum())}


def copy_of(dtype: Any) -> Callable[[Params], Params]:
    """Parameters in ``dtype``, in memory of their own, where they lie."""

    @jax.jit
    def copy(params: Params) -> Params:
        return jax.tree.map(lambda leaf: jnp.array(leaf, dtype=dtype, copy=True), params)

    return copy
