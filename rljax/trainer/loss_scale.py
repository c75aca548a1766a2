"""Dynamic loss scaling for float16: keep small gradients above zero, back off when large ones overflow."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

GROWTH_INTERVAL = 400
INITIAL_SCALE = 2.0**15
MAX_SCALE = 2.0**24


class LossScale(NamedTuple):
    """State of the scaler."""

    scale: jax.Array  # shape=(), dtype=float32: the loss is multiplied by it
    good_steps: jax.Array  # shape=(), dtype=int32: finite steps since the scale last changed
    overflows: jax.Array  # shape=(), dtype=int32: steps whose gradients were not finite


def initial_loss_scale(*, dynamic: bool) -> LossScale:
    """2^15 for float16 gradients; the constant 1 (``dynamic`` False) where the dtype has float32's range."""
    scale = INITIAL_SCALE if dynamic else 1.0
    return LossScale(jnp.float32(scale), jnp.int32(0), jnp.int32(0))


def adjust_loss_scale(state: LossScale, finite: jax.Array, *, dynamic: bool) -> LossScale:
    """The scaler after a step: halved when the gradients were not finite, doubled after 400 finite steps in a row."""
    overflows = state.overflows + jnp.where(finite, 0, 1)
    if not dynamic:
        return state._replace(overflows=overflows)
    good = jnp.where(finite, state.good_steps + 1, 0)
    grow = good >= GROWTH_INTERVAL
    grown = jnp.where(grow, jnp.minimum(state.scale * 2.0, MAX_SCALE), state.scale)
    scale = jnp.where(finite, grown, jnp.maximum(state.scale * 0.5, 1.0))
    return LossScale(scale, jnp.where(grow, 0, good), overflows)
