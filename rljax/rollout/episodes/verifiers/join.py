"""The join of an engine's answers to the branches that ``verifiers`` kept of a trajectory.

The library rounds log-probabilities and drops versions, likeliest tokens and routes. So the trainer keeps the engine's
answers. A branch only says which answers the trajectory is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rljax.rollout.episodes.recorder import Recorder
from rljax.rollout.types import Response


class Branch(NamedTuple):
    """One path from the first message of a trajectory to a last one, as the library kept it."""

    token_ids: np.ndarray  # the tokens, int32 [t]
    sampled: np.ndarray  # whether each token was sampled, bool [t]


class Answered(NamedTuple):
    """A turn that the engine answered."""

    tokens: np.ndarray  # the tokens that the turn continued, int32 [s]
    response: Response  # the tokens of the turn

    @property
    def start(self) -> int:
        """The position of the first token of the turn."""
        return len(self.tokens)

    @property
    def end(self) -> int:
        """The position behind the last token of the turn."""
        return len(self.tokens) + len(self.response.response)

    def is_in(self, branch: Branch) -> bool:
        """Returns whether the branch holds this turn: the tokens before it, and its own tokens as sampled ones."""
        ids, sampled = branch
        return (
            self.end <= len(ids)
            and bool(sampled[self.start : self.end].all())
            and np.array_equal(ids[: self.start], self.tokens)
            and np.array_equal(ids[self.start : self.end], self.response.response)
        )


class UnmatchedBranchError(Exception):
    """A branch has sampled tokens that are in no answer of the engine."""


def rows_of(answered: Sequence[Answered], branches: Sequence[Branch]) -> list[Recorder]:
    """Returns a row for each branch that the library kept and that has a turn of its own, in order.

    A turn that several branches share belongs to the first of them, where it is trained. In the other branches it is
    part of the prompt. ``answered`` are the turns that the engine answered, in order. An answer that the library did
    not keep is in no row, such as the first answer to a turn that was asked for twice. The numbers of the turns count
    over all rows.

    Raises:
      UnmatchedBranchError: A branch has a sampled token that is in no answer.
    """
    rows: list[Recorder] = []
    used: set[int] = set()
    for branch in branches:
        # The last of several equal answers is the one that the library kept.
        turns = {one.start: i for i, one in enumerate(answered) if one.is_in(branch)}
        told = np.zeros(len(branch.token_ids), bool)
        for start, i in turns.items():
            told[start : answered[i].end] = True
        if not np.array_equal(told, branch.sampled):
            raise UnmatchedBranchError(
                f"verifiers took {int(branch.sampled.sum())} tokens of a branch as sampled, but the engine answered "
                f"{int((told & branch.sampled).sum())} of them"
            )
        own = [turns[start] for start in sorted(turns) if turns[start] not in used]
        used.update(own)
        if own:
            rows.append(_row(answered, own, branch.token_ids))
    return rows


def _row(answered: Sequence[Answered], turns: Sequence[int], token_ids: np.ndarray) -> Recorder:
    """Returns the row of a branch in which the answers with the indices ``turns`` were sampled."""
    row = Recorder(token_ids[: answered[turns[0]].start])
    end = answered[turns[0]].start
    for i in turns:
        row.add_text(token_ids[end : answered[i].start])
        row.turn = i  # the number of this turn less one
        row.add_turn(answered[i].response)
        end = answered[i].end
    return row
