"""The tokens of a batch: two log-probabilities per token and a mask, checked and divided into sequences.

Each row is one sequence, or several sequences are packed into a row. An array with one number for each sequence is
``[b, s]``. If rows are sequences, it is ``[b, 1]``. In packed rows it is ``[b, t]``, with the number at the last valid
token of the sequence and meaningless values elsewhere. No operation crosses rows or scatters, so rows may be sharded,
and a second run gives the same bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from jax import lax

from rljax.mismatch.accurate import Total, add_totals, exp_minus_one_minus_x, total_over, value_of
from rljax.mismatch.arrays import ArrayLike, as_float, check_shape, namespace_of

LARGEST_LOGPROB = 1e8
"""A log-probability of larger magnitude (nats) counts as not finite.

Some engines write the lowest float, -3.4e38, for -inf. The sum of two such numbers would be infinite.
"""


@dataclass(frozen=True)
class Sequences:
    """The sequences of a batch.

    Sums over a sequence are carried as two floats, so a sum is the same wherever the sequence lies in its row.
    """

    xp: ModuleType  # numpy or jax.numpy
    start: Any  # [b, t] int32: index of the first token of the token's sequence; None when rows are sequences
    end: Any  # [b, t] int32: index of the last valid token of the token's sequence; None when rows are sequences
    position: Any  # [b, t] int32: 1..n over the valid tokens of a sequence
    length: Any  # [b, t] int32: n, the valid tokens of the token's sequence
    present: Any  # [b, s] bool: True at the place of each sequence with at least one valid token
    present_length: Any  # [b, s] int32: the number of valid tokens of the sequence at this place

    def sums(self, values: Any) -> Any:
        """Sums values, [..., b, t] float and 0 outside the valid tokens, over each sequence, [..., b, s]."""
        xp, t = self.xp, values.shape[-1]
        if self.end is None:
            return value_of(total_over(xp, values, (values.ndim - 1,)))[..., None]
        index, zeros = xp.arange(t, dtype=np.int32)[None], xp.zeros_like(values)

        def double(step: Any, total: Total) -> Total:
            """Doubles the windows of 2^step tokens. No window reaches beyond the first token of its sequence."""
            shift = 2**step
            inside = xp.broadcast_to(index - shift >= self.start, values.shape)
            return add_totals(total, Total(*(xp.where(inside, _shifted(xp, part, zeros, shift), 0) for part in total)))

        total, steps = Total(values, zeros), max(t - 1, 0).bit_length()
        if xp is not np:
            return value_of(lax.fori_loop(0, steps, double, total))
        for step in range(steps):
            total = double(step, total)
        return value_of(total)

    def means(self, values: Any) -> Any:
        """Computes the mean of each sequence over its valid tokens, [..., b, s]; 0 if it has none."""
        return self.per_token(self.sums(values))

    def per_token(self, sums: Any) -> Any:
        """Divides sums, [..., b, s], by each sequence's number of valid tokens, or by 1 if it has none."""
        length = self.xp.maximum(self.present_length, 1).astype(sums.dtype)
        return sums / self.xp.broadcast_to(length, sums.shape)

    def spread(self, numbers: Any) -> Any:
        """Repeats the number of each sequence, [b, s], over its tokens, [b, t]. Other tokens get arbitrary numbers."""
        if self.end is None:
            return self.xp.broadcast_to(numbers, self.position.shape)
        return self.xp.take_along_axis(numbers, self.end, axis=1)


def read_sequences(valid: Any, sequence_ids: ArrayLike | None, num_sequences: int | None) -> Sequences:
    """Finds the sequences of a batch.

    Args:
      valid: The tokens that count, bool [b, t].
      sequence_ids: The index of each token's sequence in 0 .. num_sequences - 1, int [b, t]. None: every row is one
        sequence. Each sequence lies whole in one row, and neighbouring sequences of a row differ in index. Values at
        tokens that do not count are ignored.
      num_sequences: The number of sequences in the arrays (static). It is required exactly with ``sequence_ids``.

    Raises:
      ValueError: Only one of the two is given, or the shapes differ. On the host also: an index is out of range, or a
        sequence is split.
    """
    if (sequence_ids is None) != (num_sequences is None):
        missing = "sequence_ids" if sequence_ids is None else "num_sequences"
        raise ValueError(f"sequence_ids and num_sequences must be given together, got no {missing}")
    xp = namespace_of(valid)
    running = xp.cumsum(valid, axis=1, dtype=np.int32)
    if sequence_ids is None:
        length = xp.sum(valid, axis=1, keepdims=True, dtype=np.int32)
        every = xp.broadcast_to(length, valid.shape)
        return Sequences(xp, None, None, running, every, length > 0, length)
    check_shape("sequence_ids", sequence_ids, valid.shape)
    start, end = _bounds(xp, valid, xp.asarray(sequence_ids))
    before = xp.take_along_axis(running, start, axis=1) - 1
    length = xp.take_along_axis(running, end, axis=1) - before
    index = xp.arange(valid.shape[1], dtype=np.int32)[None]
    if xp is np:
        _check_ids(np.asarray(sequence_ids)[valid & (index == start)], np.asarray(sequence_ids)[valid], num_sequences)
    return Sequences(xp, start, end, running - before, length, valid & (index == end), length)


def _bounds(xp: ModuleType, valid: Any, ids: Any) -> tuple[Any, Any]:
    """Returns the first and last index, [b, t] int32, of each token's sequence. Holes belong to the sequence before."""
    t = valid.shape[1]
    index = xp.broadcast_to(xp.arange(t, dtype=np.int32)[None], valid.shape)
    last_valid = _running_maximum(xp, xp.where(valid, index, -1))
    previous = xp.concatenate([xp.full_like(last_valid[:, :1], -1), last_valid[:, :-1]], axis=1)
    previous_id = xp.take_along_axis(ids, xp.maximum(previous, 0), axis=1)
    opens = valid & ((previous < 0) | (previous_id != ids))
    start = xp.maximum(_running_maximum(xp, xp.where(opens, index, -1)), 0)
    # A sequence ends at the last valid token before the next one opens.
    closes = xp.where(opens & (previous >= 0), previous, t)
    later = xp.concatenate([closes[:, 1:], xp.full_like(closes[:, :1], t)], axis=1)
    end = -_running_maximum(xp, -later[:, ::-1])[:, ::-1]
    return start, xp.where(end == t, xp.maximum(last_valid[:, -1:], 0), end)


def _running_maximum(xp: ModuleType, values: Any) -> Any:
    return np.maximum.accumulate(values, axis=1) if xp is np else lax.cummax(values, axis=1)


def _check_ids(opening: np.ndarray, all_ids: np.ndarray, num_sequences: int | None) -> None:
    if num_sequences is None or num_sequences < 1:
        raise ValueError(f"num_sequences must be at least 1, got {num_sequences}")
    if all_ids.size and not 0 <= all_ids.min() <= all_ids.max() < num_sequences:
        span = f"{all_ids.min()} .. {all_ids.max()}"
        raise ValueError(f"sequence_ids must lie in 0 .. {num_sequences - 1} inside the mask, got {span}")
    ids, pieces = np.unique(opening, return_counts=True)
    if (pieces > 1).any():
        raise ValueError(f"each sequence must be whole inside one row, got pieces of {ids[pieces > 1].tolist()}")


def _shifted(xp: ModuleType, values: Any, zeros: Any, shift: Any) -> Any:
    """Shifts values by ``shift`` tokens along the row and fills with zeros."""
    if xp is np:
        return np.concatenate([zeros[..., :shift], values[..., :-shift]], axis=-1)
    padded = xp.concatenate([zeros, values], axis=-1)
    return lax.dynamic_slice_in_dim(padded, values.shape[-1] - shift, values.shape[-1], axis=-1)


@dataclass(frozen=True)
class Tokens:
    """The input of every measurement and correction. Outside ``valid`` all numbers are 0, so that no NaN can leak."""

    xp: ModuleType  # numpy or jax.numpy
    trainer: Any  # [b, t] log-probability under the trainer (nats)
    rollout: Any  # [b, t] log-probability under the rollout engine (nats)
    log_ratio: Any  # [b, t] trainer - rollout (nats)
    valid: Any  # [b, t] bool: in the mask and finite on both sides (within LARGEST_LOGPROB)
    nonfinite: Any  # [b, t] bool: in the mask and not finite on at least one side
    sequences: Sequences  # the sequences of the valid tokens
    mask_sequences: Sequences  # the sequences of the valid and the nonfinite tokens

    @functools.cached_property
    def k3(self) -> Any:
        """The terms of the k3 estimate of KL(rollout || trainer), [b, t] (nats). They are computed once."""
        return exp_minus_one_minus_x(self.xp, self.log_ratio)

    @property
    def mask(self) -> Any:
        """The response mask, [b, t] bool."""
        return self.valid | self.nonfinite


def read_tokens(
    trainer_logprobs: ArrayLike,
    rollout_logprobs: ArrayLike,
    response_mask: ArrayLike,
    *,
    sequence_ids: ArrayLike | None = None,
    num_sequences: int | None = None,
) -> Tokens:
    """Checks the arrays of a batch and finds its sequences.

    It works under jit, grad (without gradient), vmap and scan, and with rows sharded over Auto mesh axes.

    Args:
      trainer_logprobs, rollout_logprobs: The log-probability of each token under either engine, [b, t] float, nats.
      response_mask: The response mask, [b, t] bool, int or float. A token counts where it is not 0. Holes are allowed.
      sequence_ids, num_sequences: The arguments of ``read_sequences``. None: each row is one sequence.

    Raises:
      ValueError: The shapes differ or are not two-dimensional, or the sequences break these rules.
    """
    shape = np.shape(trainer_logprobs)
    if len(shape) != 2:
        raise ValueError(f"trainer_logprobs must be [b, t], got shape {shape}")
    check_shape("rollout_logprobs", rollout_logprobs, shape)
    check_shape("response_mask", response_mask, shape)
    xp = namespace_of(trainer_logprobs, rollout_logprobs, response_mask)
    trainer, rollout = as_float(xp, trainer_logprobs), as_float(xp, rollout_logprobs)
    mask = xp.asarray(response_mask) != 0
    finite = (xp.abs(trainer) <= LARGEST_LOGPROB) & (xp.abs(rollout) <= LARGEST_LOGPROB)  # False for NaN
    valid = mask & finite
    trainer, rollout = xp.where(valid, trainer, 0), xp.where(valid, rollout, 0)
    both = (read_sequences(tokens, sequence_ids, num_sequences) for tokens in (valid, mask))
    return Tokens(xp, trainer, rollout, trainer - rollout, valid, mask & ~finite, *both)
