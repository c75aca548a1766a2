"""Computes the bias and the variance of each correction exactly on a tabular policy.

    python experiments/correction_bias.py                                       # the table of docs/theory.md
    python experiments/correction_bias.py --json benchmarks/correction_bias.json

The vocabulary has 3 tokens and a response 3 tokens, so there are 27 responses and 39 logits. The trainer's logits are
normal with deviation 1. The rollout policy's logits differ from them by normal noise of deviation ``size``. Rewards are
0 or 1, and the baseline is their mean under the rollout policy. It takes a few seconds on one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rljax.mismatch import importance_weights, rejection_mask

VOCABULARY, LENGTH = 3, 3
SIZES = (0.03, 0.1, 0.3, 1.0)
NUMBERS = ("bias", "cosine", "variance")
Weigh = Callable[["Pair"], np.ndarray]


class Pair(NamedTuple):
    """A trainer policy, a rollout policy and rewards over all n responses."""

    trainer: np.ndarray  # shape=(n, t), nats
    rollout: np.ndarray  # shape=(n, t), nats
    mask: np.ndarray  # shape=(n, t), bool
    scores: np.ndarray  # shape=(n, t, p): d trainer / d logits
    advantages: np.ndarray  # shape=(n,)

    @property
    def drawn(self) -> np.ndarray:
        """The probability of each response under the rollout policy, [n]."""
        return np.exp(self.rollout.sum(axis=1))

    @property
    def gradient(self) -> np.ndarray:
        """The policy gradient of equation 2, [p]."""
        return (np.exp(self.trainer.sum(axis=1)) * self.advantages) @ self.scores.sum(axis=1)

    def estimates(self, weights: np.ndarray) -> np.ndarray:
        """Returns the estimate of the gradient from each response alone, [n, p]; the weights are [n, t]."""
        return np.einsum("nt,n,ntp->np", weights, self.advantages, self.scores)


def make_pair(seed: int, size: float) -> Pair:
    """Makes a pair of policies; the seed alone decides the trainer, the rewards and the direction of the noise."""
    rng = np.random.default_rng(seed)
    prefixes = [p for t in range(LENGTH) for p in itertools.product(range(VOCABULARY), repeat=t)]
    shape = (len(prefixes), VOCABULARY)
    logits = rng.standard_normal(shape)
    both = logits, logits + size * rng.standard_normal(shape)
    tables = [table - np.log(np.exp(table).sum(axis=1, keepdims=True)) for table in both]
    responses = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
    rows = np.array([[prefixes.index(y[:t]) for t in range(LENGTH)] for y in responses])
    tokens = np.array(responses)
    trainer, rollout = (table[rows, tokens] for table in tables)
    scores = np.zeros((*tokens.shape, *shape))
    for n, t in np.ndindex(tokens.shape):
        scores[n, t, rows[n, t]] = np.eye(VOCABULARY)[tokens[n, t]] - np.exp(tables[0][rows[n, t]])
    rewards = rng.permutation(np.arange(len(responses)) % 3 == 0).astype(float)
    mask = np.ones(tokens.shape, bool)
    baseline = np.exp(rollout.sum(axis=1)) @ rewards
    return Pair(trainer, rollout, mask, scores.reshape(*tokens.shape, -1), rewards - baseline)


def plain(pair: Pair) -> np.ndarray:
    """Returns the weights of equation 3, which are all 1."""
    return pair.mask.astype(float)


def weighted(pair: Pair, **settings: Any) -> np.ndarray:
    """Returns the weights of ``importance_weights``; equation 4 has level "sequence" and an infinite threshold."""
    return importance_weights(pair.trainer, pair.rollout, pair.mask, **settings)[0]


def normalized(pair: Pair, **settings: Any) -> np.ndarray:
    """Returns the weights over their mean under the rollout policy: the limit of ``normalize`` in large batches."""
    weights = weighted(pair, **settings)
    return weights / (pair.drawn @ weights.mean(axis=1))


def kept(pair: Pair, weigh: Weigh = plain, **settings: Any) -> np.ndarray:
    """Returns the weights of rejection in large batches: 0 if rejected, otherwise divided by the share that is kept."""
    mask = rejection_mask(pair.trainer, pair.rollout, pair.mask, **settings)[0]
    share = pair.drawn @ mask[:, 0]
    return weigh(pair) * mask / share if share > 0 else np.zeros(mask.shape)


token, sequence, geometric = (partial(weighted, level=level) for level in ("token", "sequence", "geometric"))
CORRECTIONS: dict[str, Weigh] = {
    "none (equation 3)": plain,
    "token, unclipped": partial(token, mode="truncate", threshold=np.inf),
    "token TIS, C = 2": partial(token, mode="truncate", threshold=2.0),
    "token MIS, C = 2": partial(token, mode="mask", threshold=2.0),
    "token band, 0.5 to 2": partial(token, mode="band", threshold=(0.5, 2.0)),
    "sequence, unclipped (equation 4)": partial(sequence, mode="truncate", threshold=np.inf),
    "sequence TIS, C = 2 (equation 5)": partial(sequence, mode="truncate", threshold=2.0),
    "sequence MIS, C = 2 (equation 6)": partial(sequence, mode="mask", threshold=2.0),
    "sequence band, 0.5 to 2": partial(sequence, mode="band", threshold=(0.5, 2.0)),
    "geometric, unclipped": partial(geometric, mode="truncate", threshold=np.inf),
    "geometric TIS, C = 2": partial(geometric, mode="truncate", threshold=2.0),
    "geometric MIS, C = 2": partial(geometric, mode="mask", threshold=2.0),
    "geometric band, 0.5 to 2": partial(geometric, mode="band", threshold=(0.5, 2.0)),
    "token TIS, C = 2, normalised": partial(normalized, level="token", mode="truncate", threshold=2.0),
    "sequence TIS, C = 2, normalised": partial(normalized, level="sequence", mode="truncate", threshold=2.0),
    "sequence MIS, C = 2, normalised": partial(normalized, level="sequence", mode="mask", threshold=2.0),
    "rejection, k3 <= 0.02": partial(kept, statistic="k3", threshold=0.02),
    "rejection, geometric mean 0.9 to 1.1": partial(kept, statistic="geometric", threshold=(0.9, 1.1)),
    "rejection, veto below 0.5": partial(kept, statistic="veto", threshold=0.5),
    "sequence, rejection by k3 <= 0.02": partial(
        kept, weigh=partial(sequence, mode="truncate", threshold=np.inf), statistic="k3", threshold=0.02
    ),
    "token TIS, C = 2, rejection by k3 <= 0.001": partial(
        kept, weigh=partial(token, mode="truncate", threshold=2.0), statistic="k3", threshold=0.001
    ),
}


def judge(gradient: np.ndarray, estimates: np.ndarray, drawn: np.ndarray) -> dict[str, float]:
    """Computes bias and variance of the estimate from one response, relative to the true gradient.

    Args:
      gradient: The true gradient, [p].
      estimates: The estimate g from each response, [n, p].
      drawn: The probability of each response, [n].

    Returns:
      The ``bias`` |E g - gradient| / |gradient|, the ``cosine`` of E g and the gradient (0 if E g is 0), and the
      ``variance`` E |g - E g|^2 / |gradient|^2.
    """
    mean, norm = drawn @ estimates, np.linalg.norm(gradient)
    return {
        "bias": float(np.linalg.norm(mean - gradient) / norm),
        "cosine": float(mean @ gradient / max(np.linalg.norm(mean) * norm, 1e-300)),
        "variance": float(drawn @ np.sum((estimates - mean) ** 2, axis=1) / norm**2),
    }


def judge_all(pair: Pair) -> dict[str, dict[str, float]]:
    """Judges every correction on a pair of policies."""
    return {name: judge(pair.gradient, pair.estimates(weigh(pair)), pair.drawn) for name, weigh in CORRECTIONS.items()}


def mismatch_of(pair: Pair) -> dict[str, float]:
    """Measures the mismatch of two policies: means under the rollout policy, and the largest ratio of a response."""
    log_ratio = pair.trainer - pair.rollout
    k3 = np.exp(log_ratio) - 1 - log_ratio
    return {
        "k3_kl": float(pair.drawn @ k3.mean(axis=1)),
        "tokens_above_2": float(pair.drawn @ (log_ratio > np.log(2)).mean(axis=1)),
        "responses_above_2": float(pair.drawn @ (log_ratio.sum(axis=1) > np.log(2))),
        "largest_ratio": float(np.exp(log_ratio.sum(axis=1).max())),
    }


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Computes the median of each number over the rows."""
    return {name: float(np.median([row[name] for row in rows])) for name in rows[0]}


def study(seeds: int) -> dict[str, Any]:
    """Computes medians over the seeds: the mismatch by size, and the numbers by correction and size."""
    pairs = {size: [make_pair(seed, size) for seed in range(seeds)] for size in SIZES}
    judged = {size: [judge_all(pair) for pair in pairs[size]] for size in SIZES}
    return {
        "seeds": seeds,
        "mismatch": {f"{size:g}": medians([mismatch_of(pair) for pair in pairs[size]]) for size in SIZES},
        "corrections": {
            name: {f"{size:g}": medians([row[name] for row in judged[size]]) for size in SIZES} for name in CORRECTIONS
        },
    }


def as_markdown(result: dict[str, Any]) -> str:
    """Formats the result as two Markdown tables."""
    sizes = list(result["mismatch"])
    policies = {
        f"`{name}`": [f"{result['mismatch'][size][name]:.3g}" for size in sizes]
        for name in result["mismatch"][sizes[0]]
    }
    corrections = {name: [cell(row[size]) for size in sizes] for name, row in result["corrections"].items()}
    return "\n\n".join(
        "\n".join(
            f"| {' | '.join(row)} |"
            for row in [
                [corner, *(f"size {size}" for size in sizes)],
                ["---"] * (len(sizes) + 1),
                *([name, *cells] for name, cells in table.items()),
            ]
        )
        for corner, table in (("mismatch", policies), ("correction", corrections))
    )


def cell(numbers: dict[str, float]) -> str:
    """Formats bias, cosine and variance in one cell."""
    bias = f"{numbers['bias']:.2g}" if numbers["bias"] > 1e-12 else "0"
    return f"{bias} / {numbers['cosine']:.3f} / {numbers['variance']:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="pairs of policies at each size (100)")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    result = study(args.seeds)
    print(as_markdown(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
