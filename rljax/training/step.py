"""One training step as one compiled, sharded, donated function.

    cast the masters once -> for each micro-batch: forward (log-probabilities, entropy, mismatch), loss, backward,
    accumulate in float32 -> unscale -> clip -> AdamW

With one update per rollout batch ``old_logprobs`` is ``stop_gradient(trainer_logprobs)``: the loss forward is the
mismatch measurement. ``jax.jit`` with in- and out-shardings is pjit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from rljax.algorithms.losses import LossConfig, ppo_clip
from rljax.mismatch import (
    finalize_importance,
    finalize_statistics,
    importance_totals,
    merge_importance,
    merge_statistics,
    mismatch_statistics,
)
from rljax.policy.config import PolicyConfig
from rljax.policy.qwen3 import Params, cast_params
from rljax.policy.score import matmul_precision, packed_logprobs
from rljax.schedule import get_learning_rate, set_learning_rate
from rljax.sharding import named_sharding, replicated
from rljax.training.loss_scale import adjust_loss_scale
from rljax.training.packing import PackedBatch
from rljax.training.state import TrainState, abstract_state

Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class PrecisionConfig:
    """Numbers of the trainer's forward and backward; masters, moments and accumulators are always float32.

    Attributes:
      compute_dtype: weights are cast to it once a step. float16 turns dynamic loss scaling on; float32 multiplies at
        the highest precision.
      lm_head_dtype: dtype of the LM head's products, "compute" for ``compute_dtype``; accumulation is float32 anyway.
      remat: recompute each block in the backward pass instead of keeping its activations.
    """

    compute_dtype: Dtype = "bfloat16"
    lm_head_dtype: Literal["compute", "float32"] = "compute"
    remat: bool = False

    @property
    def head_dtype(self) -> Any:
        """The dtype to score with, or None for that of the hidden states."""
        return jnp.float32 if self.lm_head_dtype == "float32" else None


class _Totals(NamedTuple):
    """What the micro-batches add up."""

    grads: Params  # float32, of the scaled loss
    loss: jax.Array  # unscaled
    entropy: jax.Array  # summed over response tokens
    clipped: jax.Array  # loss tokens on the clipped branch
    mismatch: Any
    importance: Any


StepFunction = Callable[
    [TrainState, PackedBatch, jax.Array, jax.Array], tuple[TrainState, dict[str, jax.Array], jax.Array]
]


def _micro_batch_statistics(logprobs: jax.Array, entropy: jax.Array, micro: PackedBatch, count: int) -> tuple[Any, Any]:
    rows = (logprobs, micro.rollout_logprobs, micro.response_mask)
    sequences: dict[str, Any] = {"sequence_ids": micro.sequence_ids, "num_sequences": count}
    return mismatch_statistics(*rows, entropy=entropy, **sequences), importance_totals(*rows, **sequences)


def _accumulate(
    compute: Params,
    batch: PackedBatch,
    scale: jax.Array,
    config: PolicyConfig,
    precision: PrecisionConfig,
    loss_config: LossConfig,
    temperature: float,
    num_sequences: int,
) -> tuple[_Totals, jax.Array]:
    """Loops over the used micro-batches. Returns the totals and ``trainer_logprobs`` [m, b, t]."""
    loss_tokens = jnp.maximum(jnp.sum(batch.loss_mask), 1).astype(jnp.float32)

    def loss_fn(compute: Params, micro: PackedBatch) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        logprobs, entropy = packed_logprobs(
            compute,
            config,
            micro.tokens,
            micro.segment_ids,
            micro.positions,
            temperature=temperature,
            lm_head_dtype=precision.head_dtype,
            remat=precision.remat,
        )
        ratio = jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
        losses, clipped = ppo_clip(ratio, micro.advantages, loss_config.clip_low, loss_config.clip_high)
        loss = jnp.sum(jnp.where(micro.loss_mask, losses, 0.0)) / loss_tokens
        return loss * scale, (loss, logprobs, entropy, jnp.sum(jnp.where(micro.loss_mask, clipped, 0.0)))

    def body(i: jax.Array, carry: tuple[_Totals, jax.Array]) -> tuple[_Totals, jax.Array]:
        totals, all_logprobs = carry
        micro = batch._replace(
            **{
                name: jax.lax.dynamic_index_in_dim(array, i, 0, False)
                for name, array in batch._asdict().items()
                if name != "used"
            }
        )
        (_, (loss, logprobs, entropy, clipped)), grads = jax.value_and_grad(loss_fn, has_aux=True)(compute, micro)
        mismatch, importance = _micro_batch_statistics(logprobs, entropy, micro, num_sequences)
        totals = _Totals(
            jax.tree.map(lambda total, g: total + g.astype(jnp.float32), totals.grads, grads),
            totals.loss + loss,
            totals.entropy + jnp.sum(jnp.where(micro.response_mask, entropy, 0.0)),
            totals.clipped + clipped,
            merge_statistics(totals.mismatch, mismatch),
            merge_importance(totals.importance, importance),
        )
        return totals, jax.lax.dynamic_update_index_in_dim(all_logprobs, logprobs, i, 0)

    nothing = jax.tree.map(lambda x: jnp.zeros_like(x[0]), batch._replace(used=batch.used[None]))
    zero = jnp.zeros(nothing.tokens.shape, jnp.float32)
    start = _Totals(
        jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), compute),
        jnp.float32(0.0),
        jnp.float32(0.0),
        jnp.float32(0.0),
        *_micro_batch_statistics(zero, zero, nothing, num_sequences),
    )
    return jax.lax.fori_loop(0, batch.used, body, (start, jnp.zeros(batch.tokens.shape, jnp.float32)))


def make_train_step(
    config: PolicyConfig,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    precision: PrecisionConfig,
    loss_config: LossConfig,
    batch_shape: tuple[int, int, int],
    num_sequences: int,
    temperature: float = 1.0,
) -> StepFunction:
    """Builds the step.

    Args:
      config: shape of the policy.
      tx: from ``make_optimizer``.
      mesh: from ``make_mesh``.
      precision: dtypes.
      loss_config: clip bounds.
      batch_shape: (micro-batches, rows, tokens) of every batch.
      num_sequences: responses of a batch.
      temperature: of the rollouts; log-probabilities are of the distribution that was sampled from.

    Returns:
      ``step(state, batch, learning_rate, apply_update) -> (state, metrics, trainer_logprobs [m, b, t])``. ``state`` is
      donated. ``learning_rate`` is a float32 scalar and ``apply_update`` a bool; with False, or with gradients that
      are not finite, parameters, moments and weight decay stay as they are. Metrics are scalars on the device.
      ``step.jitted`` is the compiled function, ``step.batch_shardings`` where a batch goes.
    """
    dynamic = precision.compute_dtype == "float16"
    dtype = jnp.dtype(precision.compute_dtype)

    def train_step(
        state: TrainState, batch: PackedBatch, learning_rate: jax.Array, apply_update: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array], jax.Array]:
        scale = state.loss_scale.scale
        with jax.default_matmul_precision(matmul_precision(dtype)):
            totals, logprobs = _accumulate(
                cast_params(state.params, dtype),
                batch,
                scale,
                config,
                precision,
                loss_config,
                temperature,
                num_sequences,
            )
        grads = jax.tree.map(lambda g: g / scale, totals.grads)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(grad_norm)
        opt_state = set_learning_rate(state.opt_state, learning_rate)

        def update(params: Params, opt_state: Any) -> tuple[Params, Any]:
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        applied = apply_update & finite
        params, opt_state = jax.lax.cond(applied, update, lambda p, s: (p, s), state.params, opt_state)
        loss_scale = adjust_loss_scale(state.loss_scale, finite, dynamic=dynamic)
        skipped = state.skipped_updates + jnp.where(applied, 0, 1)
        new_state = TrainState(params, opt_state, loss_scale, skipped)
        return new_state, _metrics(totals, batch, grad_norm, new_state), logprobs

    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, tx, mesh, dynamic_scale=dynamic))
    whole = replicated(mesh)
    by_rows = named_sharding(mesh, ("micro", "rows", "tokens"), batch_shape)
    batch_shardings = PackedBatch(**{name: whole if name == "used" else by_rows for name in PackedBatch._fields})
    jitted = jax.jit(
        train_step,
        in_shardings=(state_shardings, batch_shardings, whole, whole),
        out_shardings=(state_shardings, whole, by_rows),
        donate_argnums=(0,),
    )

    def step(
        state: TrainState, batch: PackedBatch, learning_rate: float, apply_update: bool
    ) -> tuple[TrainState, dict[str, jax.Array], jax.Array]:
        placed = jax.device_put(batch, batch_shardings)
        rate, apply = jax.device_put((np.float32(learning_rate), np.bool_(apply_update)), whole)
        with jax.set_mesh(mesh), jax.transfer_guard("disallow"):
            return jitted(state, placed, rate, apply)

    step.jitted = jitted  # type: ignore[attr-defined]
    return step


def _metrics(totals: _Totals, batch: PackedBatch, grad_norm: jax.Array, state: TrainState) -> dict[str, jax.Array]:
    """The step's row as far as the device knows it."""
    response_tokens = jnp.maximum(jnp.sum(batch.response_mask), 1).astype(jnp.float32)
    loss_tokens = jnp.maximum(jnp.sum(batch.loss_mask), 1).astype(jnp.float32)
    row = {
        "policy/loss": totals.loss,
        "policy/entropy": totals.entropy / response_tokens,
        "policy/clip_fraction": totals.clipped / loss_tokens,
        "optimizer/grad_norm": grad_norm,
        "optimizer/skipped_updates": state.skipped_updates,
        "precision/loss_scale": state.loss_scale.scale,
        "precision/overflows": state.loss_scale.overflows,
        "schedule/learning_rate": get_learning_rate(state.opt_state),
    }
    row |= {f"mismatch/{name}": value for name, value in finalize_statistics(totals.mismatch).items()}
    return row | {f"is/{name}": value for name, value in finalize_importance(totals.importance).items()}
