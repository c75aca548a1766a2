"""Reads the rows of another program's trajectories as responses and rewards.

docs/external_trajectories.md lists the columns. The message for a row that is refused is one line. It names the row and
the column, the found value and the expected one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from rljax.errors import ReplyError
from rljax.policy.config import route_dtype
from rljax.rollout.servers.replies import check_tops, make_tops
from rljax.rollout.types import Response, SamplingParams
from rljax.tokens import TOPS, TokenRecord, as_stored

_LARGEST = 2**31 - 1  # token ids, turns and versions are int32
_ROUNDING = 1e-4  # the largest log-probability above 0 that counts as rounding (nats); it is then taken as 0
_LOWEST = -1e4  # the lowest log-probability that a sampled token can have (nats); vLLM writes -9999 for minus infinity

DOUBTS = CONSTANT, AFTER_STOP, MIXED = "rollout/constant_logprobs", "rollout/after_stop", "rollout/mixed_prompts"
"""The metrics of odd data: trajectories with equal log-probabilities or tokens after a stop; groups of many prompts."""
MIXED_REMEDY = "give each problem a group name of its own, also in later batches, if they are not meant to be compared"
_SEVERAL = 8  # the fewest sampled tokens whose equal log-probabilities are odd

Name = Annotated[str, msgspec.Meta(min_length=1)] | int


class PostedRow(msgspec.Struct, omit_defaults=True):
    """One row as another program sends it, with ``mask``, ``turns`` or both. The types are checked."""

    group: Name
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float | None]
    reward: float | None
    version: int | list[int | None]
    mask: list[bool | int] | None = None
    turns: list[int] | None = None
    trajectory: Name | None = None
    truncated: bool | None = None

    def __post_init__(self) -> None:
        if self.mask is None and self.turns is None:
            raise ValueError("lacks mask (or turns)")


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
    oldest_version: int  # the oldest policy version that sampled any of its tokens
    newest_version: int  # the newest policy version that sampled any of its tokens


def row_type(limits: RowLimits) -> Any:
    """Returns a type of rows: ``PostedRow`` with likeliest tokens and routes only where ``limits`` needs them."""
    ids, logprobs = list[tuple[int, ...] | None] | None, list[tuple[float | None, ...] | None] | None
    columns: list[tuple[str, Any, None]] = []
    if limits.sampling.reported:
        columns += [("top_ids", ids, None), ("top_logprobs", logprobs, None)]
    if limits.routes:
        columns.append(("routes", list[tuple[int, ...]] | None, None))
    return msgspec.defstruct("RowWithLists", columns, bases=(PostedRow,), omit_defaults=True)


def typed_rows(
    numbered: Iterable[tuple[int, Mapping[str, Any]]], where: str, limits: RowLimits
) -> Iterator[tuple[int, PostedRow]]:
    """Yields the numbered rows of a file as ``PostedRow``. Raises ValueError if a column has a wrong type."""
    kind = row_type(limits)
    for number, row in numbered:
        try:
            yield number, msgspec.convert(row, kind)
        except msgspec.ValidationError as error:
            raise ValueError(f"{where}: row {number}: {error}") from error


def read_trajectories(numbered: Iterable[tuple[int, PostedRow]], where: str, limits: RowLimits) -> list[Trajectory]:
    """Reads the trajectories of a file or of a request, whose name ``where`` begins each message.

    Consecutive rows with the same ``group`` and ``trajectory`` are one trajectory, as is a row that names none.

    Raises:
      ValueError: A row cannot be used. The message is one line that names the row.
    """
    found, known = [], set()
    for key, members in itertools.groupby(numbered, key=lambda each: _names(each[1])):
        rows, (group, name) = list(members), key
        if name is not None and key in known:
            place = f"{where}: row {rows[0][0]}"
            raise ValueError(f"{place}: the rows of trajectory {name} of group {group} must follow one another")
        known.add(key)
        parts = [rows] if name is not None else [[each] for each in rows]
        found += [_read_trajectory(group, part, where, limits) for part in parts]
    return found


def _names(row: PostedRow) -> tuple[str, str | None]:
    return str(row.group), None if row.trajectory is None else str(row.trajectory)


def _read_trajectory(group: str, rows: Sequence[tuple[int, PostedRow]], where: str, limits: RowLimits) -> Trajectory:
    place = f"{where}: row {rows[0][0]}"
    if len(rows) > limits.max_rows:
        raise ValueError(
            f"{place}: the trajectory has {len(rows)} rows, expected at most rollout.episode.max_rows = "
            f"{limits.max_rows}: raise it, or give each trajectory a name of its own"
        )
    rewards = [_reward(row.reward, f"{where}: row {number}: reward") for number, row in rows]
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
    numbers, versions = tuple(number for number, _ in rows), whole.versions.tolist()
    return Trajectory(group, whole, rewards[0], numbers, doubts, versions[0], versions[-1])


def _read_row(row: PostedRow, place: str, limits: RowLimits, turns_before: int, *, is_first: bool) -> Response:
    """Returns one row, whose turns come after the turn ``turns_before``.

    The prompt and the response of the first row have limits of their own.
    """
    prompt = _in_range(row.prompt_ids, f"{place}: prompt_ids", limits.vocab_size)
    tokens = _in_range(row.token_ids, f"{place}: token_ids", limits.vocab_size)
    count = len(tokens)
    if not len(prompt) or not count:
        raise ValueError(f"{place}: prompt_ids and token_ids need at least one token, got {len(prompt)} and {count}")
    most_prompt, most = limits.max_prompt_tokens, limits.sampling.max_response_tokens
    limited = ("prompt_ids", len(prompt), "data.max_prompt_tokens", most_prompt)
    for what, length, setting, limit in (limited, ("token_ids", count, "rollout.max_response_tokens", most)):
        if is_first and length > limit:
            raise ValueError(f"{place}: {what} has {length} tokens, expected at most {setting} = {limit}")
    if len(prompt) + count > most_prompt + most:
        raise ValueError(
            f"{place}: prompt_ids and token_ids have {len(prompt) + count} tokens, expected at most "
            f"{most_prompt + most} (data.max_prompt_tokens + rollout.max_response_tokens)"
        )
    turns = _turns(row, place, count, turns_before)
    arrays = {"turn": turns, "rollout_logprobs": _logprobs(row.logprobs, f"{place}: logprobs", turns > 0)}
    arrays["version"] = _versions(row.version, f"{place}: version", turns > 0)
    if limits.routes:
        arrays["routes"] = as_stored(_routes(row, place, len(prompt) + count - 1, limits.routes))
    response = Response.of(prompt, tokens, arrays, truncated=bool(row.truncated))
    return _with_tops(row, place, response, limits) if limits.sampling.reported else response


def _reward(value: float | None, what: str) -> float:
    """Returns the reward, or NaN if it is null, which marks a trajectory that failed."""
    if value is None:
        return math.nan
    if abs(value) > 3e38:
        raise ValueError(f"{what} must be a finite number, or null for a trajectory that failed, got {value}")
    return value


def _check_length(values: Sequence[Any], what: str, count: int) -> None:
    if len(values) != count:
        raise ValueError(f"{what} has {len(values)} entries, expected {count}, one for each of token_ids")


def _in_range(values: Sequence[int], what: str, below: int = _LARGEST) -> np.ndarray:
    """Returns numbers as a vector, int32. Raises ValueError unless they are in 0 .. ``below`` - 1."""
    least, most = min(values, default=0), max(values, default=0)
    if least < 0 or most >= below:
        raise ValueError(f"{what} must be in 0 .. {below - 1}, got {least} .. {most}")
    return np.asarray(values, np.int32)


def _turns(row: PostedRow, place: str, count: int, before: int) -> np.ndarray:
    """Returns the turn of each token, int32 [t], 0 where the policy did not sample it. All are after ``before``."""
    turns, mask = None, None
    if row.turns is not None:
        _check_length(row.turns, f"{place}: turns", count)
        turns = _in_range(row.turns, f"{place}: turns")
    if row.mask is not None:
        _check_length(row.mask, f"{place}: mask", count)
        if others := set(row.mask) - {0, 1}:
            raise ValueError(f"{place}: mask must hold true or false only, got {others.pop()}")
        mask = np.asarray(row.mask, np.bool_)
    if turns is None:
        assert mask is not None
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


def _logprobs(values: Sequence[float | None], what: str, sampled: np.ndarray) -> np.ndarray:
    """Returns the log-probabilities, float32 [t]. They are 0, and may be null in ``values``, where not ``sampled``."""
    _check_length(values, what, len(sampled))
    array = np.asarray(values, np.float64)  # NaN for null
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


def _versions(value: int | Sequence[int | None], what: str, sampled: np.ndarray) -> np.ndarray:
    """Returns the version of each token, int32 [t]. An environment's token has the version of the token before it.

    ``value`` is one version for all tokens, or a list with one for each token. ``sampled`` is bool [t].
    """
    if isinstance(value, int):
        return np.full(len(sampled), _in_range([value], what)[0])
    _check_length(value, what, len(sampled))
    known = [each for each, is_own in zip(value, sampled, strict=True) if is_own]
    if None in known:
        raise ValueError(f"{what} must be a whole number where the policy sampled, got null")
    versions = _in_range([each or 0 for each in value], what)
    places = np.flatnonzero(sampled)
    # A token that was not sampled takes the version of the last sampled token before it. Those before the first sampled
    # token take its version.
    return versions[places[np.maximum(np.cumsum(sampled) - 1, 0)]]


def _with_tops(row: Any, place: str, response: Response, limits: RowLimits) -> Response:
    """Returns a row with the likeliest tokens of each position. There are none where the policy did not sample."""
    lists, tokens, sampled = {}, response.response, response.sampled
    for name in ("top_ids", "top_logprobs"):
        if (given := getattr(row, name)) is None:
            raise ValueError(
                f"{place} lacks {name}, which a run with {limits.sampling.reported} likeliest tokens needs"
            )
        _check_length(given, f"{place}: {name}", len(tokens))
        lists[name] = [each or () if is_own else () for each, is_own in zip(given, sampled, strict=True)]
    counts = {name: [len(each) for each in parts] for name, parts in lists.items()}
    if counts["top_ids"] != counts["top_logprobs"]:
        raise ValueError(f"{place}: top_ids and top_logprobs must have equal lengths at each token")
    flat = {name: list(itertools.chain.from_iterable(parts)) for name, parts in lists.items()}
    ids = _in_range(flat["top_ids"], f"{place}: top_ids", limits.vocab_size)
    own = np.asarray(flat["top_logprobs"], np.float64)
    if np.isnan(own).any() or own.max(initial=0.0) > _ROUNDING:  # None is NaN here
        raise ValueError(f"{place}: top_logprobs must be numbers of at most 0 (nats)")
    columns = counts["top_ids"], ids.tolist(), np.minimum(own, 0.0).tolist()
    whole = response.add(make_tops(*columns, limits.sampling.reported, response.prompt_length))
    inner = TokenRecord(tokens[sampled], 0, {name: whole[name][sampled] for name in ("rollout_logprobs", *TOPS)})
    try:
        check_tops(place, inner, limits.sampling, limits.vocab_size)
    except ReplyError as error:
        raise ValueError(str(error)) from error
    return whole


def _routes(row: Any, place: str, count: int, sizes: tuple[int, int, int]) -> np.ndarray:
    """Returns the experts of the first ``count`` tokens of a row, uint8 or uint16 [count, layers, k].

    ``sizes`` are the numbers of layers, of experts of a token (k), and of experts.
    """
    layers, k, experts = sizes
    lists: Sequence[Sequence[int]] | None = row.routes
    if lists is None:
        raise ValueError(f"{place} lacks routes, which rollout.router_replay = r3 needs")
    if len(lists) != count:
        each = "one for each of prompt_ids and token_ids but the last"
        raise ValueError(f"{place}: routes has {len(lists)} entries, expected {count}, {each}")
    for i, experts_of_token in enumerate(lists):
        if len(experts_of_token) != layers * k:
            numbers = f"a list of {layers} x {k} experts, layer by layer"
            raise ValueError(f"{place}: routes must have {numbers}, got {list(experts_of_token)!r:.60} at token {i}")
    flat = _in_range(list(itertools.chain.from_iterable(lists)), f"{place}: routes", experts)
    return flat.reshape(count, layers, k).astype(route_dtype(experts))


def find_doubts(row: Response, place: str, stop_token_ids: Sequence[int]) -> dict[str, str]:
    """Returns a line for each doubt about one row, by name of metric. Lines begin with ``place``.

    The row may be right, so a doubt is counted and reported, and the row is not refused. A policy that is sure of each
    token, or draws evenly, also has equal log-probabilities. An engine that ignores the stop tokens also goes on after
    them.
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
