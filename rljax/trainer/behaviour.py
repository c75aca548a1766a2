"""Splits the mismatch of stale rollouts into two parts: the numerics of the engines, and the drift of the policy.

A token was sampled with policy version v and is trained from version w. Its log-ratio is
trainer_w - rollout = (trainer_v - rollout) + (trainer_w - trainer_v). The first part is numerics, the second is drift.
The first part needs a forward under the policy that sampled the token, so copies of older policies are kept. Both
parts are measured on a sample of the responses, or on all of them if the correction applies to one part only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from rljax.mismatch import mismatch_metrics, read_tokens
from rljax.mismatch.correction import finalize_importance, importance_statistics
from rljax.policy.model import Params
from rljax.record.token_arrays import to_rows
from rljax.sharding import fetch
from rljax.trainer.packing import PackedBatch, TrainSequence, unpack
from rljax.trainer.self_check import spread
from rljax.trainer.state import TrainState
from rljax.trainer.update import Forward, Pack, UpdateAround, Updated, UpdateOptions

NAMES = ("kl", "k3_kl", "log_ppl_abs_diff", "log_ppl_diff", "logprob_abs_diff_mean", "logprob_abs_diff_max")
"""The names of the mismatch metrics that are computed for each part."""
RATIOS = ("token_ratio_max", "token_fraction_above", "token_effective_sample_size", "sequence_effective_sample_size")
"""The names of the importance-ratio metrics ``is_numerics/<name>`` and ``is_drift/<name>``."""


@dataclass(eq=False)
class SplitUpdate(UpdateAround):
    """An ``Update`` that also measures ``mismatch_numerics/<name>`` and ``mismatch_drift/<name>``.

    Both are absent if no measured token was sampled with an older version that is kept. The drift is also measured for
    each number of versions behind, as ``mismatch_drift/<versions>/<name>``. Each such number costs one forward of the
    measured responses.
    """

    forward: Forward  # a function that scores a batch under a policy that ``copy`` returned
    pack_sample: Pack  # a function that packs ``sample`` responses
    _: KW_ONLY
    copy: Callable[[Params], Params]  # a function that copies the parameters of a state, which an update may change
    versions: int  # the number of older policies that are kept
    sample: int  # the largest number of responses of a step that are measured
    is_threshold: float = 2.0  # the threshold C of ``is_numerics/`` and ``is_drift/``
    # Whether ``update`` needs ``behaviour_logprobs``; all responses are measured then.
    for_correction: bool = False

    def __post_init__(self) -> None:
        self._kept = deque[Params](maxlen=self.versions + 1)

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Copies the policy, measures the older policies on the responses, and makes the updates."""
        self._kept.appendleft(self.copy(state.params))
        if self.for_correction:
            chosen: Any = range(len(sequences))
            behaviour = self._behaviour_logprobs(sequences, batch)
            known = [np.full(len(s.response), np.nan, np.float32) for s in sequences]
            for versions, logprobs in behaviour.items():
                for s, of_sequence, values in zip(sequences, known, logprobs, strict=True):
                    np.copyto(of_sequence, values, where=s["staleness"] == versions)
            sequences = [s.add({"behaviour_logprobs": own}) for s, own in zip(sequences, known, strict=True)]
            batch = self.pack(sequences)
        else:
            chosen = spread(len(sequences), self.sample)
            behaviour = self._behaviour_logprobs([sequences[i] for i in chosen])
        updated = self.update(state, batch, sequences, options)
        if not behaviour:
            return updated
        every = updated.trainer()
        row = split_metrics(
            [sequences[i] for i in chosen], behaviour, [every.logprobs[i] for i in chosen], self.is_threshold
        )
        return updated._replace(row=updated.row | row, trainer=lambda: every)

    def _behaviour_logprobs(
        self, sampled: Sequence[TrainSequence], batch: PackedBatch | None = None
    ) -> dict[int, list[np.ndarray]]:
        """Returns the log-probabilities, float32 [r] for each response, by the number of versions behind."""
        behind = {int(d) for s in sampled for d in np.unique(s["staleness"])}
        by_versions = {}
        for versions in sorted(behind & set(range(1, len(self._kept)))):
            batch = batch or self.pack_sample(sampled)
            values = self.forward(self._kept[versions], batch)[1]
            by_versions[versions] = unpack(fetch(values.logprobs), batch, sampled)
        return by_versions


def split_metrics(
    sampled: Sequence[TrainSequence],
    behaviour: dict[int, list[np.ndarray]],
    trainer: Sequence[np.ndarray],
    is_threshold: float = 2.0,
) -> dict[str, float]:
    """Computes the metrics ``mismatch_numerics/``, ``mismatch_drift/``, ``is_numerics/`` and ``is_drift/``.

    The metrics are over the tokens that a policy of ``behaviour`` or the newest policy sampled. Tokens of the newest
    policy have no drift. The log-probabilities of each response, float32 [r], are in ``trainer`` under the newest
    policy. In ``behaviour`` they are under each older policy, by the number of versions behind. The ratios are
    truncated at ``is_threshold``, which is at least 1.
    """
    rollout, now = to_rows([s["rollout_logprobs"] for s in sampled], 0.0), to_rows(trainer, 0.0)
    behind = to_rows([np.where(s.sampled, s["staleness"], -1) for s in sampled], -1)
    then = now.copy()
    for versions, logprobs in behaviour.items():
        np.copyto(then, to_rows(logprobs, 0.0), where=behind == versions)
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
