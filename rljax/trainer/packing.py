"""Sequences of any length into the arrays of rows of one length, with segment ids that keep them apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from rljax.errors import check_at_least
from rljax.trainer.rows import lay_out_rows

Given = Literal["old_logprobs", "reference_logprobs", "behaviour_logprobs"]
"""Log-probabilities that the batches of a run have or have not."""


@dataclass(frozen=True)
class PackingConfig:
    """The one shape the training step is compiled for."""

    row_tokens: int = 0
    """Length of a row (tokens). 0: the longest sequence that can occur, rounded up to a multiple of 64, or above 1024
    to a multiple of 1024 (attention computes long rows block by block)."""
    rows_per_micro_batch: int = 8
    """Rows of a micro-batch. It must be a multiple of the sizes of the mesh axes replica, fsdp and expert together."""
    tokens_per_device: int = 0
    """Tokens of a micro-batch on a device: as many rows as fit, at least one, on each part of the mesh axes replica,
    fsdp and expert. It takes the place of ``rows_per_micro_batch`` and keeps its meaning on any mesh. 0:
    ``rows_per_micro_batch`` decides."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "row_tokens", "tokens_per_device")
        check_at_least(self, 1, "rows_per_micro_batch")

    def resolve_row_tokens(self, max_sequence_tokens: int) -> int:
        """Row length in tokens. Raises ValueError when a sequence of ``max_sequence_tokens`` would not fit."""
        if self.row_tokens == 0:
            multiple = 64 if max_sequence_tokens <= 1024 else 1024
            return -(-max_sequence_tokens // multiple) * multiple
        if self.row_tokens < max_sequence_tokens:
            raise ValueError(
                f"row_tokens = {self.row_tokens} is shorter than the longest possible sequence, "
                f"{max_sequence_tokens} tokens (prompt + response)"
            )
        return self.row_tokens

    def resolve_rows(self, row_tokens: int, ways: int) -> int:
        """Rows of a micro-batch, of ``row_tokens`` each, on a mesh that splits rows ``ways`` ways."""
        if self.tokens_per_device == 0:
            return self.rows_per_micro_batch
        return ways * max(1, self.tokens_per_device // row_tokens)


class TrainSequence(NamedTuple):
    """One prompt with one response, ready for the loss."""

    prompt: np.ndarray  # int32 [p]
    response: np.ndarray  # int32 [r]
    rollout_logprobs: np.ndarray  # float32 [r]
    advantage: float
    in_loss: bool  # False: measured only (its group's rewards are all equal)
    staleness: np.ndarray | None = None  # int32 [r]: policy versions between sampling the token and this step; None: 0
    old_logprobs: np.ndarray | None = None  # float32 [r]: of the trainer before the first update on this batch
    reference_logprobs: np.ndarray | None = None  # float32 [r]: of the frozen reference policy
    behaviour_logprobs: np.ndarray | None = None  # float32 [r]: of the policy that sampled a stale token, or NaN
    routes: np.ndarray | None = None  # uint8 or uint16 [p + r - 1, l, k]: experts that each token but the last goes to


class PackedBatch(NamedTuple):
    """Micro-batches of packed rows; m micro-batches, b rows, t tokens. A pytree of numpy or jax arrays.

    Rows beyond the ``used`` micro-batches are padding and are never computed on. The first ``with_loss`` of these take
    forward and backward, the others carry no loss and take a forward alone.
    """

    tokens: Any  # int32 [m, b, t]
    segment_ids: Any  # int32 [m, b, t]: 0 padding, 1.. sequences of the row
    positions: Any  # int32 [m, b, t]: 0.. inside each sequence
    sequence_ids: Any  # int32 [m, b, t]: index of the sequence in the batch; 0 on padding
    response_mask: Any  # bool [m, b, t]: this token was sampled by the rollout engine
    loss_mask: Any  # bool [m, b, t]: and carries loss
    rollout_logprobs: Any  # float32 [m, b, t]: of the token at the same place; 0 outside the response
    advantages: Any  # float32 [m, b, t]
    staleness: Any  # int32 [m, b, t]: policy versions between sampling the token and this step
    with_loss: Any  # int32 []: micro-batches, the first ones, that hold all tokens that carry loss
    used: Any  # int32 []: micro-batches that hold anything
    old_logprobs: Any = None  # float32 [m, b, t], or None when no sequence has them
    reference_logprobs: Any = None  # float32 [m, b, t], or None when no sequence has them
    behaviour_logprobs: Any = None  # float32 [m, b, t], NaN where not known, or None when no sequence has them
    routes: Any = None  # uint8 or uint16 [m, b, t, l * k]: 1 + the experts that a token goes to, 0: any; or None


def max_micro_batches(num_sequences: int, max_sequence_tokens: int, row_tokens: int, rows_per_micro_batch: int) -> int:
    """Micro-batches that always suffice: every row but the last holds at least floor(row / longest) sequences."""
    rows = -(-num_sequences // (row_tokens // max_sequence_tokens))
    return -(-rows // rows_per_micro_batch)


def pack(
    sequences: Sequence[TrainSequence], *, row_tokens: int, rows_per_micro_batch: int, micro_batches: int
) -> PackedBatch:
    """Packs a batch into ``[micro_batches, rows_per_micro_batch, row_tokens]``.

    The result depends only on the sequences, not on the order in which responses arrived; ``rows.lay_out_rows`` says
    which go where.

    Raises:
      ValueError: the sequences do not fit, or only some of them have one of the optional log-probabilities.
    """
    lengths = [len(s.prompt) + len(s.response) for s in sequences]
    layout = lay_out_rows(
        lengths,
        [s.in_loss for s in sequences],
        row_tokens=row_tokens,
        rows_per_micro_batch=rows_per_micro_batch,
        micro_batches=micro_batches,
    )
    batch = fill(sequences, layout.rows, (micro_batches, rows_per_micro_batch, row_tokens))
    return batch._replace(with_loss=np.asarray(layout.with_loss, np.int32))


def fill(
    sequences: Sequence[TrainSequence], rows: Mapping[tuple[int, int], Sequence[int]], shape: tuple[int, int, int]
) -> PackedBatch:
    """The batch [m, b, t] whose row (micro-batch, row) holds these ``sequences`` one after another; they must fit.

    ``with_loss`` of it is ``used``.

    Raises:
      ValueError: only some of them have one of the optional log-probabilities.
    """
    given = [name for name in get_args(Given) if _have(sequences, name)]
    ints = ("tokens", "segment_ids", "positions", "sequence_ids", "staleness")
    floats = ("rollout_logprobs", "advantages", *given)
    arrays = {name: np.zeros(shape, np.int32) for name in ints} | {name: np.zeros(shape, np.float32) for name in floats}
    arrays |= {name: np.zeros(shape, np.bool_) for name in ("response_mask", "loss_mask")}
    if _have(sequences, "routes"):
        arrays["routes"] = _no_routes(sequences[0].routes, shape)
    for row, members in rows.items():
        place = {name: array[row] for name, array in arrays.items()}
        start = 0
        for segment, index in enumerate(members, 1):
            s = sequences[index]
            middle = start + len(s.prompt)
            end = middle + len(s.response)
            place["tokens"][start:middle] = s.prompt
            place["tokens"][middle:end] = s.response
            place["segment_ids"][start:end] = segment
            place["positions"][start:end] = np.arange(end - start)
            place["sequence_ids"][start:end] = index
            place["response_mask"][middle:end] = True
            place["loss_mask"][middle:end] = s.in_loss
            place["advantages"][middle:end] = s.advantage
            place["staleness"][middle:end] = 0 if s.staleness is None else s.staleness
            for name in ("rollout_logprobs", *given):
                place[name][middle:end] = getattr(s, name)
            if s.routes is not None:
                place["routes"][start : end - 1] = s.routes.reshape(len(s.routes), -1) + 1
            start = end
    used = np.asarray(1 + max((micro for micro, _ in rows), default=-1), np.int32)
    return PackedBatch(**arrays, with_loss=used, used=used)


def _no_routes(like: Any, shape: tuple[int, int, int]) -> np.ndarray:
    """Routes [m, b, t, l * k] of tokens that may go anywhere; memory of the host is taken where some are written."""
    return np.zeros((*shape, math.prod(like.shape[1:])), like.dtype)


def _have(sequences: Sequence[TrainSequence], name: str) -> bool:
    has = [getattr(s, name) is not None for s in sequences]
    if any(has) and not all(has):
        raise ValueError(f"{name} must be given for all sequences or for none, got {sum(has)} of {len(has)}")
    return any(has)


def unpack(values: np.ndarray, batch: PackedBatch, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
    """The response tokens' ``values`` [m, b, t] of a packed batch, one vector [r] for each sequence."""
    mask = np.asarray(batch.response_mask)
    # A stable sort keeps the tokens of a sequence in order: all of it lies in one row.
    order = np.argsort(np.asarray(batch.sequence_ids)[mask], kind="stable")
    lengths = np.cumsum([len(s.response) for s in sequences])
    return np.split(np.asarray(values)[mask][order], lengths[:-1])


def unpack_routes(routes: np.ndarray, batch: PackedBatch, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
    """``TrainSequence.routes`` of each sequence, [p + r - 1, 1, l * k], from those of a batch [m, b, t, l * k]."""
    mask = np.asarray(batch.segment_ids) > 0
    order = np.argsort(np.asarray(batch.sequence_ids)[mask], kind="stable")
    lengths = np.cumsum([len(s.prompt) + len(s.response) for s in sequences])
    found = np.split(np.asarray(routes)[mask][order], lengths[:-1])
    return [each[:-1, None] - np.ones((), each.dtype) for each in found]


def useful_fraction(sequences: Sequence[TrainSequence], batch: PackedBatch) -> float:
    """Share of the computed places that hold a token."""
    _, rows, tokens = batch.tokens.shape
    return sum(len(s.prompt) + len(s.response) for s in sequences) / (int(batch.used) * rows * tokens)
