"""Sequences of any length into rows of one length: first-fit-decreasing, with segment ids that keep them apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class PackingConfig:
    """The one shape the training step is compiled for.

    Attributes:
      row_tokens: tokens of a row; 0 means the longest sequence that can occur, rounded up to a multiple of 64, or of
        1024 above that (attention goes through long rows in chunks of 1024 queries).
      rows_per_micro_batch: rows of a micro-batch; a multiple of the mesh's fsdp size.
    """

    row_tokens: int = 0
    rows_per_micro_batch: int = 8

    def __post_init__(self) -> None:
        if self.row_tokens < 0:
            raise ValueError(f"row_tokens must not be negative, got {self.row_tokens}")
        if self.rows_per_micro_batch < 1:
            raise ValueError(f"rows_per_micro_batch must be at least 1, got {self.rows_per_micro_batch}")

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


class TrainSequence(NamedTuple):
    """One prompt with one response, ready for the loss."""

    prompt: np.ndarray  # int32 [p]
    response: np.ndarray  # int32 [r]
    rollout_logprobs: np.ndarray  # float32 [r]
    advantage: float
    in_loss: bool  # False: measured only (its group's rewards are all equal)


class PackedBatch(NamedTuple):
    """Micro-batches of packed rows; m micro-batches, b rows, t tokens. A pytree of numpy or jax arrays.

    Rows beyond the ``used`` micro-batches are padding and are never computed on.
    """

    tokens: Any  # int32 [m, b, t]
    segment_ids: Any  # int32 [m, b, t]: 0 padding, 1.. sequences of the row
    positions: Any  # int32 [m, b, t]: 0.. inside each sequence
    sequence_ids: Any  # int32 [m, b, t]: index of the sequence in the batch; 0 on padding
    response_mask: Any  # bool [m, b, t]: this token was sampled by the rollout engine
    loss_mask: Any  # bool [m, b, t]: and carries loss
    rollout_logprobs: Any  # float32 [m, b, t]: of the token at the same place; 0 outside the response
    advantages: Any  # float32 [m, b, t]
    used: Any  # int32 []: micro-batches that hold anything


def first_fit_decreasing(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Places each item, longest first, in the first row with room. Returns the item indices of each row.

    Raises:
      ValueError: an item longer than a row.
    """
    rows: list[list[int]] = []
    room = np.zeros(len(lengths), np.int64)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
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


def max_micro_batches(num_sequences: int, max_sequence_tokens: int, row_tokens: int, rows_per_micro_batch: int) -> int:
    """Micro-batches that always suffice: every row but the last holds at least floor(row / longest) sequences."""
    rows = -(-num_sequences // (row_tokens // max_sequence_tokens))
    return -(-rows // rows_per_micro_batch)


def pack(
    sequences: Sequence[TrainSequence], *, row_tokens: int, rows_per_micro_batch: int, micro_batches: int
) -> PackedBatch:
    """Packs a batch into ``[micro_batches, rows_per_micro_batch, row_tokens]``.

    The result depends only on the sequences, not on the order in which responses landed.

    Raises:
      ValueError: the sequences do not fit.
    """
    rows = first_fit_decreasing([len(s.prompt) + len(s.response) for s in sequences], row_tokens)
    if len(rows) > micro_batches * rows_per_micro_batch:
        raise ValueError(f"{len(rows)} rows do not fit {micro_batches} micro-batches of {rows_per_micro_batch}")
    shape = (micro_batches * rows_per_micro_batch, row_tokens)
    ints = {name: np.zeros(shape, np.int32) for name in ("tokens", "segment_ids", "positions", "sequence_ids")}
    floats = {name: np.zeros(shape, np.float32) for name in ("rollout_logprobs", "advantages")}
    masks = {name: np.zeros(shape, np.bool_) for name in ("response_mask", "loss_mask")}
    for row, members in enumerate(rows):
        start = 0
        for segment, index in enumerate(members, 1):
            s = sequences[index]
            middle = start + len(s.prompt)
            end = middle + len(s.response)
            ints["tokens"][row, start:middle] = s.prompt
            ints["tokens"][row, middle:end] = s.response
            ints["segment_ids"][row, start:end] = segment
            ints["positions"][row, start:end] = np.arange(end - start)
            ints["sequence_ids"][row, start:end] = index
            masks["response_mask"][row, middle:end] = True
            masks["loss_mask"][row, middle:end] = s.in_loss
            floats["rollout_logprobs"][row, middle:end] = s.rollout_logprobs
            floats["advantages"][row, middle:end] = s.advantage
            start = end
    split = (micro_batches, rows_per_micro_batch, row_tokens)
    arrays = {name: array.reshape(split) for name, array in {**ints, **floats, **masks}.items()}
    return PackedBatch(**arrays, used=np.asarray(-(-len(rows) // rows_per_micro_batch), np.int32))


def useful_fraction(sequences: Sequence[TrainSequence], batch: PackedBatch) -> float:
    """Share of the computed places that hold a token."""
    _, rows, tokens = batch.tokens.shape
    return sum(len(s.prompt) + len(s.response) for s in sequences) / (int(batch.used) * rows * tokens)
