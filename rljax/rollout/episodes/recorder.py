"""The tokens of one trajectory, as the engine saw them: those of the policy, and those of its environment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rljax.rollout.types import Response, Tops, VersionSpan


class Recorder:
    """Collects the tokens of the turns of a trajectory and of the texts between them. No token is encoded again.

    ``prompt`` has the tokens before the first turn, int32 [s], and ``turn`` is the number of turns so far.
    """

    def __init__(self, prompt: np.ndarray) -> None:
        """Begins a trajectory that has no token behind ``prompt``, int32 [s], yet."""
        self.prompt, self.turn = prompt, 0
        self._tokens: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._turns: list[np.ndarray] = []
        self._tops: list[Tops | None] = []  # None at a text of the environment
        self._routes: list[np.ndarray] = []
        self._spans: list[VersionSpan] = []

    @property
    def count(self) -> int:
        """The number of tokens behind the prompt."""
        return sum(map(len, self._tokens))

    def tokens(self) -> np.ndarray:
        """Returns all tokens so far, prompt included, int32 [s + t]."""
        return np.concatenate([self.prompt, *self._tokens])

    def add_turn(self, response: Response) -> None:
        """Adds the tokens of a turn, which the engine sampled behind the tokens of ``tokens()``."""
        start = self.count
        self.turn += 1
        self._spans = join_spans(self._spans, response.versions, start)
        if response.routes is not None:
            self._routes.append(response.routes[sum(map(len, self._routes)) :])
        self._add(response.token_ids, response.logprobs, self.turn, response.tops)

    def add_text(self, token_ids: np.ndarray) -> None:
        """Adds the tokens of a text that the environment wrote."""
        self._add(token_ids, np.zeros(len(token_ids), np.float32), 0, None)

    def _add(self, tokens: np.ndarray, logprobs: np.ndarray, turn: int, tops: Tops | None) -> None:
        self._tokens.append(tokens)
        self._logprobs.append(logprobs)
        self._turns.append(np.full(len(tokens), turn, np.int32))
        self._tops.append(tops)

    def response(self, prompt_index: int, sample_index: int, *, truncated: bool, own_prompt: bool) -> Response:
        """Returns the trajectory so far as one row, for sample ``sample_index`` of problem ``prompt_index``.

        ``truncated``: Whether a limit ended the trajectory. ``own_prompt``: Whether the prompt differs from the
        problem's, so that the response must carry it.
        """
        return Response(
            prompt_index,
            sample_index,
            np.concatenate([np.zeros(0, np.int32), *self._tokens]),
            np.concatenate([np.zeros(0, np.float32), *self._logprobs]),
            truncated,
            tuple(self._spans),
            np.concatenate(self._routes) if self._routes else None,
            self._joined_tops(),
            turns=np.concatenate([np.zeros(0, np.int32), *self._turns]),
            prompt=self.prompt if own_prompt else None,
        )

    def _joined_tops(self) -> Tops | None:
        """Returns the likeliest tokens at all positions; there are none at a text of the environment."""
        k = next((tops.ids.shape[1] for tops in self._tops if tops is not None), None)
        if k is None:
            return None
        ids, logprobs = [], []
        for tokens, tops in zip(self._tokens, self._tops, strict=True):
            shape = len(tokens), k
            ids.append(np.full(shape, -1, np.int32) if tops is None else tops.ids)
            logprobs.append(np.full(shape, -np.inf, np.float32) if tops is None else tops.logprobs)
        return Tops(np.concatenate(ids), np.concatenate(logprobs))


def join_spans(before: Sequence[VersionSpan], spans: Sequence[VersionSpan], start: int) -> list[VersionSpan]:
    """Returns the spans of versions of a row after a turn is added at position ``start``. They have no gaps.

    The environment's tokens before the turn belong to the version of the turn before them. The positions in ``spans``
    count from the beginning of the turn.
    """
    joined = list(before)
    if joined:
        joined[-1] = VersionSpan(joined[-1].version, joined[-1].start, start)
    for span in spans:
        if joined and joined[-1].version == span.version:
            joined[-1] = VersionSpan(span.version, joined[-1].start, start + span.end)
        else:
            joined.append(VersionSpan(span.version, start + span.start, start + span.end))
    return joined
