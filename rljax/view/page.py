"""One HTML file with dumps of tokens and the curves of a run. Any browser shows it without a network."""

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

from rljax.data.tokenizer import Tokenizer
from rljax.mismatch.metrics import EXTREME_LOG_RATIO
from rljax.mismatch.regions import LARGEST_LOGPROB
from rljax.record.token_dumps import TokenDump, Tops
from rljax.view.measure import EDGES, Measured

LISTED = 2000
"""The most sequences in the list of a dump."""

_NONE = 2**32 - 1  # the id that stands for an absent token
_COLUMNS = ("share", "sum", "mean", "largest", "tokens", "position")
_HIDDEN = {"entropy", "in_loss"}  # values that the page shows in another form


@dataclass
class Page:
    """The parts of a page, to which dumps are added one by one."""

    title: str
    tokenizer: Tokenizer | None = None  # None: the page shows token ids
    facts: list[str] = field(default_factory=list)  # sentences under the title
    curves: str = ""  # the figure of a run as SVG
    dumps: list[dict[str, Any]] = field(default_factory=list)  # the JSON data of each dump
    _ids: list[np.ndarray] = field(default_factory=list)  # the token ids whose texts the page needs

    def add(self, name: str, dump: TokenDump, measured: Measured, *, tokens: int, alternatives: int) -> None:
        """Adds a dump, which the page calls ``name``, and the result of ``measure``.

        At most ``tokens`` tokens are shown one by one. Whole sequences are shown, the largest contribution first. The
        first sequence is always shown. Each token has ``alternatives`` likeliest tokens.
        """
        lengths = np.asarray([len(dump.token_ids[row]) for row in measured.order])
        shown = max(int((np.cumsum(lengths) <= tokens).sum()), min(len(lengths), 1))
        rows, listed = measured.order[:shown], measured.order[:LISTED]
        facts = [*measured.notes]
        if shown < len(lengths):
            facts.append(
                f"The {shown} sequences that contribute most are here token by token, {lengths[:shown].sum():,} of "
                f"{lengths.sum():,} tokens. Numbers and light bars are of all {len(lengths)} sequences."
            )
        if len(listed) < len(lengths):
            facts.append(f"The list has the first {len(listed)} of {len(lengths)} sequences.")
        self._ids += [np.unique(dump.token_ids[row]) for row in rows]
        self.dumps.append(
            {
                "name": name,
                "facts": facts,
                "isPair": bool(measured.trainer),
                "columns": {place: _source(dump, getattr(measured, place)) for place in ("trainer", "rollout")},
                "sampling": json.dumps(dict(dump.sampling), default=str),
                "metrics": [[key, _short(value)] for key, value in measured.metrics.items()],
                "edges": {key: edges.tolist() for key, edges in EDGES.items()},
                "counts": {key: counts.tolist() for key, counts in measured.histograms.items()},
                "growth": {key: [_short(value) for value in sums] for key, sums in measured.growth.items()},
                "entropyOf": measured.entropy_of,
                "names": [dump.sequence_ids[row] for row in listed],
                "sequences": {key: [_short(measured.sequences[key][row]) for row in listed] for key in _COLUMNS},
                "lengths": lengths[:shown].tolist(),
                "tokens": self._tokens(dump, measured, rows, alternatives),
            }
        )

    def _tokens(self, dump: TokenDump, measured: Measured, rows: np.ndarray, alternatives: int) -> dict[str, Any]:
        """Returns the packed arrays of the shown tokens, one sequence after the other."""

        def joined(vectors: Sequence[np.ndarray], dtype: str) -> dict[str, str]:
            return packed(np.concatenate([np.asarray(vectors[row], dtype) for row in rows] or [np.zeros(0, dtype)]))

        values = {name: joined(each, "<f4") for name, each in sorted(dump.values.items()) if name not in _HIDDEN}
        if measured.entropy:
            values["entropy"] = joined(measured.entropy, "<f4")
        if measured.weights:
            values["weight"] = joined(measured.weights, "<f4")
        if measured.turns:
            values["turn"] = joined([_after_prompt(turns) for turns in measured.turns], "<f4")
            values["after"] = joined([np.where(after > 0, after, np.nan) for after in measured.after], "<f4")
        found: dict[str, Any] = {
            "ids": joined(dump.token_ids, "<u4"),
            "mask": joined(dump.response_mask, "<u1"),
            "rollout": joined(dump.logprobs[measured.rollout], "<f4"),
            "values": values,
        }
        if measured.trainer:
            found["trainer"] = joined(dump.logprobs[measured.trainer], "<f4")
        ids, logprobs = dump.of_kind("top_ids"), dump.of_kind("top_logprobs")
        own = {"trainer": measured.trainer, "rollout": measured.rollout}
        named = [("rollout", ""), *(pair for pair in own.items() if pair[1])]
        sides: dict[str, Tops] = {side: (ids[name], logprobs[name]) for side, name in named if name in ids}
        found["tops"] = {
            side: self._tops(rows, dump, tops, alternatives)
            for side, tops in sides.items()
            if len(rows) and alternatives
        }
        return found

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
    """Returns the dtype of an array, and its bytes compressed by gzip as base64 text. The array is little-endian."""
    content = gzip.compress(array.tobytes(), compresslevel=6, mtime=0)
    return {"dtype": array.dtype.str[1:], "bytes": base64.b64encode(content).decode()}


def _file(name: str) -> str:
    return resources.files("rljax.view").joinpath(name).read_text(encoding="utf-8")


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if np.isfinite(value) else None


def _source(dump: TokenDump, name: str) -> dict[str, str]:
    if not name:
        return {"name": ""}
    source = dump.sources[name]
    about = [source.engine, source.dtype, source.weights_hash[:40], dump.role(name)]
    if source.temperature is not None:
        about.append(f"temperature {source.temperature:g}")
    return {"name": name, "about": ", ".join(word for word in about if word)}


def _after_prompt(turns: np.ndarray) -> np.ndarray:
    """Returns turns with NaN before the first sampled token, float64 [t], so that 0 marks only the environment."""
    return np.where(np.cumsum(turns) > 0, turns, np.nan)


def _ranks(token_ids: np.ndarray, tops: np.ndarray) -> np.ndarray:
    """Returns the rank of each token among the k likeliest, from 1.

    It is k + 1 if the token is none of them, and 0 if no likeliest token is known.
    """
    hits = tops == token_ids[:, None]
    ranks = np.where(hits.any(axis=1), hits.argmax(axis=1) + 1, tops.shape[1] + 1)
    return np.where((tops >= 0).any(axis=1), ranks, 0)
