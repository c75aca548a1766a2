"""What one training step hands to the next, and where each part of it lives on the mesh."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from rljax.policy.config import PolicyConfig
from rljax.policy.qwen3 import Params, abstract_params, param_shardings
from rljax.sharding import replicated
from rljax.trainer.loss_scale import LossScale, initial_loss_scale


class TrainState(NamedTuple):
    """Everything on the devices that a step changes; donated to it."""

    params: Params  # float32 masters
    opt_state: Any  # moments float32, sharded like the parameters
    loss_scale: LossScale
    skipped_updates: jax.Array  # shape=(), dtype=int32: updates not applied so far (no signal, or not finite)


def _initial_state(params: Params, tx: optax.GradientTransformation, *, dynamic_scale: bool) -> TrainState:
    return TrainState(params, tx.init(params), initial_loss_scale(dynamic=dynamic_scale), jnp.int32(0))


def abstract_state(
    config: PolicyConfig, tx: optax.GradientTransformation, mesh: Mesh, *, dynamic_scale: bool
) -> TrainState:
    """``jax.ShapeDtypeStruct`` with a sharding at each leaf: what a checkpoint is restored into."""
    shapes = jax.eval_shape(lambda p: _initial_state(p, tx, dynamic_scale=dynamic_scale), abstract_params(config))
    by_param = param_shardings(config, mesh)
    whole = replicated(mesh)
    opt_shardings = optax.tree.map_params(
        tx, lambda _, sharding: sharding, shapes.opt_state, by_param, transform_non_params=lambda _: whole
    )
    shardings = jax.tree.map(lambda _: whole, shapes)._replace(params=by_param, opt_state=opt_shardings)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )


def create_state(
    params: Params, config: PolicyConfig, tx: optax.GradientTransformation, mesh: Mesh, *, dynamic_scale: bool
) -> TrainState:
    """A fresh state around ``params`` (taken over: do not use them again), sharded over the mesh."""
    abstract = abstract_state(config, tx, mesh, dynamic_scale=dynamic_scale)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    make = jax.jit(lambda p: _initial_state(p, tx, dynamic_scale=dynamic_scale), out_shardings=shardings)
    return make(params)
