"""The mismatch of trajectories of several turns: by turn, and by the distance from the environment's last token.

The turns of a sequence are whole numbers, one for each token. A token has the turn that sampled it, from 1, or 0 if the
policy did not sample it. Each sequence is a vector of its own, on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from rljax.mismatch.diagnosis import finalize_buckets, mismatch_by_count
from rljax.mismatch.statistics import Statistics, merge
from rljax.mismatch.tokens import read_tokens

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
    trainer: Sequence[np.ndarray],
    rollout: Sequence[np.ndarray],
    turns: Sequence[np.ndarray],
    *,
    chunk: int = 2**20,
) -> dict[str, float]:
    """Computes the mismatch of sampled tokens by turn and by distance from the environment's last token.

    The lists have an array [t] for each sequence: the log-probabilities of its tokens under both engines, float, and
    their turns, int. ``trainer`` needs no prompt. About ``chunk`` tokens are measured together. The metrics are
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
        found = mismatch_by_count(tokens, turn, TURN_EDGES), mismatch_by_count(tokens, distance, AFTER_EDGES)
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
