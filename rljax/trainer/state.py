"""What one training step hands to the next, with the optimizer and the loss scaler, and its place on the mesh."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from rljax.errors import check_finite
from rljax.policy.config import PolicyConfig
from rljax.policy.lora import OFF, LoraConfig
from rljax.policy.model import Params
from rljax.policy.trained import find_trained
from rljax.schedule import inject_learning_rate
from rljax.sharding import replicated

GROWTH_INTERVAL = 400
"""Finite steps in a row after which the loss scale is doubled."""
INITIAL_SCALE = 2.0**15
MAX_SCALE = 2.0**24


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW; the defaults are Table 1 of arXiv 2602.01826 and, where it is silent, verl's."""

    learning_rate: float = 1e-6
    """Initial learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay. As in AdamW it is multiplied by the learning rate."""
    b1: float = 0.9
    """Decay rate of the first moment."""
    b2: float = 0.999
    """Decay rate of the second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    clip_norm: float = 1.0
    """The global norm of the gradient is clipped to this value. 0: no clipping."""

    def __post_init__(self) -> None:
        if not 0.0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}")
        check_finite(self, "weight_decay", "eps", "clip_norm")
        for name in ("b1", "b2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")


@functools.lru_cache(maxsize=8)
def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Clip by global norm, then AdamW, with the rate injected as a float32 hyperparameter.

    Moments take the dtype of the parameters, which are the float32 masters. Equal configurations give the same object,
    which programs are kept by.
    """

    def build(learning_rate: Any) -> optax.GradientTransformation:
        adamw = optax.adamw(learning_rate, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay)
        return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw) if config.clip_norm else adamw

    return inject_learning_rate(build, config.learning_rate)


class LossScale(NamedTuple):
    """State of the loss scaler: it keeps small float16 gradients above zero and backs off when large ones overflow."""

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


class TrainState(NamedTuple):
    """Everything on the devices that a step changes; donated to it."""

    params: Params  # float32: the masters, or the adapters where only these are trained
    opt_state: Any  # moments float32, sharded like the parameters
    loss_scale: LossScale
    skipped_updates: jax.Array  # shape=(), dtype=int32: updates not applied so far (no signal, or not finite)


def _initial_state(params: Params, tx: optax.GradientTransformation, *, dynamic_scale: bool) -> TrainState:
    return TrainState(params, tx.init(params), initial_loss_scale(dynamic=dynamic_scale), jnp.int32(0))


def abstract_state(
    config: PolicyConfig,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    dynamic_scale: bool,
    lora: LoraConfig = OFF,
) -> TrainState:
    """``jax.ShapeDtypeStruct`` with a sharding at each leaf: what a checkpoint is restored into."""
    trained = find_trained(config, lora)
    shapes = jax.eval_shape(lambda p: _initial_state(p, tx, dynamic_scale=dynamic_scale), trained.abstract())
    by_param = trained.shardings(mesh)
    everywhere = replicated(mesh)
    opt_shardings = optax.tree.map_params(
        tx, lambda _, sharding: sharding, shapes.opt_state, by_param, transform_non_params=lambda _: everywhere
    )
    shardings = jax.tree.map(lambda _: everywhere, shapes)._replace(params=by_param, opt_state=opt_shardings)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )


def create_state(
    params: Params,
    config: PolicyConfig,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    dynamic_scale: bool,
    lora: LoraConfig = OFF,
) -> TrainState:
    """A fresh state around ``params`` (taken over: do not use them again), sharded over the mesh."""
    abstract = abstract_state(config, tx, mesh, dynamic_scale=dynamic_scale, lora=lora)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    make = jax.jit(lambda p: _initial_state(p, tx, dynamic_scale=dynamic_scale), out_shardings=shardings)
    return make(params)
