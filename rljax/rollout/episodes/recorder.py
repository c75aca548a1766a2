"""The tokens of a trajectory with several turns, in the order in which the engine saw them."""

from __future__ import annotations

import numpy as np

from rljax.rollout.types import Response
from rljax.tokens import TokenRecord, blank, join


class TokenRecorder:
    """One trajectory while its turns are sampled, without any I/O: what the engine gives is kept bit for bit.

    ``prompt`` has the tokens before the first turn, and ``turn`` is the number of the last turn.
    """

    def __init__(self, prompt: np.ndarray) -> None:
        """Begins a trajectory that has no token behind ``prompt``, int32 [s], yet."""
        self.prompt, self.turn = prompt, 0
        self._pieces = [TokenRecord(prompt, len(prompt))]
        self._routes: list[np.ndarray] = []  # the routes of all tokens before the last one of the last turn

    @property
    def count(self) -> int:
        """The number of tokens behind the prompt."""
        return sum(len(piece.response) for piece in self._pieces)

    def tokens(self) -> np.ndarray:
        """Returns all tokens so far, prompt included, int32 [s + t]."""
        return np.concatenate([piece.ids for piece in self._pieces])

    def add_turn(self, response: Response) -> None:
        """Adds the tokens of a turn, which the engine sampled behind the tokens of ``tokens()``."""
        self.turn += 1
        if "routes" in response.columns:  # A turn also reports the routes of the tokens before it.
            self._routes.append(response.columns["routes"][sum(map(len, self._routes)) : -1])
        turn = response.without("routes").add({"turn": np.full(len(response.response), self.turn)})
        self._pieces.append(turn.cut(turn.prompt_length))

    def add_text(self, token_ids: np.ndarray) -> None:
        """Adds the tokens of a text that the environment wrote. They have the version of the token before them."""
        last, text = self._pieces[-1].columns.get("version"), TokenRecord(token_ids, 0)
        known = {} if last is None else {"version": np.full(len(token_ids), last[-1])}
        self._pieces.append(text.add(known))

    def response(self, prompt_index: int, sample_index: int, *, truncated: bool) -> Response:
        """Returns the trajectory so far as one row, for sample ``sample_index`` of problem ``prompt_index``.

        ``truncated``: Whether a limit ended the trajectory.
        """
        row = join(self._pieces, len(self.prompt))
        if self._routes:
            unknown = blank("routes", len(row.ids) - sum(map(len, self._routes)), self._routes[0])
            row = row.add({"routes": np.concatenate([*self._routes, unknown])})
        return Response(row.ids, row.prompt_length, row.columns, prompt_index, sample_index, truncated)
