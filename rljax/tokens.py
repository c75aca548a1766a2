"""One sequence of tokens from an engine's reply to the token dump: its ids, and named arrays.

Entry ``t`` of an array belongs to token ``t``, also in the prompt. The table ``COLUMNS`` lists the arrays. Code that
cuts, joins, sends, packs or writes sequences reads the table, so a new array is one line. All sequences of a batch have
an array, or none has it (``common_columns``). Fill unknown floats with NaN where a mean or a dump must leave them out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np


class Column(NamedTuple):
    """The description of an array that a sequence may have."""

    dtype: Any  # the dtype; None: the dtype of the array that is given
    fill: float  # the entry of tokens of which nothing is known
    axes: str  # the names of the axes behind the tokens
    meaning: str
    dump: str = ""  # the name of its column in token dumps; empty if they do not have it


TOPS = ("top_ids", "top_logprobs")
"""The names of the two arrays of the sampler's likeliest tokens."""

COLUMNS: dict[str, Column] = {
    "rollout_logprobs": Column(
        np.float32, 0.0, "", "the inference engine's log-probability of the token (nats)", "logprobs/rollout"
    ),
    "version": Column(np.int32, -1, "", "the policy version that sampled the token; an environment's repeats the last"),
    "turn": Column(np.int32, 0, "", "the turn, from 1, that sampled the token; 0 where an environment wrote it"),
    "top_ids": Column(np.int32, -1, "k", "the likeliest tokens, likeliest first; -1 where there are fewer", "top_ids"),
    "top_logprobs": Column(np.float32, -np.inf, "k", "the sampler's log-probabilities of them (nats)", "top_logprobs"),
    "routes": Column(None, 0, "layers k", "1 + the experts that the token goes to; 0 for any"),
    "staleness": Column(np.int32, 0, "", "the policy versions between the sampling of the token and this step"),
    "advantages": Column(np.float32, 0.0, "", "the advantage of the token, where tokens have their own"),
    "old_logprobs": Column(np.float32, 0.0, "", "under the trainer's policy before the batch's first update (nats)"),
    "reference_logprobs": Column(np.float32, 0.0, "", "under the frozen reference policy (nats)"),
    "behaviour_logprobs": Column(np.float32, 0.0, "", "under a stale token's own policy (nats); NaN if unknown"),
}


def blank(name: str, count: int, like: np.ndarray) -> np.ndarray:
    """Returns entries [count, ...] of the array ``name`` that mean "unknown", with the trailing axes of ``like``."""
    column = COLUMNS[name]
    return np.full((count, *like.shape[1:]), column.fill, column.dtype or like.dtype)


@dataclass(frozen=True, eq=False)
class TokenRecord:
    """A prompt of p tokens and the r tokens behind it, the response. They are t = p + r tokens in all.

    Without an array ``turn`` the policy sampled the whole response in one turn.
    """

    ids: np.ndarray  # the token ids, int32 [t]
    prompt_length: int  # the number of tokens of the prompt, p
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)  # arrays [t, ...] by their names in ``COLUMNS``

    def __post_init__(self) -> None:
        wrong = {name: array.shape for name, array in self.columns.items() if len(array) != len(self.ids)}
        if self.ids.ndim != 1 or wrong:
            raise ValueError(f"each array must have {len(self.ids)} entries, one for each token, got {wrong}")

    @classmethod
    def of(cls, prompt: np.ndarray, response: np.ndarray, arrays: Mapping[str, Any], **facts: Any) -> Self:
        """Returns the sequence of prompt and response, with ``arrays`` (:meth:`add`) and ``facts``, other fields."""
        return cls(np.concatenate([prompt, response], dtype=np.int32), len(prompt), **facts).add(arrays)

    @property
    def prompt(self) -> np.ndarray:
        """The token ids of the prompt, int32 [p]."""
        return self.ids[: self.prompt_length]

    @property
    def response(self) -> np.ndarray:
        """The token ids behind the prompt, int32 [r]."""
        return self.ids[self.prompt_length :]

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns the entries of the response's tokens in an array, [r, ...]."""
        return self.columns[name][self.prompt_length :]

    @property
    def turns(self) -> np.ndarray:
        """The turn of each token of the response, int32 [r], see ``COLUMNS``."""
        return self["turn"] if "turn" in self.columns else np.ones(len(self.response), np.int32)

    @property
    def sampled(self) -> np.ndarray:
        """Whether the policy sampled each token of the response, bool [r]."""
        return self.turns > 0

    def add(self, arrays: Mapping[str, np.ndarray]) -> Self:
        """Returns the sequence with further arrays, which replace those of the same names.

        An array has entries of all tokens, [t, ...], or of the response, [r, ...]. In the second case the prompt's
        tokens get the fill of the column.
        """
        whole = {}
        for name, array in arrays.items():
            array = np.asarray(array, COLUMNS[name].dtype)
            if len(array) == len(self.ids) - self.prompt_length:
                array = np.concatenate([blank(name, self.prompt_length, array), array])
            whole[name] = array
        return dataclasses.replace(self, columns={**self.columns, **whole})

    def without(self, *names: str) -> Self:
        """Returns the sequence without the arrays of these names."""
        columns = {name: array for name, array in self.columns.items() if name not in names}
        return dataclasses.replace(self, columns=columns)

    def cut(self, start: int, end: int | None = None, **facts: Any) -> Self:
        """Returns the tokens at positions ``start`` .. ``end`` - 1. ``facts`` are new values of other fields."""
        columns = {name: array[start:end] for name, array in self.columns.items()}
        ids = self.ids[start:end]
        length = min(max(self.prompt_length - start, 0), len(ids))
        return dataclasses.replace(self, ids=ids, prompt_length=length, columns=columns, **facts)


def as_stored(experts: np.ndarray) -> np.ndarray:
    """Returns the array ``routes`` [t, ...] from the experts of all tokens but the last, unsigned [t - 1, ...]."""
    return np.concatenate([experts + np.ones((), experts.dtype), np.zeros((1, *experts.shape[1:]), experts.dtype)])


T = TypeVar("T", bound=TokenRecord)


def join(pieces: Sequence[TokenRecord], prompt_length: int) -> TokenRecord:
    """Returns all pieces in order as one sequence. Where a piece lacks an array, its entries are the column's fill."""
    columns = {}
    for name in dict.fromkeys(name for piece in pieces for name in piece.columns):
        like = next(piece.columns[name] for piece in pieces if name in piece.columns)
        own = (piece.columns.get(name) for piece in pieces)
        filled = [blank(name, len(p.ids), like) if x is None else x for p, x in zip(pieces, own, strict=True)]
        columns[name] = np.concatenate(filled)
    return TokenRecord(np.concatenate([piece.ids for piece in pieces]), prompt_length, columns)


def common_columns(sequences: Sequence[TokenRecord]) -> list[str]:
    """Returns the names of the sequences' arrays. Raises ValueError if only some of the sequences have an array."""
    names = list(dict.fromkeys(name for sequence in sequences for name in sequence.columns))
    for name in names:
        if (count := sum(name in sequence.columns for sequence in sequences)) < len(sequences):
            raise ValueError(f"{name} must be given for all sequences or for none, got {count} of {len(sequences)}")
    return names
