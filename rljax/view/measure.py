"""The numbers of a token dump that its page shows: sequences by contribution, histograms, growth, weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.mismatch import Statistics, merge, read_tokens
from rljax.mismatch.correction import correct_tokens, finalize_correction
from rljax.mismatch.diagnosis import after_environment
from rljax.mismatch.regions import region_factor
from rljax.record.dump_facts import TokenPair, entropies, pad, turns_of
from rljax.record.token_dumps import ABOVE_ZERO, TokenDump

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
    "after": np.asarray([2, 3, 5, 9, 17, 33, 65, 129, 257, 513, 1025]),  # tokens since the environment's last, from 1
}
"""The edges of the buckets of each chart. Bucket i holds edges[i - 1] <= x < edges[i]."""

GROWING = ("position", "turn", "after")
"""The charts that show the mean of abs(log-ratio) in each bucket, not the number of tokens."""


@dataclass
class Measured:
    """The numbers of the n sequences of a dump.

    If the dump has only one column, its log-probability replaces the log-ratio everywhere.
    """

    trainer: str  # the name of the column in the trainer's place; "" if there is only one column
    rollout: str  # the name of the column in the rollout engine's place
    sequences: dict[str, np.ndarray]  # numbers of the sequences by name, [n]
    order: np.ndarray  # the indices of the sequences with a response token, the largest contribution first, int64
    metrics: dict[str, float]  # the metrics of the whole dump, by name
    histograms: dict[str, np.ndarray]  # the number of tokens in each bucket, int64, by the names of ``EDGES``
    growth: dict[str, np.ndarray]  # the sum of abs(log-ratio) in each bucket, float64, by the names of ``GROWING``
    entropy: list[np.ndarray]  # entropies of the tokens (nats), float32 [t] each, NaN if unknown; [] without any
    entropy_of: str  # the source of the entropies, in words
    # The turn of each token, and its distance from the environment's last token, int64 [t]; 0: none. [] with one turn.
    turns: list[np.ndarray]
    after: list[np.ndarray]
    weights: list[np.ndarray]  # the correction's weights, float32 [t]; [] if unknown
    notes: list[str]  # sentences on numbers that are left out or not known


def measure(
    dump: TokenDump,
    columns: tuple[str, str],
    correction: CorrectionConfig | None = None,
    progress: Callable[[int], object] = lambda count: None,
) -> Measured:
    """Measures every sequence of a dump.

    ``columns`` are the trainer's and the rollout engine's column, from ``choose_pair``. ``correction`` is the
    correction of the run that wrote the dump. Without it the weights are unknown. ``progress`` is called with the
    number of newly measured sequences. The contribution of a sequence is its share of the sum of k3 = exp(lr) - 1 - lr
    over all tokens (Schulman, "Approximating KL Divergence", 2020). Here lr is the log-ratio. If there is only one
    column, it is the share of the sum of abs(log p).

    Raises:
      ValueError: The dump has no sequence.
    """
    if not len(dump.sequence_ids):
        raise ValueError("there is no sequence in the dump")
    pair = TokenPair(dump, *columns, progress)
    metrics = pair.metrics
    shown = {name: metrics[name] for name in METRICS}
    if not pair.trainer:
        shown = {"mean_logprob": -metrics["kl"], **{name: metrics[name] for name in METRICS[-3:]}}
    (entropy, entropy_of), turns = entropies(dump), turns_of(dump)
    after = [after_environment(each) for each in turns]
    position = pair.places(np.ones(len(pair.lr), bool))
    values = {"value": pair.lr, "position": position}
    lists = {"entropy": entropy, "turn": turns, "after": after}
    values |= {name: pair.of_tokens(each) for name, each in lists.items() if each}
    histograms = {name: _histogram(pair, name, values) for name in EDGES}
    growth = {name: _histogram(pair, name, values, np.abs(pair.lr)) for name in GROWING}
    sequences, order = _of_sequences(pair, position)
    weights, unknown = _weigh(pair, correction)
    notes = [*_notes(pair, sequences), *unknown]
    return Measured(
        *columns, sequences, order, shown, histograms, growth, entropy, entropy_of, turns, after, weights, notes
    )


def _histogram(
    pair: TokenPair, name: str, of_tokens: dict[str, np.ndarray], weights: np.ndarray | None = None
) -> np.ndarray:
    """Returns the number of tokens, or the sum of their weights, in each bucket of a chart."""
    values = of_tokens.get(name, np.full(len(pair.lr), np.nan))
    known = pair.valid & (np.isfinite(values) if name in ("value", "entropy") else values > 0)
    index = np.searchsorted(EDGES[name], values[known], side="right")
    return np.bincount(index, None if weights is None else weights[known], len(EDGES[name]) + 1)


def _of_sequences(pair: TokenPair, position: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the numbers of the sequences by name, and the order of the sequences with a response token."""
    count, size = len(pair.dump.sequence_ids), np.abs(pair.lr)
    names = {"sum": pair.lr, "size": size, "k3": pair.k3, "tokens": pair.valid, "nonfinite": ~pair.valid}
    of: dict[str, np.ndarray] = {name: np.bincount(pair.sequence, weights, count) for name, weights in names.items()}
    present, starts = np.unique(pair.sequence, return_index=True)
    worst = np.lexsort((-size, pair.sequence))[starts]  # the first token with the largest size in each sequence
    of["largest"], of["position"] = np.zeros(count), np.zeros(count)
    of["largest"][present], of["position"][present] = size[worst], position[worst] * (size[worst] > 0)
    amount = of["k3"] if pair.trainer else of["size"]
    of["share"] = amount / (amount.sum() or 1.0)
    of["mean"] = of["size"] / np.maximum(of["tokens"], 1)
    order = np.lexsort((-of["size"], -amount))
    return of, order[np.isin(order, present)]


def _notes(pair: TokenPair, of: dict[str, np.ndarray]) -> list[str]:
    """Returns a sentence on each kind of number that is left out or doubtful."""
    notes, dump, count = [], pair.dump, len(pair.dump.sequence_ids)
    if bare := count - len(np.unique(pair.sequence)):
        notes.append(f"{bare} of {count} sequences have no response token and are left out.")
    if lost := int(of["nonfinite"].sum()):
        notes.append(
            f"{lost} response tokens have no finite log-probability on one side. They are left out of every number."
        )
    if above := int((pair.x > ABOVE_ZERO).sum() + (pair.y > ABOVE_ZERO).sum()):
        notes.append(f"{above} log-probabilities of response tokens are above 0, which no true one is.")
    if not pair.trainer:
        notes.append(f"The dump has one column, {pair.rollout}: colours, order and charts show its log-probability.")
    elif dump.role(pair.trainer) == dump.role(pair.rollout):
        notes.append("The dump does not tell the roles of the columns: the sign of the log-ratio may be turned.")
    return notes


def _weigh(pair: TokenPair, correction: CorrectionConfig | None) -> tuple[list[np.ndarray], list[str]]:
    """Returns the weights of a correction at each token, float32 [t] for each sequence, and notes on them.

    The weights are [] if they are unknown. They are divided by their mean if the correction normalizes them.
    """
    if correction is None or not pair.trainer:
        return [], []
    config, values = correction.resolved(), pair.dump.values
    if config.part != "whole":
        return [], [f"The correction is of the part {config.part}, so its weights are not known here."]
    region, notes = config.trust_region, []
    if region is not None and (region.over_tops or config.cuts_batch or "advantage" not in values):
        notes.append("The trust region needs numbers that the dump lacks, so the weights are without it.")
        region = None
    found = [np.zeros(0, np.float32) for _ in pair.dump.sequence_ids]
    total: Statistics | None = None
    for rows, (trainer, rollout, mask) in pair.chunks():
        if "in_loss" in values:
            mask = mask & (pad(values["in_loss"], rows, 0.0) != 0)
        tokens = read_tokens(trainer, rollout, mask)
        weights, kept, statistics = correct_tokens(tokens, config.weighting, config.rejections)
        weights = np.where(kept, weights, 0.0)
        if region is not None:
            advantages = pad(values["advantage"], rows, 0.0)
            weights = weights * region_factor(np, region, tokens.trainer, tokens.rollout, advantages)[0]
        total = statistics if total is None else merge(total, statistics)
        for row, line in zip(rows, weights, strict=True):
            found[row] = line[: len(pair.dump.token_ids[row])].astype(np.float32)
    mean = finalize_correction(total)["weight_mean"] if config.normalize and total is not None else 0.0
    return [weights / np.float32(mean) for weights in found] if mean > 0 else found, notes
