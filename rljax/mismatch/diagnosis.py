"""The sources of the mismatch: by position, entropy, distance of policy versions, sign of the advantage, and turn.

The turns of a sequence are whole numbers, one for each token. A token has the turn that sampled it, from 1, or 0 if the
policy did not sample it. By turn, each sequence is a vector of its own, on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rljax.mismatch.accurate import RATIO_BOUND, total_over
from rljax.mismatch.arrays import ArrayLike, as_float, check_shape, count, namespace_of, scalars
from rljax.mismatch.metrics import EXTREME_LOG_RATIO
from rljax.mismatch.statistics import Statistics, merge
from rljax.mismatch.tokens import Tokens, read_tokens

POSITION_EDGES = (64, 256, 1024, 4096)
"""First positions of the buckets after the first: 1-63, 64-255, 256-1023, 1024-4095, 4096 and up (valid tokens)."""
ENTROPY_EDGES = (0.01, 0.1, 0.5, 1.0, 2.0)
"""Lowest entropies (nats) of the buckets after the first."""


def mismatch_by(tokens: Tokens, values: ArrayLike, edges: Sequence[float], least: float = -np.inf) -> Statistics:
    """Computes statistics of buckets of tokens, arrays [len(edges) + 1], by a number of each token in ``values``.

    ``values`` is int or float [b, t]. Bucket i has edges[i - 1] <= value < edges[i]. No bucket has a token whose value
    is not finite or below ``least``. Raises ValueError unless the edges increase and the shapes agree.
    """
    check_edges("edges", edges)
    check_shape("values", values, tokens.valid.shape)
    xp, numbers = tokens.xp, as_float(tokens.xp, values)
    index = sum((numbers >= edge).astype(np.int32) for edge in edges)
    counted = tokens.valid & xp.isfinite(numbers) & (numbers >= least)
    inside = counted[None] & (index[None] == xp.arange(len(edges) + 1, dtype=np.int32)[:, None, None])
    lr = tokens.log_ratio
    size = xp.abs(lr)[None]
    terms = {"log_ratio_abs": size, "k3": tokens.k3[None]}
    flags = {"token_count": inside, "extreme_count": inside & (size > EXTREME_LOG_RATIO)}
    return Statistics(
        sums={name: count(xp, flag, (1, 2)) for name, flag in flags.items()}
        | {name: xp.sum(xp.where(inside, term, 0), axis=(1, 2)) for name, term in terms.items()},
        totals={"log_ratio": total_over(xp, xp.where(inside, lr[None], 0), (1, 2))},
        maxima={"largest": xp.max(xp.where(inside, size, 0), axis=(1, 2), initial=0)},
    )


def finalize_buckets(statistics: Statistics, labels: Sequence[str]) -> dict[str, Any]:
    """Computes the metrics of each bucket, named ``<label>/<name>``: floats (numpy leaves) or jax scalars.

    The names are token_count, kl, k3_kl, logprob_abs_diff_mean, logprob_abs_diff_max and extreme_rate, defined as in
    ``finalize_mismatch``. All are 0 without tokens. Raises ValueError unless there is one label for each bucket.
    """
    columns = {
        "token_count": statistics["token_count"],
        "kl": 0 - statistics.mean("log_ratio"),
        "k3_kl": statistics.mean("k3"),
        "logprob_abs_diff_mean": statistics.mean("log_ratio_abs"),
        "logprob_abs_diff_max": statistics.extreme("largest"),
        "extreme_rate": statistics.mean("extreme_count"),
    }
    if len(labels) != len(columns["token_count"]):
        raise ValueError(f"labels must name each of the {len(columns['token_count'])} buckets, got {tuple(labels)}")
    each = {f"{label}/{name}": column[i] for i, label in enumerate(labels) for name, column in columns.items()}
    return scalars(statistics.xp, each)


def bucket_labels(edges: Sequence[float]) -> tuple[str, ...]:
    """Returns the names of the buckets: ("lt_64", "64_to_256", "ge_256") for the edges (64, 256)."""
    middle = [f"{low:g}_to_{high:g}" for low, high in itertools.pairwise(edges)]
    return (f"lt_{edges[0]:g}", *middle, f"ge_{edges[-1]:g}")


def check_edges(name: str, edges: Sequence[float]) -> None:
    """Raises ValueError unless there is at least one edge and the edges increase."""
    if not edges or any(low >= high for low, high in itertools.pairwise(edges)):
        raise ValueError(f"{name} must hold at least one number and increase, got {list(edges)}")


def sign_skew(tokens: Tokens, advantages: ArrayLike) -> Statistics:
    """Computes statistics that show whether log-ratios have the sign of the advantages or the opposite sign.

    ``advantages`` has the shape [b, t] and a float dtype. Tokens with a non-finite advantage are left out. k3, chi2 and
    absolute differences show no direction: the same value can push reinforced tokens up or down (arXiv 2605.14220).
    """
    check_shape("advantages", advantages, tokens.valid.shape)
    xp, lr = tokens.xp, tokens.log_ratio
    values = as_float(xp, advantages)
    advantage = xp.where(tokens.valid & xp.isfinite(values), values, 0)
    terms = {
        "weighted_log_ratio": advantage * lr,
        "weighted_ratio": advantage * xp.expm1(xp.clip(lr, -RATIO_BOUND, RATIO_BOUND)),
        "weighted_sign": advantage * xp.sign(lr),
        "positive": xp.where(advantage > 0, lr, 0),
        "negative": xp.where(advantage < 0, lr, 0),
    }
    return Statistics(
        sums={
            "positive_count": count(xp, advantage > 0),
            "negative_count": count(xp, advantage < 0),
            "advantage_abs": xp.sum(xp.abs(advantage)),
        },
        totals={name: total_over(xp, term, (0, 1)) for name, term in terms.items()},
    )


def finalize_sign_skew(statistics: Statistics) -> dict[str, Any]:
    """Computes the skew metrics of advantages A, with rho = exp(lr). They are 0 if all advantages are 0.

    Returns:
      ``log_ratio_skew`` = <A lr> / <abs(A)> (nats). Above 0, the trainer is more confident than the sampler at tokens
      that it reinforces. ``ratio_skew`` = <A (rho - 1)> / <abs(A)>, the relative error in the weights of an uncorrected
      gradient. ``sign_skew`` = <A sign(lr)> / <abs(A)>, in -1 .. 1. ``positive_log_ratio`` and ``negative_log_ratio``:
      the mean lr of tokens with A > 0 and with A < 0 (nats).
    """
    xp, weight = statistics.xp, statistics["advantage_abs"]
    weight = xp.where(weight > 0, weight, 1)
    metrics = {
        "log_ratio_skew": statistics["weighted_log_ratio"] / weight,
        "ratio_skew": statistics["weighted_ratio"] / weight,
        "sign_skew": statistics["weighted_sign"] / weight,
        "positive_log_ratio": statistics.mean("positive", "positive_count"),
        "negative_log_ratio": statistics.mean("negative", "negative_count"),
    }
    return scalars(xp, metrics)


def split_sum_rise(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Splits the rise of ``log_ppl_abs_diff_sum`` between two steps into the parts of the length and of the tokens.

    The metric is mean length x gap, where the gap is sum_i abs(sum_t lr) / sum_i n_i (nats per token). Longer responses
    with the same gap explain (length after - length before) x gap before. The rest is length after x (gap after - gap
    before). Independent errors of tokens add up like the square root of the length, so the gap falls as responses grow.
    Then ``per_token`` is negative, which is not an improvement.

    ``before`` and ``after`` are metrics of ``finalize_mismatch``. The results are ``rise``, ``length_explained`` and
    ``per_token`` (nats per sequence); the last two add up to the first.
    """
    length_before, gap_before = _length_and_gap(before)
    length_after, gap_after = _length_and_gap(after)
    return {
        "rise": after["log_ppl_abs_diff_sum"] - before["log_ppl_abs_diff_sum"],
        "length_explained": (length_after - length_before) * gap_before,
        "per_token": length_after * (gap_after - gap_before),
    }


def _length_and_gap(metrics: Mapping[str, Any]) -> tuple[Any, Any]:
    """Computes the mean length (tokens) and the gap (nats per token) of a step. Both are 0 without sequences."""
    xp = namespace_of(*metrics.values())
    length = metrics["token_count"] / xp.maximum(metrics["sequence_count"], 1)
    return length, metrics["log_ppl_abs_diff_sum"] / xp.where(length > 0, length, 1)


TURN_EDGES = (2, 3, 5, 9)
"""First turns of the buckets after the first: 1, 2, 3-4, 5-8, 9 and up."""
AFTER_EDGES = (2, 5, 17)
"""First distances of the buckets after the first: 1, 2-4, 5-16, 17 and up (tokens)."""


def turns_of_mask(mask: np.ndarray) -> np.ndarray:
    """Numbers the contiguous stretches of sampled tokens in a mask, bool [t], from 1. Returns the turns, int64 [t]."""
    begins = mask & ~np.concatenate([[False], mask[:-1]])
    return np.where(mask, np.cumsum(begins), 0)


def after_environment(turns: np.ndarray) -> np.ndarray:
    """Counts the tokens from the environment's last token to each sampled token, int64 [t].

    ``turns`` are the turns of a sequence, with its prompt or without, int [t]. The first token after the environment's
    tokens has 1. The environment's own tokens have 0, and so have sampled tokens without an environment's token before
    them. The tokens before the first sampled one are the prompt. If the first sampled token belongs to a later turn
    than 1, the prompt ends with the environment's tokens.
    """
    place, sampled = np.arange(len(turns)), turns > 0
    if not sampled.any():
        return np.zeros(len(turns), np.int64)
    first = int(np.argmax(sampled))
    before = first - 1 if turns[first] > 1 else -1
    last = np.maximum.accumulate(np.where(~sampled & (place > first), place, before))
    return np.where(sampled & ((last >= 0) | (turns[first] > 1)), place - last, 0)


def mismatch_by_turn(
    trainer: Sequence[np.ndarray], rollout: Sequence[np.ndarray], turns: Sequence[np.ndarray], *, chunk: int = 2**20
) -> dict[str, float]:
    """Computes the mismatch of sampled tokens by turn and by distance from the environment's last token.

    The lists have an array [t] for each sequence: the log-probabilities of its tokens under both engines, float, and
    their turns, int. All three may omit the prompts. About ``chunk`` tokens are measured together. The metrics are
    ``turn_<bucket>/<name>`` and ``after_<bucket>/<name>``, with the names of ``finalize_buckets``. Buckets without a
    token are absent.
    """
    totals: tuple[Statistics, ...] = ()
    for chosen in _chunks(turns, chunk):
        own = np.concatenate([turns[i] for i in chosen]) > 0
        after = np.concatenate([after_environment(turns[i]) for i in chosen])
        vectors = [np.concatenate([each[i] for i in chosen]) for each in (trainer, rollout, turns)]
        ours, others, turn, distance = (vector[own][None] for vector in (*vectors, after))
        tokens = read_tokens(ours, others, np.ones(ours.shape, np.bool_))
        found = mismatch_by(tokens, turn, TURN_EDGES, least=1), mismatch_by(tokens, distance, AFTER_EDGES, least=1)
        totals = tuple(map(merge, totals, found)) if totals else found
    metrics: dict[str, float] = {}
    for kind, edges, total in zip(("turn", "after"), (TURN_EDGES, AFTER_EDGES), totals, strict=False):
        numbers = finalize_buckets(total, labels := count_labels(edges))
        full = [label for label in labels if numbers[f"{label}/token_count"]]
        metrics |= {f"{kind}_{name}": value for name, value in numbers.items() if name.partition("/")[0] in full}
    return metrics


def count_labels(edges: Sequence[int]) -> tuple[str, ...]:
    """Returns the names of buckets of whole numbers from 1, both ends included: ("1", "2_to_4", "ge_5") for (2, 5)."""
    pairs = itertools.pairwise((1, *edges))
    return (*(f"{low}" if high == low + 1 else f"{low}_to_{high - 1}" for low, high in pairs), f"ge_{edges[-1]}")


def _chunks(vectors: Sequence[np.ndarray], size: int) -> Iterator[range]:
    """Yields ranges of sequences of about ``size`` tokens together."""
    if not len(vectors):
        return
    index = np.cumsum([len(vector) for vector in vectors]) // size
    starts = [0, *(np.flatnonzero(np.diff(index)) + 1).tolist(), len(vectors)]
    yield from (range(low, high) for low, high in itertools.pairwise(starts))
