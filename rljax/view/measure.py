"""The numbers of a token dump that its page shows: sequences by contribution, histograms, growth, weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.mismatch import Statistics, merge, mismatch_statistics, read_tokens
from rljax.mismatch.accurate import exp_minus_one_minus_x
from rljax.mismatch.correction import correct_tokens, finalize_correction
from rljax.mismatch.metrics import finalize_mismatch
from rljax.mismatch.regions import region_factor
from rljax.mismatch.turns import after_environment
from rljax.record.dump_turns import turns_of
from rljax.record.token_arrays import to_rows
from rljax.record.token_dumps import ABOVE_ZERO, PLACES, TokenDump

METRICS = (
    *("k3_kl", "kl", "logprob_abs_diff_mean", "logprob_abs_diff_p99", "logprob_abs_diff_max", "log_ppl_abs_diff"),
    *("extreme_rate", "nonfinite_count", "token_count", "sequence_count"),
)
"""The metrics of a dump that its page shows. The names are those of a run's rows."""

_STEPS = np.asarray([digit * 10.0**power for power in range(-5, 1) for digit in (1, 3)] + [10.0])
EDGES = {
    "value": np.concatenate([-_STEPS[::-1], _STEPS]),  # of log-ratios, nats
    "entropy": np.asarray([0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 1, 1.5, 2, 3, 4, 6]),  # nats
    "position": 2.0 ** np.arange(4, 20),  # the place among the sampled tokens of the response, from 1
    "turn": np.asarray([2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 33, 65]),  # the number of the turn, from 1
    "after": np.asarray(
        [2, 3, 5, 9, 17, 33, 65, 129, 257, 513, 1025]
    ),  # the distance from the environment's last token (tokens), from 1
}
"""The edges of the buckets of each chart. Bucket i holds edges[i - 1] <= x < edges[i]."""

GROWING = ("position", "turn", "after")
"""The charts that show the mean of abs(log-ratio) in each bucket, not the number of tokens."""

_CHUNK = 2**19  # the most padded tokens that are measured together


@dataclass
class Measured:
    """The numbers of the n sequences of a dump.

    If the dump has only one column, its log-probability takes the place of the log-ratio everywhere.
    """

    trainer: str  # the name of the column in the trainer's place; "" if there is only one column
    rollout: str  # the name of the column in the rollout engine's place
    sequences: dict[str, np.ndarray]  # numbers of the sequences by name, float64 [n]
    order: np.ndarray  # the indices of the sequences with a response token, the largest contribution first, int64
    metrics: dict[str, float]  # the metrics of the whole dump, by name
    histograms: dict[str, np.ndarray]  # the number of tokens in each bucket, int64, by the names of ``EDGES``
    growth: dict[str, np.ndarray]  # the sum of abs(log-ratio) in each bucket, float64, by the names of ``GROWING``
    entropy: list[np.ndarray]  # entropies of the tokens (nats), float32 [t] each, NaN if unknown; [] without any
    entropy_of: str  # the source of the entropies, in words
    # The turn of each token, and its distance from the environment's last token, int64 [t]; 0: none. [] with one turn.
    turns: list[np.ndarray] = field(default_factory=list)
    after: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)  # the correction's weights, float32 [t]; [] if unknown
    notes: list[str] = field(default_factory=list)  # sentences on numbers that are left out or not known


def choose_columns(dump: TokenDump, trainer: str | None = None, rollout: str | None = None) -> tuple[str, str]:
    """Returns the names of the columns in the trainer's and in the rollout engine's place.

    The trainer's is "" if the dump has only one column. Without ``trainer`` or ``rollout`` the roles of the columns
    decide. Raises ValueError if a named column is missing, both names are equal, or there is no column.
    """
    names = sorted(dump.first_runs)
    for name in (trainer, rollout):
        if name is not None and name not in dump.logprobs:
            raise ValueError(f"no column {name!r} in the dump, which has {sorted(dump.logprobs)}")
    if not names:
        raise ValueError("the dump has no column of log-probabilities; rljax compare TOKENS --scorer ... adds some")
    if trainer is not None and trainer == rollout:
        raise ValueError(f"expected two different columns, got {trainer!r} twice")
    rest = sorted(set(names) - {trainer, rollout}, key=lambda name: (PLACES.index(dump.role(name)), name))
    if rollout is None:
        rollout = rest.pop() if rest else trainer
        trainer = None if rollout == trainer else trainer
    return trainer or (rest[0] if rest else ""), rollout or ""


def measure(
    dump: TokenDump,
    columns: tuple[str, str],
    correction: CorrectionConfig | None = None,
    progress: Callable[[int], object] = lambda count: None,
) -> Measured:
    """Measures every sequence of a dump.

    ``columns`` are those in the trainer's and in the rollout engine's place, from ``choose_columns``. ``correction`` is
    the correction of the run that wrote the dump. Without it the weights are unknown. ``progress`` is called with the
    number of newly measured sequences. The contribution of a sequence is its share of the sum of k3 = exp(lr) - 1 - lr
    over all tokens, where lr is the log-ratio (Schulman, "Approximating KL Divergence", 2020). If there is only one
    column, it is the share of the sum of abs(log p).

    Raises:
      ValueError: The dump has no sequence.
    """
    trainer, rollout = columns
    entropy, entropy_of = _entropies(dump)
    count = len(dump.sequence_ids)
    names = ("tokens", "nonfinite", "sum", "size", "largest", "k3", "position")
    sequences = {name: np.zeros(count) for name in names}
    histograms = {name: np.zeros(len(edges) + 1, np.int64) for name, edges in EDGES.items()}
    growth = {name: np.zeros(len(EDGES[name]) + 1) for name in GROWING}
    found = Measured(trainer, rollout, sequences, np.zeros(0, int), {}, histograms, growth, entropy, entropy_of)
    found.turns = turns_of(dump)
    found.after = [after_environment(turns) for turns in found.turns]
    weighing = _Weighing(dump, correction) if trainer else None
    total: Statistics | None = None
    for rows in _chunks([len(ids) for ids in dump.token_ids]):
        mask, sides, tokens = _read(dump, columns, rows)
        if weighing is not None:
            weighing.add(rows, *sides)
        statistics = mismatch_statistics(tokens)
        total = statistics if total is None else merge(total, statistics)
        _add_rows(found, rows, tokens, np.cumsum(mask, axis=1))
        progress(len(rows))
    if total is None:
        raise ValueError("there is no sequence in the dump")
    metrics = finalize_mismatch(total)
    found.metrics = {name: metrics[name] for name in METRICS}
    if not trainer:
        found.metrics = {"mean_logprob": -metrics["kl"], **{name: metrics[name] for name in METRICS[-3:]}}
    _finish(found, dump, weighing)
    return found


def _chunks(lengths: list[int]) -> Iterator[np.ndarray]:
    """Yields the indices of sequences of similar length, so that there is little padding."""
    waiting: list[int] = []
    for index in np.argsort(lengths, kind="stable").tolist():
        if waiting and (len(waiting) + 1) * lengths[index] > _CHUNK:
            yield np.asarray(waiting)
            waiting = []
        waiting.append(index)
    if waiting:
        yield np.asarray(waiting)


def _pad(vectors: Sequence[np.ndarray], rows: np.ndarray, fill: float) -> np.ndarray:
    return to_rows([vectors[row] for row in rows], fill)


def _read(dump: TokenDump, columns: tuple[str, str], rows: np.ndarray) -> tuple[np.ndarray, Any, Any]:
    """Returns the arrays of some sequences: the mask, (trainer, rollout, mask), and the result of ``read_tokens``.

    All are [b, t]. If there is only one column, it takes the trainer's place, and the rollout's is 0.
    """
    mask = _pad(dump.response_mask, rows, False)
    rollout = _pad(dump.logprobs[columns[1]], rows, np.nan)
    trainer = _pad(dump.logprobs[columns[0]], rows, np.nan) if columns[0] else rollout
    if not columns[0]:
        rollout = np.zeros_like(trainer)
    return mask, (trainer, rollout, mask), read_tokens(trainer, rollout, mask)


def _add_rows(found: Measured, rows: np.ndarray, tokens: Any, position: np.ndarray) -> None:
    """Adds some sequences to the numbers. ``position`` [b, t] counts the response tokens of each sequence from 1."""
    lr, valid, size = tokens.log_ratio, tokens.valid, np.abs(tokens.log_ratio)
    of = found.sequences
    of["tokens"][rows], of["nonfinite"][rows] = valid.sum(1), tokens.nonfinite.sum(1)
    of["sum"][rows], of["size"][rows], of["largest"][rows] = lr.sum(1), size.sum(1), size.max(1)
    of["k3"][rows] = exp_minus_one_minus_x(np, lr).sum(1)
    worst = np.argmax(size, axis=1)
    of["position"][rows] = position[np.arange(len(rows)), worst] * (size.max(1) > 0)
    of_tokens = {"value": lr[valid], "position": position[valid]}
    sizes = {"position": size[valid]}
    for name, counts in (("turn", found.turns), ("after", found.after)) if found.turns else ():
        values = _pad(counts, rows, 0)
        known = valid & (values > 0)
        of_tokens[name], sizes[name] = values[known], size[known]
    if found.entropy:
        entropies = _pad(found.entropy, rows, np.nan)[valid]
        of_tokens["entropy"] = entropies[np.isfinite(entropies)]
    for name, values in of_tokens.items():
        found.histograms[name] += np.bincount(bucket(name, values), minlength=len(found.histograms[name]))
    for name, weights in sizes.items():
        places = bucket(name, of_tokens[name])
        found.growth[name] += np.bincount(places, weights=weights, minlength=len(found.growth[name]))


def bucket(name: str, values: np.ndarray) -> np.ndarray:
    """Returns the index of the bucket of ``EDGES[name]`` that each value falls into."""
    return np.searchsorted(EDGES[name], values, side="right")


def _finish(found: Measured, dump: TokenDump, weighing: _Weighing | None) -> None:
    """Adds the numbers that depend on all sequences: shares, order, weights and notes."""
    of = found.sequences
    amount = of["k3"] if found.trainer else of["size"]
    of["share"] = amount / (amount.sum() or 1.0)
    of["mean"] = of["size"] / np.maximum(of["tokens"], 1)
    in_mask = of["tokens"] + of["nonfinite"] > 0
    order = np.lexsort((-of["size"], -amount))
    found.order = order[in_mask[order]]
    if bare := int((~in_mask).sum()):
        found.notes.append(f"{bare} of {len(in_mask)} sequences have no response token and are left out.")
    if lost := int(of["nonfinite"].sum()):
        found.notes.append(
            f"{lost} response tokens have no finite log-probability on one side. They are left out of every number."
        )
    if above := sum(_above_zero(dump, name) for name in {found.trainer, found.rollout} - {""}):
        found.notes.append(f"{above} log-probabilities of response tokens are above 0, which no true one is.")
    if not found.trainer:
        found.notes.append(
            f"The dump has one column, {found.rollout}: colours, order and charts show its log-probability."
        )
    elif dump.role(found.trainer) == dump.role(found.rollout):
        found.notes.append("The dump does not tell the roles of the columns: the sign of the log-ratio may be turned.")
    if weighing is not None:
        found.weights = weighing.finished()
        found.notes += weighing.notes


def _above_zero(dump: TokenDump, name: str) -> int:
    pairs = zip(dump.logprobs[name], dump.response_mask, strict=True)
    return sum(int(((vector > ABOVE_ZERO) & mask).sum()) for vector, mask in pairs)


class _Weighing:
    """The weights of a run's correction at each token of a dump."""

    def __init__(self, dump: TokenDump, correction: CorrectionConfig | None) -> None:
        self.notes: list[str] = []
        self._config = None if correction is None else correction.resolved()
        self._weights: list[np.ndarray] = [np.zeros(0, np.float32) for _ in dump.sequence_ids]
        self._dump = dump
        self._total: Statistics | None = None
        if self._config is not None and self._config.part != "whole":
            self.notes.append(f"The correction is of the part {self._config.part}, so its weights are not known here.")
            self._config = None
        region = self._config.trust_region if self._config is not None else None
        if region is not None and (region.over_tops or "advantage" not in dump.values):
            self.notes.append("The trust region needs numbers that the dump lacks, so the weights are without it.")
            region = None
        self._region = region

    def add(self, rows: np.ndarray, trainer: np.ndarray, rollout: np.ndarray, mask: np.ndarray) -> None:
        """Computes the weights of some sequences. The arrays are [b, t]."""
        if self._config is None:
            return
        if "in_loss" in self._dump.values:
            mask = mask & (_pad(self._dump.values["in_loss"], rows, 0.0) != 0)
        tokens = read_tokens(trainer, rollout, mask)
        weights, kept, statistics = correct_tokens(tokens, self._config.weighting, self._config.rejections)
        weights = np.where(kept, weights, 0.0)
        if self._region is not None:
            advantages = _pad(self._dump.values["advantage"], rows, 0.0)
            weights = weights * region_factor(np, self._region, tokens.trainer, tokens.rollout, advantages)[0]
        self._total = statistics if self._total is None else merge(self._total, statistics)
        for row, line in zip(rows, weights, strict=True):
            self._weights[row] = line[: len(self._dump.token_ids[row])].astype(np.float32)

    def finished(self) -> list[np.ndarray]:
        """Returns the weights of all sequences, float32 [t] each, or [] if they are unknown.

        They are divided by their mean if the correction normalizes them.
        """
        if self._config is None or self._total is None:
            return []
        mean = finalize_correction(self._total)["weight_mean"] if self._config.normalize else 0.0
        return [weights / np.float32(mean) for weights in self._weights] if mean > 0 else self._weights


def _entropies(dump: TokenDump) -> tuple[list[np.ndarray], str]:
    """Returns the entropy of each token (nats), and a text that names its source."""
    if "entropy" in dump.values:
        return list(dump.values["entropy"]), "entropy"
    if not dump.columns.get("top_ids"):
        return [], ""
    k = dump.columns["top_ids"][0].shape[1]
    text = f"the sampler's entropy, at least: of its {k} likeliest tokens and all others as one"
    return [_entropy_of_tops(logprobs) for logprobs in dump.columns["top_logprobs"]], text


def _entropy_of_tops(logprobs: np.ndarray) -> np.ndarray:
    """Computes the entropy of the listed tokens and of all other tokens as one event (nats), float32 [t].

    ``logprobs`` are [t, k]. The entropy is NaN at a position where no token is listed. It is a lower bound, because the
    other tokens are one event.
    """
    known = np.isfinite(logprobs)
    p = np.where(known, np.exp(np.minimum(logprobs, 0.0, dtype=np.float64)), 0.0)
    rest = np.clip(1.0 - p.sum(axis=1), 0.0, 1.0)
    rest = np.where(rest > 1e-6, rest, 0.0)  # a smaller rest comes from rounding of the sum
    entropy = -(p * np.where(known, logprobs, 0.0)).sum(axis=1) - rest * np.log(np.where(rest > 0, rest, 1.0))
    return np.where(known.any(axis=1), entropy, np.nan).astype(np.float32)
