"""Finds what is odd about the rows of another program but may be right. It is counted and said, and not refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rljax.rollout.types import Response

DOUBTS = CONSTANT, AFTER_STOP, MIXED = "rollout/constant_logprobs", "rollout/after_stop", "rollout/mixed_prompts"
"""The metrics: trajectories with equal log-probabilities, or with tokens after a stop token; groups of many prompts."""
MIXED_REMEDY = "give each problem a group name of its own, also in later batches, if they are not meant to be compared"
_SEVERAL = 8  # the fewest sampled tokens whose equal log-probabilities are odd


def find_doubts(row: Response, place: str, stop_token_ids: Sequence[int]) -> dict[str, str]:
    """Returns what is odd about one row of a trajectory: a line that begins with ``place``, by the metric's name.

    A policy that is sure of each token, or draws evenly, also has equal log-probabilities. An engine that ignores the
    stop tokens also goes on after them.
    """
    places = np.flatnonzero(row.turns > 0)
    sampled, found = row["rollout_logprobs"][places], {}
    if len(sampled) >= _SEVERAL and (sampled == sampled[0]).all():
        said = f"{place}: logprobs are {sampled[0]:g} at all {len(sampled)} sampled tokens"
        found[CONSTANT] = f"{said}; send those of the sampler"
    stops = np.isin(row.response[places[:-1]], stop_token_ids) & (row.turns[places[1:]] == row.turns[places[:-1]])
    if stops.any():
        first = int(np.flatnonzero(stops)[0])
        stop, after = row.response[places[first]], places[first + 1]
        said = f"{place}: token_ids goes on at token {after} after the stop token {stop} of the same turn"
        found[AFTER_STOP] = f"{said}; end a turn there, or say in turns that another one begins"
    return found
