"""What every function of this room takes: two log-probabilities per token and a mask, checked and made safe."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ArrayLike = Any
"""A numpy or a jax array; in one call either all are numpy (float64 on the host) or at least one is jax."""


LARGEST_LOGPROB = 1e8
"""Beyond this (nats, either sign) a log-probability counts as not finite.

Some engines write the lowest float, -3.4e38, for -inf; summed, two of those would be infinite.
"""


class Tokens(NamedTuple):
    """The tokens of one call. Outside ``valid`` every number is 0, so that no NaN of padding can leak."""

    xp: ModuleType  # numpy or jax.numpy
    trainer: Any  # [b, t] log-probability under the trainer (nats)
    rollout: Any  # [b, t] log-probability under the rollout engine (nats)
    log_ratio: Any  # [b, t] trainer - rollout (nats)
    valid: Any  # [b, t] bool: in the mask and finite on both sides (within LARGEST_LOGPROB)
    nonfinite: Any  # [b, t] bool: in the mask and not finite on either side


def namespace_of(*arrays: ArrayLike) -> ModuleType:
    """jax.numpy when any argument is a jax array (or tracer), else numpy."""
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np


def as_float(xp: ModuleType, array: ArrayLike) -> Any:
    """The array in float64 on the host; on the device in float32, or float64 when it is that already; no gradient."""
    if xp is np:
        return np.asarray(array, np.float64)
    array = jnp.asarray(array)
    return jax.lax.stop_gradient(array.astype(jnp.promote_types(array.dtype, jnp.float32)))


def check_shape(name: str, array: ArrayLike, expected: tuple[int, ...]) -> None:
    """Raise ValueError unless ``array`` has the ``expected`` shape."""
    if np.shape(array) != expected:
        raise ValueError(f"{name} must have the shape of trainer_logprobs {expected}, got {np.shape(array)}")


def read_tokens(trainer_logprobs: ArrayLike, rollout_logprobs: ArrayLike, response_mask: ArrayLike) -> Tokens:
    """Check the three arrays and put them side by side.

    Args:
      trainer_logprobs: [b, t] float, nats.
      rollout_logprobs: [b, t] float, nats.
      response_mask: [b, t] bool, int or float; a token counts where it is not 0.

    Raises:
      ValueError: the shapes differ or are not two-dimensional.
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
    return Tokens(
        xp=xp,
        trainer=trainer,
        rollout=rollout,
        log_ratio=trainer - rollout,
        valid=valid,
        nonfinite=mask & ~finite,
    )


def count(xp: ModuleType, flags: Any) -> Any:
    """How many flags are set: int64 on the host, int32 on the device."""
    return xp.sum(flags, dtype=np.int64 if xp is np else np.int32)
