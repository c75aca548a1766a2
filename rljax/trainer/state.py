"""The state that a training step hands to the next one: its dtypes, the optimizer, the loss scaler, the shardings."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from rljax.errors import check_finite
from rljax.policy.config import PolicyConfig
from rljax.policy.delta_net import NOT_DECAYED
from rljax.policy.lora import OFF, LoraConfig, TrainedParams
from rljax.policy.model import Params, Remat
from rljax.schedule import inject_learning_rate
from rljax.sharding import replicated

ComputeDtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes of the trainer's forward and backward. Masters, moments and accumulators are always float32."""

    compute_dtype: ComputeDtype = "bfloat16"
    """Dtype of the forward and backward. The weights are cast to it once a step. float16 turns on dynamic loss scaling.
    float32 multiplies at the highest precision."""
    lm_head_dtype: Literal["compute", "float32"] = "compute"
    """Dtype in which the LM head multiplies. compute: ``compute_dtype`` in the trainer; an engine rounds its logits to
    ``rollout.dtype``. float32: trainer and engine first upcast hidden states and table, and an engine does not round
    its logits. A vLLM server then needs ``--head-dtype float32``."""
    remat: bool | Remat = "none"
    """Activations of a block that the backward pass recomputes. none: nothing is recomputed, all activations are kept.
    dots: everything between its products with weights. blocks (or true): everything but the input of the block.
    offload: the same as blocks, with the inputs in the host's memory (GPU and TPU)."""

    reduce_dtype: Literal["float32", "compute"] = "float32"
    """Dtype in which devices add up the gradients of a micro-batch. compute: ``compute_dtype``, which halves the bytes
    in 16 bits. The part of each device is then rounded before the sum. Gradients of experts and of the embedding, and
    the sum over micro-batches, stay in float32."""

    @property
    def remat_policy(self) -> Remat:
        """The choice ``remat`` by its name: True means "blocks", and False means "none"."""
        if isinstance(self.remat, bool):
            return "blocks" if self.remat else "none"
        return self.remat

    @property
    def head_dtype(self) -> Any:
        """The dtype in which the LM head multiplies; None for the dtype of the hidden states."""
        return jnp.float32 if self.lm_head_dtype == "float32" else None


GROWTH_INTERVAL = 400
"""The number of finite steps in a row after which the loss scale is doubled."""
INITIAL_SCALE = 2.0**15
MAX_SCALE = 2.0**24


@dataclass(frozen=True)
class OptimizerConfig:
    """The settings of AdamW. The defaults come from Table 1 of arXiv 2602.01826, or else from verl."""

    learning_rate: float = 1e-6
    """Initial learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay. AdamW multiplies it by the learning rate. A delta net's A_log and dt_bias have none."""
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
    """Makes the optimizer: clipping by global norm, then AdamW, with the learning rate as a float32 hyperparameter.

    Moments have the dtype of the parameters, which are the float32 masters. Equal configurations return the same
    object, because it is a key of compiled programs.
    """

    def build(learning_rate: Any) -> optax.GradientTransformation:
        adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
        adamw = optax.chain(adam, _weight_decay(config.weight_decay), optax.scale_by_learning_rate(learning_rate))
        return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw) if config.clip_norm else adamw

    return inject_learning_rate(build, config.learning_rate)


def _weight_decay(factor: float) -> optax.GradientTransformation:
    """Adds ``factor`` times each parameter to its update, but leaves the parameters in ``NOT_DECAYED`` alone.

    Unlike ``optax.add_decayed_weights`` with a mask, it adds nothing to the state of the optimizer.
    """

    def added(path: Any, update: jax.Array, param: jax.Array) -> jax.Array:
        return update if path[-1].key in NOT_DECAYED else update + factor * param

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(added, updates, params))


class LossScale(NamedTuple):
    """The state of the loss scaler, which keeps small float16 gradients above zero and reacts to overflows."""

    scale: jax.Array  # shape=(), dtype=float32: the factor of the loss
    good_steps: jax.Array  # shape=(), dtype=int32: the number of finite steps since the scale last changed
    overflows: jax.Array  # shape=(), dtype=int32: the number of steps whose gradients were not finite


def initial_loss_scale(*, dynamic: bool) -> LossScale:
    """Returns a scale of 2^15 for float16 gradients (``dynamic``), and the constant 1 for other dtypes."""
    scale = INITIAL_SCALE if dynamic else 1.0
    return LossScale(jnp.float32(scale), jnp.int32(0), jnp.int32(0))


def adjust_loss_scale(state: LossScale, finite: jax.Array, *, dynamic: bool) -> LossScale:
    """Counts overflows. Only a ``dynamic`` scale is halved after one, and doubled after 400 finite steps in a row."""
    overflows = state.overflows + jnp.where(finite, 0, 1)
    if not dynamic:
        return state._replace(overflows=overflows)
    good = jnp.where(finite, state.good_steps + 1, 0)
    grow = good >= GROWTH_INTERVAL
    grown = jnp.where(grow, jnp.minimum(state.scale * 2.0, MAX_SCALE), state.scale)
    scale = jnp.where(finite, grown, jnp.maximum(state.scale * 0.5, 1.0))
    return LossScale(scale, jnp.where(grow, 0, good), overflows)


class TrainState(NamedTuple):
    """The arrays on the devices that a step changes. They are donated to the step."""

    params: Params  # the masters, float32, or the adapters if only these are trained
    opt_state: Any  # the state of the optimizer; its moments are float32 and sharded like the parameters
    loss_scale: LossScale
    # shape=(), dtype=int32: the number of updates so far that were not applied, because the batch had no loss or the
    # gradients were not finite.
    skipped_updates: jax.Array


def _initial_state(params: Params, tx: optax.GradientTransformation, *, dynamic_scale: bool) -> TrainState:
    return TrainState(params, tx.init(params), initial_loss_scale(dynamic=dynamic_scale), jnp.int32(0))


def abstract_state(
    config: PolicyConfig, tx: optax.GradientTransformation, mesh: Mesh, *, dynamic_scale: bool, lora: LoraConfig = OFF
) -> TrainState:
    """Returns the shapes, dtypes and shardings of a state, into which a checkpoint is restored.

    If ``lora`` has a rank, the state has the adapters. Each leaf is a ``jax.ShapeDtypeStruct``.
    """
    trained = TrainedParams(config, lora)
    shapes = jax.eval_shape(lambda p: _initial_state(p, tx, dynamic_scale=dynamic_scale), trained.declared.abstract())
    by_param = trained.declared.shardings(mesh)
    everywhere = replicated(mesh)
    opt_shardings = optax.tree.map_params(
        tx, lambda _, sharding: sharding, shapes.opt_state, by_param, transform_non_params=lambda _: everywhere
    )
    shardings = jax.tree.map(lambda _: everywhere, shapes)._replace(params=by_param, opt_state=opt_shardings)
    return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), shapes, shardings)


def create_state(
    params: Params,
    config: PolicyConfig,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    dynamic_scale: bool,
    lora: LoraConfig = OFF,
) -> TrainState:
    """Makes a new state, sharded over the mesh. The buffers of ``params`` are donated to it.

    If ``lora`` has a rank, ``params`` are the adapters.
    """
    abstract = abstract_state(config, tx, mesh, dynamic_scale=dynamic_scale, lora=lora)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    make = jax.jit(
        lambda p: _initial_state(p, tx, dynamic_scale=dynamic_scale), out_shardings=shardings, donate_argnums=0
    )
    return make(jax.device_put(params, shardings.params))
