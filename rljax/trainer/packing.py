"""Packs sequences of any length into rows of one length, and rows into micro-batches, with little padding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from rljax.errors import check_at_least
from rljax.tokens import COLUMNS, TOPS, TokenRecord, common_columns

FORWARD_SHARE = 1 / 3
"""The cost of a forward without backward, as a share of forward and backward: 2 of 6 operations for each parameter."""


class Layout(NamedTuple):
    """The row and the micro-batch of each sequence of a batch."""

    rows: dict[tuple[int, int], list[int]]  # the indices of the sequences in each row, by (micro-batch, row in it)
    with_loss: int  # the number of leading micro-batches that together hold all sequences in the loss
    used: int  # the number of micro-batches that have sequences

    @property
    def cost(self) -> float:
        """The cost of the layout, in units of one micro-batch of forward and backward."""
        return self.with_loss + FORWARD_SHARE * (self.used - self.with_loss)


def lay_out_rows(lengths: Sequence[int], in_loss: Sequence[bool], shape: tuple[int, int, int]) -> Layout:
    """Lays out sequences in micro-batches, by first fit in one or two orders, and takes the cheaper layout.

    Sequences without loss fill the space that sequences in the loss leave free. Or they get micro-batches of their own
    after the others, with a forward only, if this costs less. Rows are dealt in turn to the micro-batches of one kind,
    longest sequences first. So these micro-batches are alike, and the spread of their gradients is noise. If two rows
    have loss and two micro-batches are used, at least two have loss.

    ``lengths`` include prompt and response (tokens). ``shape`` is the number of micro-batches, of rows in each, and of
    tokens in a row. First fit needs at most ``packing.max_micro_batches`` micro-batches, in any order.

    Raises:
      ValueError: A sequence is longer than a row, or the sequences need more rows than there are.
    """
    micro_batches, rows_per_micro_batch, row_tokens = shape
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    loss_first = sorted(longest_first, key=lambda i: not in_loss[i])
    layouts = [
        deal_rows(first_fit(lengths, order, row_tokens), in_loss, rows_per_micro_batch)
        for order in ([longest_first] if all(in_loss) else [longest_first, loss_first])
    ]
    fitting = [layout for layout in layouts if layout.used <= micro_batches]
    if not fitting:
        count = len(layouts[0].rows)
        raise ValueError(f"{count} rows do not fit {micro_batches} micro-batches of {rows_per_micro_batch}")
    return min(fitting, key=lambda layout: layout.cost)


def deal_rows(rows: Sequence[list[int]], in_loss: Sequence[bool], rows_per_micro_batch: int) -> Layout:
    """Deals rows, lists of indices of sequences, to micro-batches: rows with loss first, otherwise in their order."""
    rows = sorted(rows, key=lambda members: not any(in_loss[i] for i in members))
    count = sum(any(in_loss[i] for i in members) for members in rows)
    used = -(-len(rows) // rows_per_micro_batch)
    with_loss = max(-(-count // rows_per_micro_batch), min(2, count, used))
    without, first = used - with_loss, with_loss * rows_per_micro_batch
    dealt = {(i % with_loss, i // with_loss): members for i, members in enumerate(rows[:first])}
    dealt |= {(with_loss + i % without, i // without): members for i, members in enumerate(rows[first:])}
    return Layout(dealt, with_loss, used)


def first_fit(lengths: Sequence[int], order: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Places each item in the first row of ``row_tokens`` that has room, in ``order``. Longest first makes few rows.

    Returns the indices of the items of each row. Raises ValueError if an item is longer than a row.
    """
    rows: list[list[int]] = []
    room = np.zeros(len(lengths), np.int64)
    for index in order:
        if lengths[index] > row_tokens:
            raise ValueError(f"a sequence of {lengths[index]} tokens does not fit a row of {row_tokens}")
        row = int(np.argmax(room[: len(rows)] >= lengths[index])) if rows else 0
        if row >= len(rows) or room[row] < lengths[index]:
            row = len(rows)
            rows.append([])
            room[row] = row_tokens
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


OptionalLogprobs = Literal["old_logprobs", "reference_logprobs", "behaviour_logprobs"]
"""The name of log-probabilities that only the batches of some runs have."""


@dataclass(frozen=True)
class PackingConfig:
    """The shape of the batches that the training step is compiled for."""

    row_tokens: int = 0
    """Length of a row (tokens), a multiple of mesh.context. 0: the longest possible sequence, rounded up to a multiple
    of 64 and of mesh.context. Above 1024 it is rounded up to a multiple of 1024 and of mesh.context, because attention
    computes long rows block by block."""
    rows_per_micro_batch: int = 8
    """Rows of a micro-batch. It must be a multiple of the sizes of the mesh axes replica, fsdp and expert together."""
    tokens_per_device: int = 0
    """Tokens of a micro-batch on one device, which has 1 / mesh.context of a row. Each part of the mesh axes replica,
    fsdp and expert gets as many rows as fit, at least one. It replaces ``rows_per_micro_batch`` and keeps its meaning
    on any mesh. 0: ``rows_per_micro_batch`` decides."""
    share_prefixes: bool = True
    """Whether a common beginning of sequences in a row is computed only once, such as the prompt of a group. A
    micro-batch then has fewer and longer rows, at least one a device, unless ``row_tokens`` is given. So it may have
    more tokens unless ``tokens_per_device`` bounds them. A run that cannot do it says why."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "row_tokens", "tokens_per_device")
        check_at_least(self, 1, "rows_per_micro_batch")

    def resolve_row_tokens(self, max_sequence_tokens: int, context: int = 1) -> int:
        """Returns the row length in tokens, which ``context`` devices can share (``rljax.policy.context``).

        Raises:
          ValueError: A sequence of ``max_sequence_tokens`` does not fit, or the devices cannot share the row.
        """
        if self.row_tokens == 0:
            multiple = math.lcm(64 if max_sequence_tokens <= 1024 else 1024, context)
            return -(-max_sequence_tokens // multiple) * multiple
        if self.row_tokens < max_sequence_tokens:
            raise ValueError(
                f"row_tokens = {self.row_tokens} is shorter than the longest possible sequence, "
                f"{max_sequence_tokens} tokens (prompt + response)"
            )
        if self.row_tokens % context:
            raise ValueError(f"packing.row_tokens = {self.row_tokens} must be a multiple of mesh.context = {context}")
        return self.row_tokens

    def resolve_rows(self, row_tokens: int, ways: int, context: int = 1) -> int:
        """Returns the number of a micro-batch's rows of ``row_tokens``, on a mesh that splits them in ``ways`` parts.

        Each row is on ``context`` devices, which have equal parts of its tokens.
        """
        if self.tokens_per_device == 0:
            return self.rows_per_micro_batch
        return ways * max(1, self.tokens_per_device * context // row_tokens)


@dataclass(frozen=True, eq=False)
class TrainSequence(TokenRecord):
    """One prompt with one response, ready for the loss."""

    advantage: float = 0.0  # the advantage of the response, unless its tokens have ``advantages`` of their own
    in_loss: bool = True  # whether the response is in the loss; False if all rewards of its group are equal
    trajectory: int = -1  # the number of its trajectory in the batch, group by group; -1: its position in the batch


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
    routes: Any = None  # uint8 or uint16 [m, b, t, l * k], 1 + the experts that each computed token goes to; 0 for any
    top_ids: Any = None  # int32 [m, b, t, k], the sampler's likeliest tokens; -1 where there are fewer
    top_logprobs: Any = None  # float32 [m, b, t, k], the sampler's log-probabilities of them; -inf where the id is -1
    trees: Any = None  # the ``PrefixTrees`` that the policy computes; arrays except ``routes`` then have only responses


_PACKED = frozenset(PackedBatch._fields)


def max_micro_batches(num_sequences: int, max_sequence_tokens: int, row_tokens: int, rows_per_micro_batch: int) -> int:
    """Returns a number of micro-batches that is enough for sequences of at most ``max_sequence_tokens`` tokens."""
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

    ``lay_out_rows`` chooses the row of each sequence. The result depends only on the sequences and their order.
    ``with_tops`` is as in ``fill``.

    Raises:
      ValueError: The sequences do not fit, or only some of them have one of the optional arrays.
    """
    lengths = [len(s.ids) for s in sequences]
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
    responses_only: bool = False,
) -> PackedBatch:
    """Fills a batch of ``shape`` (m, b, t) with sequences in chosen rows.

    ``rows`` has the indices of the sequences in each row, one after another, by (micro-batch, row). They must fit.
    ``with_tops``: Whether the batch gets ``top_ids`` and ``top_logprobs``, if the sequences have them.
    ``responses_only``: Whether prompts and routes are left out. In the result ``with_loss`` is equal to ``used``.

    Raises:
      ValueError: Only some of the sequences have one of the optional arrays.
    """
    left_out = (*(() if with_tops else TOPS), *(("routes",) if responses_only else ()))
    names = [name for name in common_columns(sequences) if name in _PACKED and name not in left_out]
    kinds: dict[str, Any] = dict.fromkeys(("tokens", "segment_ids", "positions", "sequence_ids"), np.int32)
    kinds |= dict.fromkeys(("response_mask", "loss_mask"), np.bool_)
    arrays = {name: np.zeros(shape, dtype) for name, dtype in kinds.items()}
    for name in dict.fromkeys(("rollout_logprobs", "advantages", "staleness", *names)):
        like = sequences[0].columns[name] if name in names else np.zeros(0, COLUMNS[name].dtype)
        axes = [math.prod(like.shape[1:])] if like.ndim > 1 else []
        arrays[name] = np.zeros((*shape, *axes), like.dtype)
    used = 1 + max((micro for micro, _ in rows), default=-1)
    for row in itertools.product(range(used), range(shape[1])):  # The others are never computed.
        place = {name: array[row] for name, array in arrays.items()}
        start = 0
        for segment, index in enumerate(rows.get(row, ()), 1):
            s = sequences[index]
            skipped = s.prompt_length if responses_only else 0
            middle, end = start + s.prompt_length - skipped, start + len(s.ids) - skipped
            place["tokens"][start:end] = s.ids[skipped:]
            place["segment_ids"][start:end] = segment
            place["positions"][start:end] = np.arange(skipped, len(s.ids))
            place["sequence_ids"][start:end] = index
            place["response_mask"][middle:end] = s.sampled
            place["loss_mask"][middle:end] = s.in_loss & s.sampled
            place["advantages"][middle:end] = s.advantage
            for name in names:
                place[name][start:end] = s.columns[name][skipped:].reshape(end - start, *place[name].shape[1:])
            if "routes" in names:
                place["routes"][end - 1] = 0  # no token is predicted from the last one
            start = end
        for name in names:
            if COLUMNS[name].fill:
                place[name][start:] = COLUMNS[name].fill
    count = np.asarray(used, np.int32)
    return PackedBatch(**arrays, with_loss=count, used=count)


def groups_of(sequences: Sequence[TrainSequence], group_size: int) -> list[range]:
    """Returns the indices of the sequences of each group of ``group_size`` trajectories, in order."""
    groups = trajectories(sequences) // group_size
    starts = np.flatnonzero(np.diff(groups, prepend=-1)).tolist()
    return [range(start, end) for start, end in itertools.pairwise([*starts, len(sequences)])]


def trajectories(sequences: Sequence[TrainSequence]) -> np.ndarray:
    """Returns the number of each sequence's trajectory, int64 [n], in rising order."""
    numbers = [i if s.trajectory < 0 else s.trajectory for i, s in enumerate(sequences)]
    return np.asarray(numbers, np.int64)


def unpack_whole(values: Any, batch: PackedBatch, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
    """Splits values [m, b, t, ...] of a packed batch into one array for each sequence, of its tokens in the batch."""
    mask = np.asarray(batch.segment_ids) > 0
    # A sequence lies in one row, so a stable sort keeps its tokens in order.
    order = np.argsort(np.asarray(batch.sequence_ids)[mask], kind="stable")
    lengths = [len(s.ids if batch.trees is None else s.response) for s in sequences]
    return np.split(np.asarray(values)[mask][order], np.cumsum(lengths)[:-1])


def unpack(values: np.ndarray, batch: PackedBatch, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
    """Returns one array [r, ...] for each sequence: the values of its response in a packed batch [m, b, t, ...].

    If ``values`` has one number for each token, tokens that an environment wrote get 0.
    """
    every = zip(unpack_whole(values, batch, sequences), sequences, strict=True)
    responses = [(each[len(each) - len(s.response) :], s) for each, s in every]
    return [np.where(s.sampled, each, 0) if each.ndim == 1 and "turn" in s.columns else each for each, s in responses]


def useful_fraction(sequences: Sequence[TrainSequence], batch: PackedBatch) -> float:
    """Returns the share of the positions of the used micro-batches that hold a token and not padding."""
    computed = batch.tokens if batch.trees is None else batch.trees.tokens
    count = sum(len(s.ids) for s in sequences) if batch.trees is None else np.count_nonzero(batch.trees.ends)
    return float(count / (int(batch.used) * math.prod(computed.shape[1:])))


def shared_fraction(sequences: Sequence[TrainSequence], batch: PackedBatch) -> float:
    """Returns the share of tokens, without each sequence's last, that trees save from computation; 0 without trees."""
    if batch.trees is None:
        return 0.0
    return 1.0 - np.count_nonzero(batch.trees.ends) / max(1, sum(len(s.ids) - 1 for s in sequences))
