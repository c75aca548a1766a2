"""The totals of the micro-batches of a step, and the update that they make."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from rljax.mismatch import Statistics, merge, zeros
from rljax.policy.model import Params
from rljax.schedule import get_learning_rate, set_learning_rate
from rljax.sharding import put
from rljax.trainer.micro_batches import merge_over_replicas, sum_over_replicas
from rljax.trainer.objective import Objective, loss_row
from rljax.trainer.packing import PackedBatch
from rljax.trainer.state import TrainState, adjust_loss_scale


class Totals(NamedTuple):
    """The sums over micro-batches."""

    grads: Params  # the gradients of the scaled loss over the provisional denominator, float32
    square_norms: jax.Array  # the sum of the squared norms of the micro-batches' gradients, []; 0 if not measured
    number: jax.Array  # int32 [], the number of micro-batches with loss; each copy of the weights counts its own
    loss: Statistics  # the statistics of Objective.micro_loss
    measured: dict[str, Statistics]  # the statistics of measure, by group


class Controls(NamedTuple):
    """The scalar arguments of a step, on every device."""

    learning_rate: jax.Array  # float32 []
    apply_update: jax.Array  # bool []
    measure_noise: jax.Array  # bool [], whether to measure the gradient noise


def place_controls(learning_rate: float, apply_update: bool, measure_noise: bool, where: NamedSharding) -> Controls:
    """Puts the scalar arguments of a step on the devices, each with the sharding ``where``."""
    values = Controls(np.float32(learning_rate), np.bool_(apply_update), np.bool_(measure_noise))  # type: ignore[arg-type]
    return put(values, where)


def square_norm(grads: Params) -> jax.Array:
    """Returns the squared global norm of the gradients, a float32 scalar."""
    return sum((jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)), start=jnp.float32(0.0))


def zero_totals(grads: Params, loss: Statistics, measured: dict[str, Statistics]) -> Totals:
    """Returns totals of zero. The arguments give the shapes and dtypes of the sums of one micro-batch."""
    no_grads = jax.tree.map(lambda shape: jnp.zeros(shape.shape, jnp.float32), grads)
    return Totals(no_grads, jnp.float32(0.0), jnp.int32(0), zeros(loss), zeros(measured))


def add_micro_batch(
    totals: Totals, grads: Params, loss: Statistics, measured: dict[str, Statistics], measure_noise: jax.Array
) -> Totals:
    """Adds the sums of one micro-batch to the totals."""
    norm = jax.lax.cond(measure_noise, square_norm, lambda _: jnp.float32(0.0), grads)
    return Totals(
        jax.tree.map(lambda total, g: total + g.astype(jnp.float32), totals.grads, grads),
        totals.square_norms + norm,
        totals.number + (loss["token_count"] > 0),
        merge(totals.loss, loss),
        merge(totals.measured, measured),
    )


def add_up_replicas(totals: Totals) -> Totals:
    """Adds up the totals of all copies of the weights. It is called inside ``on_each_replica``."""
    grads, square_norms, number = sum_over_replicas((totals.grads, totals.square_norms, totals.number))
    loss, measured = merge_over_replicas(totals.loss), merge_over_replicas(totals.measured)
    return Totals(grads, square_norms, number, loss, measured)


def update_state(
    state: TrainState,
    totals: Totals,
    batch: PackedBatch,
    tx: optax.GradientTransformation,
    objective: Objective,
    controls: Controls,
    *,
    dynamic: bool,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Unscales and clips the gradients, and applies the update or skips it.

    ``dynamic`` says whether the loss scale is dynamic. Returns the state after the update, and the metrics of the row
    except those from ``finalize_measured``.
    """
    rescaling = objective.rescaling(totals.loss, objective.provisional(batch))
    factor = rescaling / state.loss_scale.scale

    def unscaled() -> Params:
        return jax.tree.map(lambda g: g * factor, totals.grads)

    grad_norm = optax.tree.norm(unscaled())
    finite = jnp.isfinite(grad_norm)
    opt_state = set_learning_rate(state.opt_state, controls.learning_rate)

    def update(params: Params, opt_state: Any) -> tuple[Params, Any]:
        updates, opt_state = tx.update(unscaled(), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    wanted = controls.apply_update & (totals.loss["denominator"] > 0)
    applied = wanted & finite
    params, opt_state = jax.lax.cond(applied, update, lambda p, s: (p, s), state.params, opt_state)
    # A batch without loss has zero gradients, which show nothing about the scale.
    adjusted = adjust_loss_scale(state.loss_scale, finite, dynamic=dynamic)
    loss_scale = jax.tree.map(lambda new, old: jnp.where(wanted, new, old), adjusted, state.loss_scale)
    state = TrainState(params, opt_state, loss_scale, state.skipped_updates + jnp.where(applied, 0, 1))
    noise = gradient_noise(totals.square_norms * factor**2, grad_norm**2, totals.number)
    return state, loss_row(objective, totals.loss, rescaling) | {
        "optimizer/grad_norm": grad_norm,
        "optimizer/grad_noise": jnp.where(controls.measure_noise, noise, jnp.nan),
        "optimizer/skipped_updates": state.skipped_updates,
        "precision/loss_scale": state.loss_scale.scale,
        "precision/overflows": state.loss_scale.overflows,
        "schedule/learning_rate": get_learning_rate(state.opt_state),
    }


def gradient_noise(square_norms: jax.Array, square_of_sum: jax.Array, count: jax.Array) -> jax.Array:
    """Estimates the variance of the step's gradient from the spread of its micro-batches.

    K micro-batches have gradients g_k that add up to the step's gradient G. Then K / (K - 1) sum_k norm(g_k - G / K)^2
    is an unbiased estimate of E norm(G - E G)^2, the trace of the covariance of G. Source: arXiv 1812.06162, appendix
    A.1, which uses two batch sizes instead.

    ``square_norms`` is the sum of norm(g_k)^2, and ``square_of_sum`` the squared norm of G, float32 scalars. ``count``
    is K, an int32 scalar. For K below 2 the variance is NaN.
    """
    k = count.astype(jnp.float32)
    variance = k / jnp.maximum(k - 1, 1) * jnp.maximum(square_norms - square_of_sum / jnp.maximum(k, 1), 0.0)
    return jnp.where(count > 1, variance, jnp.nan)
