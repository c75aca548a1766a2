"""Packs sequences of any length into rows of one length, with segment ids that separate them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from rljax.errors import check_at_least
from rljax.sharding import zeros_to_put
from rljax.trainer.rows import lay_out_rows

OptionalLogprobs = Literal["old_logprobs", "reference_logprobs", "behaviour_logprobs"]
"""The name of log-probabilities that only the batches of some runs have."""


@dataclass(frozen=True)
class PackingConfig:
    """The shape of the batches that the training step is compiled for."""

    row_tokens: int = 0
    """Length of a row (tokens), a multiple of 2 x mesh.context. 0: the longest possible sequence, rounded up to a
    multiple of 64 and of 2 x mesh.context. Above 1024 it is rounded up to a multiple of 1024 and of 256 x mesh.context,
    because attention computes long rows block by block."""
    rows_per_micro_batch: int = 8
    """Rows of a micro-batch. It must be a multiple of the sizes of the mesh axes replica, fsdp and expert together."""
    tokens_per_device: int = 0
    """Tokens of a micro-batch on one device, which has 1 / mesh.context of a row. Each part of the mesh axes replica,
    fsdp and expert gets as many rows as fit, at least one. It replaces ``rows_per_micro_batch`` and keeps its meaning
    on any mesh. 0: ``rows_per_micro_batch`` decides."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "row_tokens", "tokens_per_device")
        check_at_least(self, 1, "rows_per_micro_batch")

    def resolve_row_tokens(self, max_sequence_tokens: int, context: int = 1) -> int:
        """Returns the row length in tokens, which ``context`` devices can share (``rljax.policy.context``).

        Raises:
          ValueError: A sequence of ``max_sequence_tokens`` does not fit, or the devices cannot share the row.
        """
        if self.row_tokens == 0:
            is_short = max_sequence_tokens <= 1024
            multiple = math.lcm(64, 2 * context) if is_short else math.lcm(1024, 256 * context)
            return -(-max_sequence_tokens // multiple) * multiple
        if self.row_tokens < max_sequence_tokens:
            raise ValueError(
                f"row_tokens = {self.row_tokens} is shorter than the longest possible sequence, "
                f"{max_sequence_tokens} tokens (prompt + response)"
            )
        if self.row_tokens % (2 * context):
            raise ValueError(
                f"packing.row_tokens = {self.row_tokens} must be a multiple of {2 * context}, which is twice "
                f"mesh.context = {context}"
            )
        return self.row_tokens

    def resolve_rows(self, row_tokens: int, ways: int, context: int = 1) -> int:
        """Returns the rows of a micro-batch, each of ``row_tokens``, on a mesh that splits rows into ``ways`` parts.

        Each row is on ``context`` devices, which have equal parts of its tokens.
        """
        if self.tokens_per_device == 0:
            return self.rows_per_micro_batch
        return ways * max(1, self.tokens_per_device * context // row_tokens)


_NO_TOPS = {"top_ids": np.int32(-1), "top_logprobs": np.float32(-np.inf)}  # where there are no likeliest tokens


class TrainSequence(NamedTuple):
    """One prompt with one response, ready for the loss; p prompt tokens, r response tokens. Absent arrays are None.

    In a trajectory of several turns the response holds the environment's tokens, too. Their log-probabilities,
    advantages and likeliest tokens are not used.
    """

    prompt: np.ndarray  # int32 [p], the token ids of the prompt
    response: np.ndarray  # int32 [r], the token ids of the response
    rollout_logprobs: np.ndarray  # float32 [r], the log-probabilities of the inference engine
    advantage: float | np.ndarray  # the advantage of the response; or float32 [r], the advantage of each token
    in_loss: bool  # whether the response is in the loss; False if all rewards of its group are equal
    staleness: np.ndarray | None = None  # int32 [r], the policy versions between sampling and this step; None for 0
    old_logprobs: np.ndarray | None = None  # float32 [r], of the trainer before the first update on this batch
    reference_logprobs: np.ndarray | None = None  # float32 [r], of the frozen reference policy
    behaviour_logprobs: np.ndarray | None = None  # float32 [r], of a stale token's own policy; NaN if unknown
    routes: np.ndarray | None = None  # uint8 or uint16 [p + r - 1, l, k], the experts of each token but the last
    top_ids: np.ndarray | None = None  # int32 [r, k], the sampler's likeliest tokens; -1 where there are fewer
    top_logprobs: np.ndarray | None = None  # float32 [r, k], the sampler's log-probabilities of them; -inf at id -1
    turns: np.ndarray | None = None  # int32 [r], the turn that sampled each token, from 1; 0: the environment wrote it
    trajectory: int | None = None  # the number of its trajectory in the batch, group by group; None: its own place

    @property
    def sampled(self) -> np.ndarray:
        """Whether the policy sampled each token of the response, bool [r]."""
        return np.ones(len(self.response), np.bool_) if self.turns is None else self.turns > 0


class PackedBatch(NamedTuple):
    """Micro-batches of packed rows; m micro-batches, b rows, t tokens. A pytree of numpy or jax arrays.

    The micro-batches after the first ``used`` are padding and are never computed. The first ``with_loss`` take forward
    and backward. The others carry no loss and take only a forward. Absent arrays are None.
    """

    tokens: Any  # int32 [m, b, t], the token ids
    segment_ids: Any  # int32 [m, b, t], the number of the sequence in its row, from 1; 0 on padding
    positions: Any  # int32 [m, b, t], the position in the sequence, from 0
    sequence_ids: Any  # int32 [m, b, t], the index of the sequence in the batch; 0 on padding
    response_mask: Any  # bool [m, b, t], whether the rollout engine sampled the token
    loss_mask: Any  # bool [m, b, t], whether the token carries loss
    rollout_logprobs: Any  # float32 [m, b, t], the engine's log-probability of each token; 0 outside the responses
    advantages: Any  # float32 [m, b, t], the advantage of each token
    staleness: Any  # int32 [m, b, t], the number of policy versions between the sampling of the token and this step
    with_loss: Any  # int32 [], the number of leading micro-batches that together hold all tokens with loss
    used: Any  # int32 [], the number of micro-batches that have tokens
    old_logprobs: Any = None  # float32 [m, b, t], under the trainer's policy before the first update
    reference_logprobs: Any = None  # float32 [m, b, t], under the reference policy
    behaviour_logprobs: Any = None  # float32 [m, b, t], under the policy that sampled a stale token; NaN where unknown
    routes: Any = None  # uint8 or uint16 [m, b, t, l * k], 1 + the experts that each token goes to; 0 for any
    top_ids: Any = None  # int32 [m, b, t, k], the sampler's likeliest tokens; -1 where there are fewer
    top_logprobs: Any = None  # float32 [m, b, t, k], the sampler's log-probabilities of them; -inf where the id is -1


def max_micro_batches(num_sequences: int, max_sequence_tokens: int, row_tokens: int, rows_per_micro_batch: int) -> int:
    """Returns a number of micro-batches that always suffices."""
    # Every row but the last holds at least row_tokens // max_sequence_tokens sequences.
    rows = -(-num_sequences // (row_tokens // max_sequence_tokens))
    return -(-rows // rows_per_micro_batch)


def pack(
    sequences: Sequence[TrainSequence],
    *,
    row_tokens: int,
    rows_per_micro_batch: int,
    micro_batches: int,
    with_tops: bool = True,
) -> PackedBatch:
    """Packs sequences into a batch of shape [micro_batches, rows_per_micro_batch, row_tokens].

    ``rows.lay_out_rows`` chooses the place of each sequence. The result depends only on the sequences, not on the order
    in which responses arrived. ``with_tops`` is as in ``fill``.

    Raises:
      ValueError: The sequences do not fit, or only some of them have one of the optional arrays.
    """
    lengths = [len(s.prompt) + len(s.response) for s in sequences]
    shape = (micro_batches, rows_per_micro_batch, row_tokens)
    layout = lay_out_rows(lengths, [s.in_loss for s in sequences], shape)
    batch = fill(sequences, layout.rows, shape, with_tops=with_tops)
    return batch._replace(with_loss=np.asarray(layout.with_loss, np.int32))


def fill(
    sequences: Sequence[TrainSequence],
    rows: Mapping[tuple[int, int], Sequence[int]],
    shape: tuple[int, int, int],
    *,
    with_tops: bool = True,
) -> PackedBatch:
    """Fills a batch of ``shape`` (m, b, t) with sequences at chosen places.

    ``rows`` has the indices of the sequences in each row, one after another, by (micro-batch, row). They must fit.
    ``with_tops``: Whether the batch has their likeliest tokens. In the result ``with_loss`` is equal to ``used``.

    Raises:
      ValueError: Only some of the sequences have one of the optional arrays.
    """
    optional = [name for name in get_args(OptionalLogprobs) if _have(sequences, name)]
    ints = ("tokens", "segment_ids", "positions", "sequence_ids", "staleness")
    floats = ("rollout_logprobs", "advantages", *optional)
    dtypes: dict[str, Any] = dict.fromkeys(ints, np.int32) | dict.fromkeys(floats, np.float32)
    dtypes |= dict.fromkeys(("response_mask", "loss_mask"), np.bool_)
    arrays = {name: zeros_to_put(shape, dtype) for name, dtype in dtypes.items()}
    if _have(sequences, "routes"):
        like: Any = sequences[0].routes
        arrays["routes"] = zeros_to_put((*shape, math.prod(like.shape[1:])), like.dtype)  # 0 for any expert
    tops = {name: empty for name, empty in _NO_TOPS.items() if with_tops and _have(sequences, name)}
    for name, empty in tops.items():
        arrays[name] = zeros_to_put((*shape, getattr(sequences[0], name).shape[1]), empty.dtype)
    used = 1 + max((micro for micro, _ in rows), default=-1)
    for row in itertools.product(range(used), range(shape[1])):  # The others are never computed.
        place = {name: array[row] for name, array in arrays.items()}
        start = 0
        for segment, index in enumerate(rows.get(row, ()), 1):
            s = sequences[index]
            middle = start + len(s.prompt)
            end = middle + len(s.response)
            for name, empty in tops.items():
                place[name][start:middle] = empty
            place["tokens"][start:middle] = s.prompt
            place["tokens"][middle:end] = s.response
            place["segment_ids"][start:end] = segment
            place["positions"][start:end] = np.arange(end - start)
            place["sequence_ids"][start:end] = index
            place["response_mask"][middle:end] = s.sampled
            place["loss_mask"][middle:end] = s.in_loss & s.sampled
            place["advantages"][middle:end] = s.advantage
            place["staleness"][middle:end] = 0 if s.staleness is None else s.staleness
            for name in ("rollout_logprobs", *optional, *tops):
                place[name][middle:end] = getattr(s, name)
            if s.routes is not None:
                place["routes"][start : end - 1] = s.routes.reshape(len(s.routes), -1) + 1
            start = end
        for name, empty in tops.items():
            place[name][start:] = empty
    count = np.asarray(used, np.int32)
    return PackedBatch(**arrays, with_loss=count, used=count)


def _have(sequences: Sequence[TrainSequence], name: str) -> bool:
    has = [getattr(s, name) is not None for s in sequences]
    if any(has) and not all(has):
        raise ValueError(f"{name} must be given for all sequences or for none, got {sum(has)} of {len(has)}")
    return any(has)


def groups_of(sequences: Sequence[TrainSequence], group_size: int) -> list[range]:
    """Returns the indices of the sequences of each group of ``group_size`` trajectories, in order."""
    groups = trajectories(sequences) // group_size
    starts = np.flatnonzero(np.diff(groups, prepend=-1)).tolist()
    return [range(start, end) for start, end in itertools.pairwise([*starts, len(sequences)])]


def trajectories(sequences: Sequence[TrainSequence]) -> np.ndarray:
    """Returns the number of each sequence's trajectory, int64 [n], in rising order."""
    numbers = [i if s.trajectory is None else s.trajectory for i, s in enumerate(sequences)]
    return np.asarray(numbers, np.int64)


def _by_sequence(values: Any, batch: PackedBatch, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
    """Returns the values of all tokens of each sequence in a packed batch [m, b, t], prompts included."""
    mask = np.asarray(batch.segment_ids) > 0
    # A sequence lies in one row, so a stable sort keeps its tokens in order.
    order = np.argsort(np.asarray(batch.sequence_ids)[mask], kind="stable")
    lengths = [len(s.prompt) + len(s.response) for s in sequences]
    return np.split(np.asarray(values)[mask][order], np.cumsum(lengths)[:-1])


def unpack(values: np.ndarray, batch: PackedBatch, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
    """Returns one array [r, ...] for each sequence: the values of its response in a packed batch [m, b, t, ...].

    Where a token has a single number, it is 0 at tokens that an environment wrote.
    """
    every = zip(_by_sequence(values, batch, sequences), sequences, strict=True)
    responses = [(each[len(s.prompt) :], s) for each, s in every]
    return [each if s.turns is None or each.ndim > 1 else np.where(s.sampled, each, 0) for each, s in responses]


def unpack_routes(routes: np.ndarray, batch: PackedBatch, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
    """Returns the routes of each sequence, [p + r - 1, 1, l * k], from the routes of a batch [m, b, t, l * k]."""
    return [each[:-1, None] - np.ones((), each.dtype) for each in _by_sequence(routes, batch, sequences)]


def useful_fraction(sequences: Sequence[TrainSequence], batch: PackedBatch) -> float:
    """Returns the share of the computed places that hold a token."""
    _, rows, tokens = batch.tokens.shape
    return sum(len(s.prompt) + len(s.response) for s in sequences) / (int(batch.used) * rows * tokens)
