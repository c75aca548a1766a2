"""What the engine answered to the turns of a trajectory, joined to the branches that ``verifiers`` kept of it.

The library rounds log-probabilities and drops versions, likeliest tokens and routes. So the trainer keeps each answer,
and a branch only says which of them the trajectory is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rljax.rollout.types import Response, Tops, VersionSpan


class Answered(NamedTuple):
    """A turn that the engine answered.

    Attributes:
      tokens: The tokens that the turn continued, int32 [s].
      response: The tokens of the turn.
    """

    tokens: np.ndarray
    response: Response

    @property
    def start(self) -> int:
        """The position of the first token of the turn."""
        return len(self.tokens)

    @property
    def end(self) -> int:
        """The position behind the last token of the turn."""
        return len(self.tokens) + len(self.response.token_ids)

    def is_in(self, branch: Branch) -> bool:
        """Returns whether the branch begins with the tokens of this turn, which it took as sampled."""
        ids, sampled = branch
        return (
            self.end <= len(ids)
            and bool(sampled[self.start : self.end].all())
            and np.array_equal(ids[: self.start], self.tokens)
            and np.array_equal(ids[self.start : self.end], self.response.token_ids)
        )


class Branch(NamedTuple):
    """One path of messages, as the library kept it.

    Attributes:
      token_ids: The tokens, int32 [t].
      sampled: Whether each token was sampled, bool [t].
    """

    token_ids: np.ndarray
    sampled: np.ndarray


class MismatchedBranchError(Exception):
    """A branch has sampled tokens that no answer of the engine has."""


def rows_of(answered: Sequence[Answered], branches: Sequence[Branch]) -> list[Response]:
    """Returns one row for each branch, in order: the tokens behind its first turn that is in no row before it.

    A turn that several branches share is sampled in the first of them, and belongs to the prompt, or to the
    environment's tokens, of the others. Answers that the library did not keep, as after a retry, are in no row.

    Raises:
      MismatchedBranchError: A token that the library took as sampled is in no answer.
    """
    rows: list[Response] = []
    used: set[int] = set()
    for branch in branches:
        within = [i for i, one in enumerate(answered) if one.is_in(branch)]
        # The last of several equal answers is the one that the library kept after its retry.
        turns = list({answered[i].start: i for i in within}.values())
        told = np.zeros(len(branch.token_ids), bool)
        for i in turns:
            told[answered[i].start : answered[i].end] = True
        if not np.array_equal(told, branch.sampled):
            raise MismatchedBranchError(
                f"{int(branch.sampled.sum())} tokens of a branch were sampled, but the engine's answers have "
                f"{int((told & branch.sampled).sum())} of them"
            )
        own = sorted((i for i in turns if i not in used), key=lambda i: answered[i].start)
        used |= set(turns)
        if own:
            rows.append(row_of([(i + 1, answered[i]) for i in own], branch.token_ids))
    return rows


def row_of(turns: Sequence[tuple[int, Answered]], token_ids: np.ndarray) -> Response:
    """Returns the row of a branch's tokens in which the numbered ``turns`` were sampled, in order of position."""
    begin, end = turns[0][1].start, turns[-1][1].end
    size, last = end - begin, turns[-1][1].response
    logprobs, numbers = np.zeros(size, np.float32), np.zeros(size, np.int32)
    tops = None
    if all(one.response.tops is not None for _, one in turns) and last.tops is not None:
        k = last.tops.ids.shape[1]
        tops = Tops(np.full((size, k), -1, np.int32), np.full((size, k), -np.inf, np.float32))
    spans: list[VersionSpan] = []
    for number, one in turns:
        here = slice(one.start - begin, one.end - begin)
        logprobs[here], numbers[here] = one.response.logprobs, number
        if tops is not None and one.response.tops is not None:
            tops.ids[here], tops.logprobs[here] = one.response.tops.ids, one.response.tops.logprobs
        for span in one.response.versions:
            spans = add_span(spans, span.version, here.start + span.start, here.start + span.end)
    return replace(
        last,
        token_ids=np.asarray(token_ids[begin:end], np.int32),
        logprobs=logprobs,
        versions=tuple(spans),
        routes=_routes([one for _, one in turns]),
        tops=tops,
        turns=numbers,
        prompt=np.asarray(token_ids[:begin], np.int32),
    )


def add_span(spans: list[VersionSpan], version: int, start: int, end: int) -> list[VersionSpan]:
    """Returns the spans with one more; the tokens between belong to the span before."""
    if not spans:
        return [VersionSpan(version, start, end)]
    before = spans[-1]
    if before.version == version:
        return [*spans[:-1], replace(before, end=end)]
    return [*spans[:-1], replace(before, end=start), VersionSpan(version, start, end)]


def _routes(turns: Sequence[Answered]) -> np.ndarray | None:
    """Returns the routes of a row: of each token, those of the first turn that had it."""
    routes = turns[0].response.routes
    for one in turns[1:]:
        more = one.response.routes
        if routes is None or more is None:
            return None
        routes = np.concatenate([routes, more[len(routes) :]])
    return routes
