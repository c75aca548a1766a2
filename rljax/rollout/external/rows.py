"""Reads rows of trajectories that another program made into responses and rewards.

docs/external_trajectories.md lists the columns. The message for a row that is refused is one line. It names the row and
the column, and says what was found and what was expected.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from rljax.errors import ReplyError
from rljax.policy.config import route_dtype
from rljax.rollout.servers.replies import check_tops, make_tops
from rljax.rollout.types import Response, SamplingParams
from rljax.tokens import TOPS, TokenRecord, as_stored

REQUIRED = ("prompt_ids", "token_ids", "logprobs", "reward", "version", "group")
"""The columns that each row has, besides one of ``mask`` and ``turns``."""
_LARGEST = 2**31 - 1  # token ids, turns and versions are int32
_ROUNDING = 1e-4  # the largest log-probability above 0 that counts as rounding (nats); it is then taken as 0
_LOWEST = -1e4  # the lowest log-probability that a sampled token can have (nats); vLLM writes -9999 for minus infinity
_EACH = "expected {}, one for each of token_ids"

DOUBTS = CONSTANT, AFTER_STOP, MIXED = "rollout/constant_logprobs", "rollout/after_stop", "rollout/mixed_prompts"
"""The metrics: trajectories with equal log-probabilities, or with tokens after a stop token; groups of many prompts."""
MIXED_REMEDY = "give each problem a group name of its own, also in later batches, if they are not meant to be compared"
_SEVERAL = 8  # the fewest sampled tokens whose equal log-probabilities are odd

PostedRow = Mapping[str, Any]


@dataclass(frozen=True)
class RowLimits:
    """The limits of a run that each row must keep."""

    vocab_size: int  # the size of the vocabulary; every token id is smaller
    max_prompt_tokens: int  # the longest prompt of a trajectory (tokens)
    sampling: SamplingParams  # the longest response, and the number of likeliest tokens needed at each position
    max_rows: int = 1  # the most rows of one trajectory
    # The numbers of layers, of experts of a token and of experts, where each row must have the experts of its tokens.
    routes: tuple[int, int, int] | None = None


class Trajectory(NamedTuple):
    """One trajectory of another program."""

    group: str  # the name of its group
    response: Response  # the response, whose prompt_index and sample_index are 0 until a step takes it
    reward: float  # the reward, or NaN if the trajectory has failed
    rows: tuple[int, ...]  # the numbers of its rows in their file
    doubts: dict[str, str]  # what is odd about it: a sentence that names the row, by the metric that counts it

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled any of its tokens."""
        return int(self.response.versions[0])

    @property
    def newest_version(self) -> int:
        """The newest policy version that sampled any of its tokens."""
        return int(self.response.versions[-1])


def read_trajectories(numbered: Iterable[tuple[int, PostedRow]], where: str, limits: RowLimits) -> list[Trajectory]:
    """Reads the trajectories of a file or of a request, whose name ``where`` begins each message.

    Consecutive rows with the same ``group`` and ``trajectory`` are the rows of one trajectory.

    Raises:
      ValueError: A row cannot be used. The message is one line that names the row.
    """
    found, known = [], set()
    for key, members in itertools.groupby(_keyed(numbered, where), key=lambda entry: entry[0]):
        rows = [(number, row) for _, number, row in members]
        place = f"{where}: row {rows[0][0]}"
        if key[1] is not None and key in known:
            raise ValueError(f"{place}: the rows of trajectory {key[1]} of group {key[0]} must follow one another")
        known.add(key)
        parts = [rows] if key[1] is not None else [[each] for each in rows]
        found += [_read_trajectory(key[0], part, where, limits) for part in parts]
    return found


def lacking(row: PostedRow) -> str:
    """Returns the names of the columns that a row lacks, with commas between them, or "" if it has all of them."""
    missing = [name for name in REQUIRED if name not in row]
    return ", ".join([*missing, *([] if "mask" in row or "turns" in row else ["mask (or turns)"])])


def _keyed(
    numbered: Iterable[tuple[int, PostedRow]], where: str
) -> Iterator[tuple[tuple[str, str | None], int, PostedRow]]:
    """Yields ((group, trajectory or None), number, row) for each row. Raises ValueError if a column is missing."""
    for number, row in numbered:
        place = f"{where}: row {number}"
        if not isinstance(row, Mapping):
            raise ValueError(f"{place} must be an object with the columns {', '.join(REQUIRED)}, got {row!r:.60}")
        if "response_mask" in row and "prompt_ids" not in row:
            raise ValueError(
                f"{place} is one of a token dump (rollouts/step_*.parquet), which has no rewards, groups or prompts "
                f"of their own: write rows with the columns {', '.join(REQUIRED)} and mask"
            )
        if missing := lacking(row):
            raise ValueError(f"{place} lacks {missing}; it has {', '.join(map(str, row)) or 'no column'}")
        trajectory = row.get("trajectory")
        group = _name(row["group"], f"{place}: group")
        yield (group, None if trajectory is None else _name(trajectory, f"{place}: trajectory")), number, row


def _read_trajectory(group: str, rows: Sequence[tuple[int, PostedRow]], where: str, limits: RowLimits) -> Trajectory:
    place = f"{where}: row {rows[0][0]}"
    if len(rows) > limits.max_rows:
        raise ValueError(
            f"{place}: the trajectory has {len(rows)} rows, expected at most rollout.episode.max_rows = "
            f"{limits.max_rows}: raise it, or give each trajectory a name of its own"
        )
    rewards = [_reward(row["reward"], f"{where}: row {number}: reward") for number, row in rows]
    if not np.array_equal(rewards, [rewards[0]] * len(rewards), equal_nan=True):
        raise ValueError(f"{place}: all rows of a trajectory have one reward, got {rewards}")
    responses: list[Response] = []
    doubts: dict[str, str] = {}
    for i, (number, row) in enumerate(rows):
        before = int(responses[-1].turns.max()) if responses else 0
        response = _read_row(row, f"{where}: row {number}", limits, before, is_first=i == 0)
        doubts = find_doubts(response, f"{where}: row {number}", limits.sampling.stop_token_ids) | doubts
        responses.append(response)
    whole = replace(responses[0], truncated=responses[-1].truncated, further=tuple(responses[1:]))
    return Trajectory(group, whole, rewards[0], tuple(number for number, _ in rows), doubts)


def _read_row(row: PostedRow, place: str, limits: RowLimits, turns_before: int, *, is_first: bool) -> Response:
    """Returns one row, whose turns come after the turn ``turns_before``.

    The prompt and the response of the first row have limits of their own.
    """
    prompt = _integers(row["prompt_ids"], f"{place}: prompt_ids", below=limits.vocab_size)
    tokens = _integers(row["token_ids"], f"{place}: token_ids", below=limits.vocab_size)
    count = len(tokens)
    if not len(prompt) or not count:
        raise ValueError(f"{place}: prompt_ids and token_ids need at least one token, got {len(prompt)} and {count}")
    most_prompt, most = limits.max_prompt_tokens, limits.sampling.max_response_tokens
    if is_first and len(prompt) > most_prompt:
        limit = f"expected at most data.max_prompt_tokens = {most_prompt}"
        raise ValueError(f"{place}: prompt_ids has {len(prompt)} tokens, {limit}")
    if is_first and count > most:
        raise ValueError(
            f"{place}: token_ids has {count} tokens, expected at most rollout.max_response_tokens = {most}"
        )
    if len(prompt) + count > most_prompt + most:
        raise ValueError(
            f"{place}: prompt_ids and token_ids have {len(prompt) + count} tokens, expected at most "
            f"{most_prompt + most} (data.max_prompt_tokens + rollout.max_response_tokens)"
        )
    turns = _turns(row, place, count, turns_before)
    arrays = {"turn": turns, "rollout_logprobs": _logprobs(row["logprobs"], f"{place}: logprobs", turns > 0)}
    arrays["version"] = _versions(row["version"], f"{place}: version", turns > 0)
    truncated = row.get("truncated") or False
    if not isinstance(truncated, bool):
        raise ValueError(f"{place}: truncated must be true or false, got {truncated!r:.60}")
    if limits.routes:
        arrays["routes"] = as_stored(_routes(row, place, len(prompt) + count - 1, limits.routes))
    response = Response.of(prompt, tokens, arrays, truncated=truncated)
    return _with_tops(row, place, response, limits) if limits.sampling.reported else response


def _name(value: Any, what: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(f"{what} must be a text or a whole number, got {value!r:.60}")
    return str(value)


def _reward(value: Any, what: str) -> float:
    """Returns the reward, or NaN if it is null, which marks a trajectory that failed."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 3e38:
        raise ValueError(f"{what} must be a finite number, or null for a trajectory that failed, got {value!r:.60}")
    return float(value)


def _vector(values: Any, what: str, count: int | None = None) -> np.ndarray:
    """Returns a list as a vector of any dtype. Raises ValueError if it is none, or its length is not ``count``."""
    if not isinstance(values, list | tuple | np.ndarray):
        raise ValueError(f"{what} must be a list, got {values!r:.60}")
    if count is not None and len(values) != count:
        raise ValueError(f"{what} has {len(values)} entries, {_EACH.format(count)}")
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{what} must be a plain list of numbers") from error
    if array.ndim != 1:
        raise ValueError(f"{what} must be a plain list of numbers, got a shape of {array.shape}")
    return array


def _numbers(values: Any, what: str, count: int | None = None) -> np.ndarray:
    """Returns a list of numbers as a vector. Raises ValueError for booleans, which NumPy would take for 0 and 1."""
    array = _vector(values, what, count)
    if array.dtype.kind != "b" and bool in set(map(type, values)):
        position = next(i for i, value in enumerate(values) if isinstance(value, bool))
        raise ValueError(f"{what} must hold no booleans among numbers, got {values[position]} at entry {position}")
    return array


def _integers(values: Any, what: str, *, count: int | None = None, below: int = _LARGEST) -> np.ndarray:
    """Returns a list as a vector, int32. Raises ValueError unless its entries are integers in 0 .. ``below`` - 1."""
    array = _numbers(values, what, count)
    if not array.size:
        return np.zeros(0, np.int32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{what} must hold whole numbers only, got {_first_other(values, int)}")
    if int(array.min()) < 0 or int(array.max()) >= below:
        raise ValueError(f"{what} must be in 0 .. {below - 1}, got {int(array.min())} .. {int(array.max())}")
    return array.astype(np.int32)


def _first_other(values: Any, kind: type) -> str:
    others = [value for value in values if isinstance(value, bool) or not isinstance(value, kind)]
    return f"{others[0]!r:.60}" if others else "numbers that are too large"


def _turns(row: PostedRow, place: str, count: int, before: int) -> np.ndarray:
    """Returns the turn of each token, int32 [t], 0 where the policy did not sample it. All are after ``before``."""
    turns = None if row.get("turns") is None else _integers(row["turns"], f"{place}: turns", count=count)
    mask = None
    if row.get("mask") is not None:
        mask = _vector(row["mask"], f"{place}: mask", count)
        if mask.dtype.kind not in "biu" or not np.isin(mask, (0, 1)).all():
            raise ValueError(f"{place}: mask must hold true or false only, got {_first_other(row['mask'], int)}")
        mask = mask.astype(np.bool_)
    if turns is None:
        if mask is None:
            raise ValueError(f"{place}: mask and turns are both null; give one of them")
        begins = mask & ~np.concatenate([[False], mask[:-1]])
        turns = np.where(mask, before + np.cumsum(begins), 0).astype(np.int32)
    elif mask is not None and (mask != (turns > 0)).any():
        position = int(np.flatnonzero(mask != (turns > 0))[0])
        raise ValueError(f"{place}: mask is {bool(mask[position])} at token {position}, but turns is {turns[position]}")
    sampled = turns[turns > 0]
    if not sampled.size:
        raise ValueError(f"{place}: the policy sampled none of the {count} tokens; leave such a row out")
    if (np.diff(sampled) < 0).any() or sampled[0] < before:
        raise ValueError(f"{place}: turns must not fall, got {sampled.tolist()[:20]} after turn {before}")
    return turns


def _logprobs(values: Any, what: str, sampled: np.ndarray) -> np.ndarray:
    """Returns the log-probabilities, float32 [t]. They are 0, and may be null in ``values``, where not ``sampled``."""
    if isinstance(values, list | tuple) and len(values) == len(sampled):
        values = [math.nan if value is None else value for value in values]
    array = _numbers(values, what, len(sampled))
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{what} must hold numbers or null, got {_first_other(values, float)}")
    with np.errstate(over="ignore"):
        array = np.where(sampled, array, 0.0).astype(np.float32)
    for is_wrong, expected in (
        (~np.isfinite(array), "finite where the policy sampled"),
        (array > _ROUNDING, "at most 0 (nats)"),
        (array < _LOWEST, f"at least {_LOWEST:g} (nats)"),
    ):
        if is_wrong.any():
            position = int(is_wrong.argmax())
            raise ValueError(f"{what} must be {expected}, got {array[position]:.6g} at token {position}")
    return np.minimum(array, np.float32(0.0))


def _versions(value: Any, what: str, sampled: np.ndarray) -> np.ndarray:
    """Returns the version of each token, int32 [t]. An environment's tokens have that of the token before them.

    ``value`` is one version for all tokens, or a list with one for each token. ``sampled`` is bool [t].
    """
    count = len(sampled)
    if isinstance(value, int) and not isinstance(value, bool):
        version = int(_integers([value], what)[0])
        return np.full(count, version, np.int32)
    if not isinstance(value, list | tuple | np.ndarray):
        raise ValueError(f"{what} must be a whole number, or one for each of token_ids, got {value!r:.60}")
    if isinstance(value, list | tuple) and len(value) == count:
        value = [0 if each is None and not is_own else each for each, is_own in zip(value, sampled, strict=True)]
    versions = _integers(value, what, count=count)
    places = np.flatnonzero(sampled)
    # A token that was not sampled takes the version of the last sampled token before it. Those before the first sampled
    # token take its version.
    return versions[places[np.maximum(np.cumsum(sampled) - 1, 0)]]


def _with_tops(row: PostedRow, place: str, response: Response, limits: RowLimits) -> Response:
    """Returns a row with the likeliest tokens of each position. There are none where the policy did not sample."""
    lists, tokens, sampled = {}, response.response, response.sampled
    for name in ("top_ids", "top_logprobs"):
        if not isinstance(row.get(name), list | tuple):
            raise ValueError(
                f"{place} lacks {name}, which a run with {limits.sampling.reported} likeliest tokens needs"
            )
        if len(row[name]) != len(tokens):
            raise ValueError(f"{place}: {name} has {len(row[name])} entries, {_EACH.format(len(tokens))}")
        lists[name] = [each or [] if is_own else [] for each, is_own in zip(row[name], sampled, strict=True)]
    counts = {name: [len(each) for each in parts] for name, parts in lists.items()}
    if counts["top_ids"] != counts["top_logprobs"]:
        raise ValueError(f"{place}: top_ids and top_logprobs must have equal lengths at each token")
    flat = {name: list(itertools.chain.from_iterable(parts)) for name, parts in lists.items()}
    ids = _integers(flat["top_ids"], f"{place}: top_ids", below=limits.vocab_size)
    own = _numbers(flat["top_logprobs"], f"{place}: top_logprobs")
    if own.dtype.kind not in "iuf" or np.isnan(own).any() or own.max(initial=0.0) > _ROUNDING:
        raise ValueError(f"{place}: top_logprobs must be numbers of at most 0 (nats)")
    given = counts["top_ids"], ids.tolist(), np.minimum(own, 0.0).tolist()
    whole = response.add(make_tops(*given, limits.sampling.reported, response.prompt_length))
    inner = TokenRecord(tokens[sampled], 0, {name: whole[name][sampled] for name in ("rollout_logprobs", *TOPS)})
    try:
        check_tops(place, inner, limits.sampling, limits.vocab_size)
    except ReplyError as error:
        raise ValueError(str(error)) from error
    return whole


def _routes(row: PostedRow, place: str, count: int, sizes: tuple[int, int, int]) -> np.ndarray:
    """Returns the experts of the first ``count`` tokens of a row, uint8 or uint16 [count, layers, k].

    ``sizes`` are the numbers of layers, of experts of a token (k), and of experts.
    """
    layers, k, experts = sizes
    lists = row.get("routes")
    if not isinstance(lists, list | tuple | np.ndarray):
        raise ValueError(f"{place} lacks routes, which rollout.router_replay = r3 needs")
    if len(lists) != count:
        each = "one for each of prompt_ids and token_ids but the last"
        raise ValueError(f"{place}: routes has {len(lists)} entries, expected {count}, {each}")
    for i, each in enumerate(lists):
        if not isinstance(each, list | tuple | np.ndarray) or len(each) != layers * k:
            numbers = f"a list of {layers} x {k} experts, layer by layer"
            raise ValueError(f"{place}: routes must have {numbers}, got {each!r:.60} at token {i}")
    flat = _integers(list(itertools.chain.from_iterable(lists)), f"{place}: routes", below=experts)
    return flat.reshape(count, layers, k).astype(route_dtype(experts))


def find_doubts(row: Response, place: str, stop_token_ids: Sequence[int]) -> dict[str, str]:
    """Returns what is odd about one row of a trajectory: a line that begins with ``place``, by the metric's name.

    It may be right, so it is counted and said, and the row is not refused.
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
