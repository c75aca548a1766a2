"""One HTML file with dumps of tokens and the curves of a run. Any browser shows it without a network.

For each dump it has the sequences, those that contribute most to the mismatch first, charts, and the tokens.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.data.tokenizer import Tokenizer
from rljax.mismatch import Statistics, merge, read_tokens
from rljax.mismatch.correction import correct_tokens, finalize_correction
from rljax.mismatch.diagnosis import after_environment
from rljax.mismatch.metrics import EXTREME_LOG_RATIO
from rljax.mismatch.regions import LARGEST_LOGPROB, region_factor
from rljax.record.dump_facts import TokenPair, turns_of
from rljax.record.token_arrays import to_rows
from rljax.record.token_dumps import ABOVE_ZERO, TokenDump, Tops

LISTED = 2000
"""The most sequences in the list of a dump."""

_NONE = 2**32 - 1  # the id that stands for an absent token
_COLUMNS = ("share", "sum", "mean", "largest", "tokens")
_HIDDEN = {"entropy", "in_loss"}  # values that the page shows in another form

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
    """The numbers of the n sequences of a dump."""

    pair: TokenPair  # the two columns, at the response tokens
    sequences: dict[str, np.ndarray]  # the numbers of the sequences, [n] each, by name, such as share and largest
    order: np.ndarray  # the indices of the sequences with a response token, the largest contribution first, int64
    metrics: dict[str, float]  # the metrics of the whole dump, by name
    histograms: dict[str, np.ndarray]  # the number of tokens in each bucket, int64, by the names of ``EDGES``
    growth: dict[str, np.ndarray]  # the sum of abs(log-ratio) in each bucket, float64, by the names of ``GROWING``
    # Further numbers of the tokens by name, [t] each, NaN if unknown: entropy (nats), turn, after (the distance from
    # the environment's last token) and weight (of the correction).
    values: dict[str, list[np.ndarray]]
    notes: list[str]  # sentences on numbers that are left out or not known


def measure(dump: TokenDump, columns: tuple[str, str], correction: CorrectionConfig | None = None) -> Measured:
    """Measures every sequence of a dump.

    ``columns`` are the trainer's and the rollout engine's column, from ``choose_pair``. ``correction`` is the
    correction of the run that wrote the dump. Without it the weights are unknown. The contribution of a sequence is its
    share of the sum of k3 = exp(lr) - 1 - lr over all tokens (Schulman, "Approximating KL Divergence", 2020). Here lr
    is the log-ratio.

    Raises:
      ValueError: The dump has no sequence.
    """
    if not len(dump.sequence_ids):
        raise ValueError("there is no sequence in the dump")
    pair = TokenPair(dump, *columns)
    metrics = {name: pair.metrics[name] for name in METRICS}
    entropy, turns = list(dump.values.get("entropy", ())), turns_of(dump)
    after = [after_environment(each) for each in turns]
    position = pair.places(np.ones(len(pair.lr), bool))
    charted = {"value": pair.lr, "position": position}
    charted |= {k: pair.of_tokens(v) for k, v in {"entropy": entropy, "turn": turns, "after": after}.items() if v}
    histograms = {name: _histogram(pair, name, charted) for name in EDGES}
    growth = {name: _histogram(pair, name, charted, np.abs(pair.lr)) for name in GROWING}
    sequences, order = _of_sequences(pair)
    weights, unknown = _weigh(pair, correction)
    values = {
        "entropy": entropy,
        "weight": weights,
        # NaN before the first sampled token, so that 0 marks only the environment
        "turn": [np.where(np.cumsum(each) > 0, each, np.nan) for each in turns],
        "after": [np.where(each > 0, each, np.nan) for each in after],
    }
    values, notes = {name: each for name, each in values.items() if each}, [*_notes(pair, sequences), *unknown]
    return Measured(pair, sequences, order, metrics, histograms, growth, values, notes)


def _histogram(
    pair: TokenPair, name: str, of_tokens: dict[str, np.ndarray], weights: np.ndarray | None = None
) -> np.ndarray:
    """Returns the number of tokens, or the sum of their weights, in each bucket of a chart."""
    values = of_tokens.get(name, np.full(len(pair.lr), np.nan))
    known = pair.valid & (np.isfinite(values) if name in ("value", "entropy") else values > 0)
    index = np.searchsorted(EDGES[name], values[known], side="right")
    return np.bincount(index, None if weights is None else weights[known], len(EDGES[name]) + 1)


def _of_sequences(pair: TokenPair) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the numbers of the sequences by name, and the order of the sequences with a response token."""
    count, size = len(pair.dump.sequence_ids), np.abs(pair.lr)
    names = {"sum": pair.lr, "size": size, "k3": pair.k3, "tokens": pair.valid, "nonfinite": ~pair.valid}
    of: dict[str, np.ndarray] = {name: np.bincount(pair.sequence, weights, count) for name, weights in names.items()}
    of["largest"] = np.zeros(count)
    np.maximum.at(of["largest"], pair.sequence, size)
    of["share"] = of["k3"] / (of["k3"].sum() or 1.0)
    of["mean"] = of["size"] / np.maximum(of["tokens"], 1)
    order = np.lexsort((-of["size"], -of["k3"]))
    return of, order[np.isin(order, pair.sequence)]


def _notes(pair: TokenPair, of: dict[str, np.ndarray]) -> list[str]:
    """Returns a sentence on each kind of number that is left out or doubtful."""
    notes, dump, count = [], pair.dump, len(pair.dump.sequence_ids)
    if bare := count - len(np.unique(pair.sequence)):
        notes.append(f"{bare} of {count} sequences have no response token and are left out.")
    if lost := int(of["nonfinite"].sum()):
        lack = f"{lost} response tokens have no finite log-probability on one side"
        notes.append(f"{lack}. They are left out of every number.")
    if above := int((pair.x > ABOVE_ZERO).sum() + (pair.y > ABOVE_ZERO).sum()):
        notes.append(f"{above} log-probabilities of response tokens are above 0, which no true one is.")
    if dump.role(pair.trainer) == dump.role(pair.rollout):
        notes.append("The dump does not tell the roles of the columns: the sign of the log-ratio may be turned.")
    return notes


def _weigh(pair: TokenPair, correction: CorrectionConfig | None) -> tuple[list[np.ndarray], list[str]]:
    """Returns the weights of a correction at each token, float32 [t] for each sequence, and notes on them.

    The weights are [] if they are unknown. They are divided by their mean if the correction normalizes them.
    """
    if correction is None:
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
            mask = mask & (to_rows([values["in_loss"][row] for row in rows], 0.0) != 0)
        tokens = read_tokens(trainer, rollout, mask)
        weights, kept, statistics = correct_tokens(tokens, config.weighting, config.rejections)
        weights = np.where(kept, weights, 0.0)
        if region is not None:
            advantages = to_rows([values["advantage"][row] for row in rows], 0.0)
            weights = weights * region_factor(np, region, tokens.trainer, tokens.rollout, advantages)[0]
        total = statistics if total is None else merge(total, statistics)
        for row, line in zip(rows, weights, strict=True):
            found[row] = line[: len(pair.dump.token_ids[row])].astype(np.float32)
    mean = finalize_correction(total)["weight_mean"] if config.normalize and total is not None else 0.0
    return [weights / np.float32(mean) for weights in found] if mean > 0 else found, notes


@dataclass
class Page:
    """The parts of a page, to which dumps are added one by one."""

    title: str  # the heading of the page
    tokenizer: Tokenizer | None = None  # None: the page shows token ids
    facts: list[str] = field(default_factory=list)  # sentences under the title
    curves: str = ""  # the figure of a run as SVG
    dumps: list[dict[str, Any]] = field(default_factory=list)  # the JSON data of each dump
    _ids: list[np.ndarray] = field(default_factory=list)  # the token ids whose texts the page needs

    def add(self, name: str, measured: Measured, *, tokens: int, alternatives: int) -> None:
        """Adds a measured dump, which the page calls ``name``.

        At most ``tokens`` tokens are shown one by one. Whole sequences are shown, the largest contribution first. The
        first sequence is always shown. At each token up to ``alternatives`` likeliest tokens are shown.
        """
        dump, pair = measured.pair.dump, measured.pair
        lengths = np.asarray([len(dump.token_ids[row]) for row in measured.order])
        shown = max(int((np.cumsum(lengths[:LISTED]) <= tokens).sum()), min(len(lengths), 1))
        rows, listed = measured.order[:shown], measured.order[:LISTED]
        facts = [*measured.notes]
        if shown < len(lengths):
            part = f"{lengths[:shown].sum():,} of {lengths.sum():,} tokens"
            facts.append(f"The {shown} sequences that contribute most are here token by token, {part}.")
            facts[-1] += f" Numbers and light bars are of all {len(lengths)} sequences."
        if len(listed) < len(lengths):
            facts.append(f"The list has the first {len(listed)} of {len(lengths)} sequences.")
        self._ids += [np.unique(dump.token_ids[row]) for row in rows]
        self.dumps.append(
            {
                "name": name,
                "facts": facts,
                "columns": {"trainer": _source(dump, pair.trainer), "rollout": _source(dump, pair.rollout)},
                "sampling": json.dumps(dict(dump.sampling), default=str),
                "metrics": [[key, _short(value)] for key, value in measured.metrics.items()],
                "edges": {key: edges.tolist() for key, edges in EDGES.items()},
                "counts": {key: counts.tolist() for key, counts in measured.histograms.items()},
                "growth": {key: [_short(value) for value in sums] for key, sums in measured.growth.items()},
                "names": [dump.sequence_ids[row] for row in listed],
                "sequences": {key: [_short(measured.sequences[key][row]) for row in listed] for key in _COLUMNS},
                "lengths": lengths[:shown].tolist(),
                "tokens": self._tokens(measured, rows, alternatives),
            }
        )

    def _tokens(self, measured: Measured, rows: np.ndarray, alternatives: int) -> dict[str, Any]:
        """Returns the packed arrays of the shown tokens, one sequence after the other."""
        dump, names = measured.pair.dump, {"trainer": measured.pair.trainer, "rollout": measured.pair.rollout}

        def joined(vectors: Sequence[np.ndarray], dtype: str = "<f4") -> dict[str, str]:
            return packed(np.concatenate([np.asarray(vectors[row], dtype) for row in rows] or [np.zeros(0, dtype)]))

        own = {name: each for name, each in sorted(dump.values.items()) if name not in _HIDDEN}
        ids, logprobs = dump.of_kind("top_ids"), dump.of_kind("top_logprobs")
        listed = (("rollout", ""), *names.items()) if len(rows) and alternatives else ()
        tops = {side: (ids[name], logprobs[name]) for side, name in listed if name in ids}
        return {
            "ids": joined(dump.token_ids, "<u4"),
            "mask": joined(dump.response_mask, "<u1"),
            **{side: joined(dump.logprobs[name]) for side, name in names.items()},
            "values": {name: joined(each) for name, each in (own | measured.values).items()},
            "tops": {side: self._tops(rows, dump, each, alternatives) for side, each in tops.items()},
        }

    def _tops(self, rows: np.ndarray, dump: TokenDump, tops: Tops, alternatives: int) -> dict[str, Any]:
        """Returns the likeliest tokens of one side at the shown tokens, and the rank of each token among them."""
        ids = np.concatenate([tops[0][row][:, :alternatives] for row in rows])
        logprobs = np.concatenate([tops[1][row][:, :alternatives] for row in rows])
        ranks = np.concatenate([_ranks(dump.token_ids[row], tops[0][row]) for row in rows])
        self._ids.append(np.unique(ids[ids >= 0]))
        return {
            "k": ids.shape[1],
            "of": tops[0][0].shape[1],
            "rank": packed(ranks.astype("<u2")),
            "ids": packed(np.where(ids < 0, _NONE, ids).astype("<u4")),
            "logprobs": packed(logprobs.astype("<f4")),
        }

    def text(self) -> str:
        """Returns the text of the HTML file."""
        ids = np.unique(np.concatenate([np.zeros(0, np.int32), *self._ids])).tolist()
        texts = [] if self.tokenizer is None else self.tokenizer.pieces(ids)
        data = {"dumps": self.dumps, "ids": ids, "texts": texts, "extreme": EXTREME_LOG_RATIO}
        data["largest"] = LARGEST_LOGPROB  # numbers beyond it count as not finite, as in every metric
        summary = "<summary>Curves of the run</summary>"
        parts = {
            "title": html.escape(self.title),
            "facts": "".join(f"<p>{html.escape(fact)}</p>" for fact in self.facts),
            "curves": f'<details id="curves" open>{summary}{self.curves}</details>' if self.curves else "",
            "style": _file("page.css"),
            "script": _file("page.js"),
            # A "<" in the data could end the script element, or begin a comment.
            "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        }
        before, *pieces = _file("page.html").split("{{")
        names = (piece.partition("}}") for piece in pieces)
        return before + "".join(parts[name] + after for name, _, after in names)


def packed(array: np.ndarray) -> dict[str, str]:
    """Returns an array as its dtype and its bytes, in gzip and base64. The array must be little-endian."""
    content = gzip.compress(array.tobytes(), compresslevel=6, mtime=0)
    return {"dtype": array.dtype.str[1:], "bytes": base64.b64encode(content).decode()}


def _file(name: str) -> str:
    return resources.files("rljax.view").joinpath(name).read_text(encoding="utf-8")


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if np.isfinite(value) else None


def _source(dump: TokenDump, name: str) -> dict[str, str]:
    source = dump.sources[name]
    about = [source.engine, source.dtype, source.weights_hash[:40], dump.role(name)]
    if source.temperature is not None:
        about.append(f"temperature {source.temperature:g}")
    return {"name": name, "about": ", ".join(word for word in about if word)}


def _ranks(token_ids: np.ndarray, tops: np.ndarray) -> np.ndarray:
    """Returns the rank of each token among the k likeliest, from 1.

    The rank is k + 1 if the token is not among them, and 0 if no likeliest token is known.
    """
    hits = tops == token_ids[:, None]
    ranks = np.where(hits.any(axis=1), hits.argmax(axis=1) + 1, tops.shape[1] + 1)
    return np.where((tops >= 0).any(axis=1), ranks, 0)
