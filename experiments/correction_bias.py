"""Computes the bias and the variance of each correction exactly on a tabular policy.

    python experiments/correction_bias.py              # the tables of docs/theory.md and docs/algorithms.md
    python experiments/correction_bias.py --json benchmarks/correction_bias.json

The vocabulary has 3 tokens and a response 3 tokens, so there are 27 responses and 39 logits. The trainer's logits are
normal with deviation 1. The rollout policy's logits differ from them by normal noise of deviation ``size``. Rewards are
0 or 1, and the baseline is their mean under the rollout policy.

The remedies that look at a whole distribution have their own table, with 5 tokens, 125 responses and 155 logits. Here
the sampler is biased: its logits are the trainer's times a factor, in addition to the noise. The computation takes
about half a minute on one core.
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
from rljax.mismatch.centering import center
from rljax.mismatch.correction import ratio_weight
from rljax.mismatch.regions import Region, region_factor, tops_distance

VOCABULARY, LENGTH = 3, 3
SIZES = (0.03, 0.1, 0.3, 1.0)
NUMBERS = ("bias", "cosine", "variance")
WIDE_VOCABULARY = 5
SAMPLERS = {"small": (0.1, 0.97), "large": (0.5, 0.8)}
"""The noise of the wide sampler's logits and their factor, by name."""
Weigh = Callable[["Pair"], np.ndarray]


class Pair(NamedTuple):
    """A trainer policy, a rollout policy and rewards over all n responses."""

    trainer: np.ndarray  # shape=(n, t), nats
    rollout: np.ndarray  # shape=(n, t), nats
    mask: np.ndarray  # shape=(n, t), bool
    scores: np.ndarray  # shape=(n, t, p): d trainer / d logits
    advantages: np.ndarray  # shape=(n,)
    trainer_tables: np.ndarray  # shape=(n, t, v), nats: all tokens that are possible at each position
    rollout_tables: np.ndarray  # shape=(n, t, v), nats
    table_scores: np.ndarray  # shape=(n, t, v, p): d trainer_tables / d logits

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


def make_pair(seed: int, size: float, vocabulary: int = VOCABULARY, factor: float = 1.0) -> Pair:
    """Makes a pair of policies; the seed alone decides the trainer, the rewards and the direction of the noise."""
    rng = np.random.default_rng(seed)
    prefixes = [p for t in range(LENGTH) for p in itertools.product(range(vocabulary), repeat=t)]
    shape = (len(prefixes), vocabulary)
    logits = rng.standard_normal(shape)
    both = logits, factor * logits + size * rng.standard_normal(shape)
    tables = [table - np.log(np.exp(table).sum(axis=1, keepdims=True)) for table in both]
    responses = list(itertools.product(range(vocabulary), repeat=LENGTH))
    rows = np.array([[prefixes.index(y[:t]) for t in range(LENGTH)] for y in responses])
    tokens = np.array(responses)
    trainer, rollout = (table[rows, tokens] for table in tables)
    table_scores = np.zeros((*tokens.shape, vocabulary, *shape))
    for n, t in np.ndindex(tokens.shape):
        table_scores[n, t, :, rows[n, t]] = np.eye(vocabulary) - np.exp(tables[0][rows[n, t]])
    table_scores = table_scores.reshape(*tokens.shape, vocabulary, -1)
    scores = np.take_along_axis(table_scores, tokens[..., None, None], axis=2)[:, :, 0]
    rewards = rng.permutation(np.arange(len(responses)) % 3 == 0).astype(float)
    mask = np.ones(tokens.shape, bool)
    baseline = np.exp(rollout.sum(axis=1)) @ rewards
    wide = tables[0][rows], tables[1][rows], table_scores
    return Pair(trainer, rollout, mask, scores, rewards - baseline, *wide)


def plain(pair: Pair) -> np.ndarray:
    """Returns the weights of equation 3, which are all 1."""
    return pair.mask.astype(float)


def weighted(pair: Pair, **settings: Any) -> np.ndarray:
    """Returns the weights of ``importance_weights``; equation 4 has level "sequence" and an infinite threshold."""
    return importance_weights(pair.trainer, pair.rollout, pair.mask, **settings)[0]


def normalized(pair: Pair, **settings: Any) -> np.ndarray:
    """Returns the weights over their mean under the rollout policy.

    This is the limit of ``normalize`` in large batches.
    """
    weights = weighted(pair, **settings)
    return weights / (pair.drawn @ weights.mean(axis=1))


def kept(pair: Pair, weigh: Weigh = plain, **settings: Any) -> np.ndarray:
    """Returns the weights of rejection in large batches.

    A weight is 0 if rejected, and otherwise divided by the share that is kept.
    """
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


class Remedy(NamedTuple):
    """A correction of single tokens, as ``CorrectionConfig`` describes it."""

    mode: Any = None  # the mode of the importance weight, or None
    threshold: Any = np.inf  # the threshold of the importance weight
    region: Region | None = None  # the trust region
    tops: int = 0  # the number of likeliest tokens for score centering, or 0


def with_remedy(pair: Pair, remedy: Remedy, advantages: np.ndarray) -> np.ndarray:
    """Returns the estimate of the gradient from each response alone, [n, p]."""
    region, each = remedy.region, advantages[:, None]

    def weigh_ratio(log_ratio: Any) -> Any:
        return np.ones_like(log_ratio) if remedy.mode is None else _weight(log_ratio, remedy)

    distance = None
    if region is not None and region.over_tops:
        lists = pair.trainer_tables, pair.rollout_tables
        every = np.ones(lists[0].shape, bool)
        distance = tops_distance(np, region.kind, *lists, every, has_tail=False)

    def weigh(trainer: Any, rollout: Any, advantages: Any, distance: Any) -> Any:
        weights = weigh_ratio(trainer - rollout)
        return (
            weights
            if region is None
            else weights * region_factor(np, region, trainer, rollout, advantages, distance)[0]
        )

    estimates = np.einsum("nt,n,ntp->np", weigh(pair.trainer, pair.rollout, each, distance), advantages, pair.scores)
    if remedy.tops:
        likeliest = np.argsort(-pair.rollout_tables, axis=-1)[..., : remedy.tops]
        lists = [np.take_along_axis(table, likeliest, -1) for table in (pair.trainer_tables, pair.rollout_tables)]
        wider = None if distance is None else distance[..., None]
        found = center(
            np,
            *lists,
            np.ones(likeliest.shape, bool),
            lambda trainer, rollout: weigh(trainer, rollout, each[..., None], wider),
            weigh_ratio,
            has_tail=remedy.tops < pair.rollout_tables.shape[-1],
        )
        scores = np.take_along_axis(pair.table_scores, likeliest[..., None], axis=2)
        estimates -= np.einsum("n,ntk,ntkp->np", advantages, found.coefficients, scores)
    return estimates


def _weight(log_ratio: Any, remedy: Remedy) -> Any:
    return ratio_weight(np, log_ratio, remedy.mode, remedy.threshold)[0]


_DPPO = Remedy("truncate", 20.0)
REMEDIES: dict[str, Remedy] = {
    "no correction": Remedy(),
    "`score_centering`, whole vocabulary": Remedy(tops=WIDE_VOCABULARY),
    "`score_centering`, k = 2": Remedy(tops=2),
    "`token_tis`": Remedy("truncate", 2.0),
    "`token_tis` with `score_centering`, k = 2": Remedy("truncate", 2.0, tops=2),
    "`token_mis`": Remedy("mask", 2.0),
    "`token_mis` with `score_centering`, k = 2": Remedy("mask", 2.0, tops=2),
    "`icepop`": Remedy("band", (0.5, 5.0)),
    "`icepop_wide`": Remedy("band", (0.2, 5.0)),
    "`icepop_narrow`": Remedy("band", (0.5, 2.0)),
    "`icepop_narrow` with `score_centering`, k = 2": Remedy("band", (0.5, 2.0), tops=2),
    "`one_sided_tv`": _DPPO._replace(region=Region("tv", 0.15, one_sided=True)),
    "`one_sided_kl`": _DPPO._replace(region=Region("kl", 0.05, one_sided=True)),
    "`one_sided_tops_tv`": _DPPO._replace(region=Region("tv", 0.15, one_sided=True, over_tops=True)),
    "`one_sided_tops_kl`": _DPPO._replace(region=Region("kl", 0.05, one_sided=True, over_tops=True)),
    "`two_sided_tv`": Remedy("truncate", 1e4, Region("tv", 0.3)),
    "`two_sided_tv` at 0.1": Remedy("truncate", 1e4, Region("tv", 0.1)),
    "`two_sided_tv` at 0.1 with `score_centering`, k = 2": Remedy("truncate", 1e4, Region("tv", 0.1), tops=2),
    "`two_sided_kl`": Remedy("truncate", np.inf, Region("kpop", 0.1)),
    "`smooth_tv`": Remedy("truncate", np.inf, Region("smooth", 12.5)),
    "`smooth_tv` at 0.2": Remedy("truncate", np.inf, Region("smooth", 0.2)),
}
MASKS: dict[str, Weigh] = {
    "`max_k3`": partial(kept, statistic="max_k3", threshold=0.05),
    "`abs_ratio`": partial(kept, statistic="abs_ratio", threshold=2.0),
}


def judge_remedies(pair: Pair) -> dict[str, dict[str, float]]:
    """Judges every remedy on a pair; ``drift`` is |E g| / |gradient| if all advantages are one deviation."""
    deviation = np.full(pair.advantages.shape, np.sqrt(pair.drawn @ pair.advantages**2))
    judged = {}
    for name in (*REMEDIES, *MASKS):
        if name in MASKS:
            weights = MASKS[name](pair)
            estimates, constant = (pair._replace(advantages=a).estimates(weights) for a in (pair.advantages, deviation))
        else:
            estimates, constant = (with_remedy(pair, REMEDIES[name], a) for a in (pair.advantages, deviation))
        drift = np.linalg.norm(pair.drawn @ constant) / np.linalg.norm(pair.gradient)
        judged[name] = {"drift": float(drift), **judge(pair.gradient, estimates, pair.drawn)}
    return judged


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
    """Computes medians over the seeds: the numbers of ``study_corrections``, and numbers by remedy and sampler."""
    wide = {
        name: [judge_remedies(make_pair(seed, size, WIDE_VOCABULARY, factor)) for seed in range(seeds)]
        for name, (size, factor) in SAMPLERS.items()
    }
    remedies = {
        name: {sampler: medians([row[name] for row in rows]) for sampler, rows in wide.items()}
        for name in (*REMEDIES, *MASKS)
    }
    return {"seeds": seeds, **study_corrections(seeds), "remedies": remedies}


def study_corrections(seeds: int) -> dict[str, Any]:
    """Computes medians over the seeds: the mismatch by size, and the numbers by correction and size."""
    pairs = {size: [make_pair(seed, size) for seed in range(seeds)] for size in SIZES}
    judged = {size: [judge_all(pair) for pair in pairs[size]] for size in SIZES}
    return {
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
    remedies = {name: [drift_cell(row[sampler]) for sampler in SAMPLERS] for name, row in result["remedies"].items()}
    columns, samplers = [f"size {size}" for size in sizes], [f"{name} mismatch" for name in SAMPLERS]
    tables = (("mismatch", columns, policies), ("correction", columns, corrections), ("remedy", samplers, remedies))
    return "\n\n".join(
        "\n".join(
            f"| {' | '.join(row)} |"
            for row in [
                [corner, *names],
                ["---"] * (len(names) + 1),
                *([name, *cells] for name, cells in table.items()),
            ]
        )
        for corner, names, table in tables
    )


def cell(numbers: dict[str, float]) -> str:
    """Formats bias, cosine and variance in one cell."""
    bias = f"{numbers['bias']:.2g}" if numbers["bias"] > 1e-12 else "0"
    return f"{bias}/{numbers['cosine']:.3f}/{numbers['variance']:.1f}"


def drift_cell(numbers: dict[str, float]) -> str:
    """Formats drift, bias and variance in one cell."""
    drift, bias = (f"{numbers[name]:.2g}" if numbers[name] > 1e-12 else "0" for name in ("drift", "bias"))
    return f"{drift} / {bias} / {numbers['variance']:.1f}"


def main() -> None:
    """Prints the tables, and writes the numbers if a file is named."""
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
