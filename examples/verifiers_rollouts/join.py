"""The join of the servers' answers to the branches that ``verifiers`` kept of a trajectory.

The library rounds log-probabilities and drops versions, likeliest tokens and routes. So the program keeps the servers'
answers. A branch only says which answers the trajectory is made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Branch(NamedTuple):
    """One path from the first message of a trajectory to a last one, as the library kept it."""

    token_ids: np.ndarray  # the tokens, int32 [t]
    sampled: np.ndarray  # whether each token was sampled, bool [t]


class Answered(NamedTuple):
    """A turn that a server sampled."""

    tokens: np.ndarray  # the tokens that the turn continued, int32 [s]
    token_ids: np.ndarray  # the tokens of the turn, int32 [t]
    columns: Mapping[str, Sequence[Any]]  # columns with an entry for each token of the turn, such as ``logprobs``
    truncated: bool = False  # whether the length limit ended the turn
    routes: Sequence[Any] = ()  # the experts of all tokens up to the end of the turn but the last, if they are known

    @property
    def start(self) -> int:
        """The position of the first token of the turn."""
        return len(self.tokens)

    @property
    def end(self) -> int:
        """The position behind the last token of the turn."""
        return len(self.tokens) + len(self.token_ids)

    def is_in(self, branch: Branch) -> bool:
        """Returns whether the branch holds this turn: the tokens before it, and its own tokens as sampled ones."""
        ids, sampled = branch
        return (
            self.end <= len(ids)
            and bool(sampled[self.start : self.end].all())
            and np.array_equal(ids[: self.start], self.tokens)
            and np.array_equal(ids[self.start : self.end], self.token_ids)
        )


class UnmatchedBranchError(Exception):
    """A branch has sampled tokens that are in no answer of a server."""


def rows_of(answered: Sequence[Answered], branches: Sequence[Branch]) -> list[dict[str, Any]]:
    """Returns a row for each branch that the library kept and that has a turn of its own, in order.

    A turn that several branches share belongs to the first of them, where it is trained. In the other branches it is
    part of the prompt. ``answered`` are the turns that the servers answered, in order. An answer that the library did
    not keep is in no row, such as the first answer to a turn that was asked for twice. The numbers of the turns count
    over all rows.

    Raises:
      UnmatchedBranchError: A branch has a sampled token that is in no answer.
    """
    rows: list[dict[str, Any]] = []
    used: set[int] = set()
    for branch in branches:
        # The last of several equal answers is the one that the library kept.
        turns = {one.start: i for i, one in enumerate(answered) if one.is_in(branch)}
        told = np.zeros(len(branch.token_ids), bool)
        for start, i in turns.items():
            told[start : answered[i].end] = True
        if not np.array_equal(told, branch.sampled):
            raise UnmatchedBranchError(
                f"verifiers took {int(branch.sampled.sum())} tokens of a branch as sampled, but the servers answered "
                f"{int((told & branch.sampled).sum())} of them"
            )
        own = [turns[start] for start in sorted(turns) if turns[start] not in used]
        used.update(own)
        if own:
            rows.append(row_of(answered, own, branch.token_ids, len(used) - len(own)))
    return rows


def row_of(answered: Sequence[Answered], turns: Sequence[int], token_ids: np.ndarray, before: int) -> dict[str, Any]:
    """Returns the columns of a row of ``token_ids`` in which the answers with the indices ``turns`` were sampled.

    ``before`` is the number of turns in the rows before this one.
    """
    first, last = answered[turns[0]], answered[turns[-1]]
    count = last.end - first.start
    row = {"prompt_ids": token_ids[: first.start].tolist(), "token_ids": token_ids[first.start : last.end].tolist()}
    row |= {"turns": [0] * count, **{name: [None] * count for name in first.columns}}
    routes: list[Any] = []
    for number, i in enumerate(turns, before + 1):
        one = answered[i]
        here = slice(one.start - first.start, one.end - first.start)
        row["turns"][here] = [number] * len(one.token_ids)
        for name, values in one.columns.items():
            row[name][here] = values
        routes += one.routes[len(routes) :]
    return row | ({"routes": routes} if routes else {})
