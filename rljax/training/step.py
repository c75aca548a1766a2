"""One training step as one compiled, sharded, donated function.

    cast the masters once -> for each micro-batch: forward (log-probabilities, entropy, mismatch), loss, backward,
    accumulate in float32 -> unscale -> clip -> AdamW

With one update per rollout batch ``old_logprobs`` is ``stop_gradient(trainer_logprobs)``: the loss forward is the
mismatch measurement. ``jax.jit`` with in- and out-shardings is pjit.
"""

from __future__ import annotations

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


def _micro_batch_statistics(logprobs: Any, entropy: Any, micro: PackedBatch, count: int) -> tuple[Any, Any]:
    rows = (logprobs, micro.rollout_logprobs, micro.response_mask)
    sequences: dict[str, Any] = {"sequence_ids": micro.sequence_ids, "num_sequences": count}
    return mismatch_statistics(*rows, entropy=entropy, **sequences), importance_totals(*rows, **sequences)


def _no_statistics(batch: PackedBatch, count: int) -> tuple[Any, Any]:
    """The statistics of no tokens, as constants: what merging starts from."""
    micro = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype), batch._replace(used=None))
    values = jax.ShapeDtypeStruct(micro.tokens.shape, jnp.float32)
    forms = jax.eval_shape(lambda x, m: _micro_batch_statistics(x, x, m, count), values, micro)
    zeros, nothing = jax.tree.map(lambda form: np.zeros(form.shape, form.dtype), (values, micro))
    empty = _micro_batch_statistics(zeros, zeros, nothing, count)
    return jax.tree.map(lambda form, value: jnp.asarray(value, form.dtype), forms, empty)


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

    start = _Totals(
        jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), compute),
        jnp.float32(0.0),
        jnp.float32(0.0),
        jnp.float32(0.0),
        *_no_statistics(batch, num_sequences),
    )
    return jax.lax.fori_loop(0, batch.used, body, (start, jnp.zeros(batch.tokens.shape, jnp.float32)))


class TrainStep:
    """The compiled step: ``step(state, batch, learning_rate, apply_update)``."""

    def __init__(
        self,
        config: PolicyConfig,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        *,
        precision: PrecisionConfig,
        loss_config: LossConfig,
        batch_shape: tuple[int, int, int],
        num_sequences: int,
        temperature: float = 1.0,
    ):
        """Builds the step; it is compiled at the first call and never again.

        Args:
          config: shape of the policy.
          tx: from ``make_optimizer``.
          mesh: from ``make_mesh``.
          precision: dtypes.
          loss_config: clip bounds.
          batch_shape: (micro-batches, rows, tokens) of every batch.
          num_sequences: responses of a batch.
          temperature: of the rollouts; log-probabilities are of the distribution that was sampled from.
        """
        dynamic = precision.compute_dtype == "float16"
        dtype = jnp.dtype(precision.compute_dtype)

        def train_step(
            state: TrainState, batch: PackedBatch, learning_rate: jax.Array, apply_update: jax.Array
        ) -> tuple[TrainState, dict[str, jax.Array], jax.Array]:
            with jax.default_matmul_precision(matmul_precision(dtype)):
                totals, logprobs = _accumulate(
                    cast_params(state.params, dtype),
                    batch,
                    state.loss_scale.scale,
                    config,
                    precision,
                    loss_config,
                    temperature,
                    num_sequences,
                )
            state, grad_norm = _update(state, totals.grads, tx, learning_rate, apply_update, dynamic=dynamic)
            return state, _metrics(totals, batch, grad_norm, state), logprobs

        abstract = abstract_state(config, tx, mesh, dynamic_scale=dynamic)
        state_shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        by_rows = named_sharding(mesh, ("micro", "rows", "tokens"), batch_shape)
        self._mesh = mesh
        self._whole = replicated(mesh)
        self._batch_shardings = PackedBatch._make([by_rows] * len(PackedBatch._fields))._replace(used=self._whole)
        self._jitted = jax.jit(
            train_step,
            in_shardings=(state_shardings, self._batch_shardings, self._whole, self._whole),
            out_shardings=(state_shardings, self._whole, by_rows),
            donate_argnums=(0,),
        )

    @property
    def compilations(self) -> int:
        """How often the step was compiled; 1 after the first call."""
        return self._jitted._cache_size()  # type: ignore[attr-defined]

    def __call__(
        self, state: TrainState, batch: PackedBatch, learning_rate: float, apply_update: bool
    ) -> tuple[TrainState, dict[str, jax.Array], jax.Array]:
        """Trains on one batch.

        Args:
          state: donated.
          batch: of the declared shape.
          learning_rate: the rate of this update.
          apply_update: False leaves parameters and moments as they are, weight decay included; so do gradients that
            are not finite. Either is counted.

        Returns:
          The new state, the row's metrics as scalars on the device, and ``trainer_logprobs`` [m, b, t].
        """
        placed = jax.device_put(batch, self._batch_shardings)
        rate, apply = jax.device_put((np.float32(learning_rate), np.bool_(apply_update)), self._whole)
        with jax.set_mesh(self._mesh), jax.transfer_guard("disallow"):
            return self._jitted(state, placed, rate, apply)


def _update(
    state: TrainState,
    scaled_grads: Params,
    tx: optax.GradientTransformation,
    learning_rate: jax.Array,
    apply_update: jax.Array,
    *,
    dynamic: bool,
) -> tuple[TrainState, jax.Array]:
    """Unscales, and applies or skips. Returns the state and the global norm of the gradient before clipping."""
    grads = jax.tree.map(lambda g: g / state.loss_scale.scale, scaled_grads)
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(grad_norm)
    opt_state = set_learning_rate(state.opt_state, learning_rate)

    def update(params: Params, opt_state: Any) -> tuple[Params, Any]:
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    applied = apply_update & finite
    params, opt_state = jax.lax.cond(applied, update, lambda p, s: (p, s), state.params, opt_state)
    # A batch without loss has zero gradients, which say nothing about the scale.
    adjusted = adjust_loss_scale(state.loss_scale, finite, dynamic=dynamic)
    loss_scale = jax.tree.map(lambda new, old: jnp.where(apply_update, new, old), adjusted, state.loss_scale)
    return TrainState(params, opt_state, loss_scale, state.skipped_updates + jnp.where(applied, 0, 1)), grad_norm


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
