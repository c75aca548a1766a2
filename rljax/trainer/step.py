"""One training step as one compiled, sharded, donated function.

    cast the masters once -> for each micro-batch: forward (log-probabilities, entropy, mismatch), loss, backward,
    accumulate in float32 -> for each micro-batch without loss: forward -> unscale -> clip -> AdamW

With one update per rollout batch ``old_logprobs`` is ``stop_gradient(trainer_logprobs)``: the loss forward is the
mismatch measurement. ``jax.jit`` with in- and out-shardings is pjit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from rljax.mismatch import Statistics, merge, zeros
from rljax.policy.attention import PackedAttention, choose_attention, packed_attention
from rljax.policy.config import PolicyConfig
from rljax.policy.head import matmul_precision
from rljax.policy.options import AttentionName
from rljax.policy.qwen3 import Params, Remat, cast_params, logical_axes
from rljax.policy.score import Scores, packed_logprobs
from rljax.schedule import get_learning_rate, set_learning_rate
from rljax.sharding import constrain, named_sharding, replicated
from rljax.trainer.measure import DiagnosisConfig, finalize_measured, measure
from rljax.trainer.objective import Objective, loss_row
from rljax.trainer.packing import PackedBatch, fill
from rljax.trainer.replicas import merge_over_replicas, on_each_replica, replicas, sum_over_replicas
from rljax.trainer.state import TrainState, abstract_state, adjust_loss_scale

Dtype = Literal["bfloat16", "float16", "float32"]
OF_POLICY = ("tokens", "segment_ids", "positions")
"""Arrays of a batch that the policy reads."""


@dataclass(frozen=True)
class PrecisionConfig:
    """Numbers of the trainer's forward and backward; masters, moments and accumulators are always float32."""

    compute_dtype: Dtype = "bfloat16"
    """The weights are cast to this dtype once a step. float16 turns on dynamic loss scaling. float32 multiplies at the
    highest precision."""
    lm_head_dtype: Literal["compute", "float32"] = "compute"
    """Dtype in which the LM head multiplies. compute: ``compute_dtype`` in the trainer; an engine rounds its logits to
    ``rollout.dtype``. float32: trainer and engine upcast hidden states and table from these dtypes first, and an engine
    does not round its logits; a vLLM server must be started with ``--head-dtype float32``."""
    remat: bool | Remat = "none"
    """What the backward pass recomputes of a block. none: nothing, all activations are kept. dots: what lies between
    its products with weights. blocks (or true): all but the block's input. offload: the same, with the inputs in the
    host's memory (GPU and TPU)."""

    @property
    def remat_policy(self) -> Remat:
        """``remat`` by its name."""
        if isinstance(self.remat, bool):
            return "blocks" if self.remat else "none"
        return self.remat

    @property
    def head_dtype(self) -> Any:
        """The dtype to score with, or None for that of the hidden states."""
        return jnp.float32 if self.lm_head_dtype == "float32" else None


# Of one micro-batch: gradients, the statistics of ``Objective.micro_loss`` and those of ``measure``.
Found = tuple[Params, Statistics, dict[str, Statistics]]


class Totals(NamedTuple):
    """What the micro-batches add up."""

    grads: Params  # float32, of the scaled loss over the provisional denominator
    square_norms: jax.Array  # sum over micro-batches of the squared norm of each one's ``grads``; 0 when not asked for
    loss: Statistics  # from ``Objective.micro_loss``
    measured: dict[str, Statistics]  # from ``measure``


class Controls(NamedTuple):
    """What decides about a step besides its batch: scalars on every device."""

    learning_rate: jax.Array  # float32
    apply_update: jax.Array  # bool
    measure_noise: jax.Array  # bool


def place_controls(learning_rate: float, apply_update: bool, measure_noise: bool, where: NamedSharding) -> Controls:
    """The controls on the devices."""
    values = Controls(np.float32(learning_rate), np.bool_(apply_update), np.bool_(measure_noise))  # type: ignore[arg-type]
    return jax.device_put(values, where)


def micro_gradients(
    compute: Params,
    micro: PackedBatch,
    objective: Objective,
    score: Any,
    scale: jax.Array,
    provisional: jax.Array,
    mean_weight: jax.Array | float = 1.0,
) -> tuple[Params, Statistics, Scores]:
    """Forward and backward of one micro-batch.

    Args:
      compute: parameters in the compute dtype.
      micro: [b, t].
      objective: the loss.
      score: (parameters, micro-batch) -> Scores.
      scale: the loss is multiplied by it.
      provisional: denominator.
      mean_weight: from ``Objective.mean_weight``.

    Returns:
      Gradients in the compute dtype, the loss's statistics, and the scores.
    """

    def loss_fn(compute: Params) -> tuple[jax.Array, tuple[Statistics, Scores]]:
        scores = score(compute, micro)
        loss, statistics = objective.micro_loss(scores.logprobs, micro, provisional, mean_weight)
        return loss * scale, (statistics, scores)

    (_, (statistics, scores)), grads = jax.value_and_grad(loss_fn, has_aux=True)(compute)
    return grads, statistics, scores


def mesh_attention(
    name: AttentionName, config: PolicyConfig, precision: PrecisionConfig, mesh: Mesh
) -> PackedAttention:
    """The attention that ``policy.attention`` names, on the devices of the mesh. Raises as ``choose_attention``."""
    return choose_attention(name, mesh.devices.flat[0], precision.compute_dtype, config.head_dim)


def make_score(
    config: PolicyConfig, precision: PrecisionConfig, temperature: float, attention: PackedAttention = packed_attention
) -> Any:
    """``score(compute, micro) -> Scores`` of packed rows, a token's numbers on every device."""

    def score(compute: Params, micro: PackedBatch) -> Scores:
        scores = packed_logprobs(
            compute,
            config,
            micro.tokens,
            micro.segment_ids,
            micro.positions,
            temperature=temperature,
            lm_head_dtype=precision.head_dtype,
            remat=precision.remat_policy,
            attention=attention,
        )
        logprobs, entropy = (constrain(x, None, None) for x in (scores.logprobs, scores.entropy))
        return scores._replace(logprobs=logprobs, entropy=entropy)

    return score


def over_micro_batches(
    batch: PackedBatch,
    each: Callable[[PackedBatch], tuple[Any, jax.Array]],
    zero: Callable[[Any], Any],
    add: Callable[[Any, Any], Any],
    span: tuple[Any, Any],
    logprobs: jax.Array | None = None,
) -> tuple[Any, jax.Array]:
    """Adds up micro-batches of a batch [m, b, t].

    Args:
      batch: arrays on the devices.
      each: what a micro-batch [b, t] gives: numbers to add, and its log-probabilities [b, t].
      zero: the total of none, from ``jax.ShapeDtypeStruct`` of those numbers.
      add: a total with the numbers of one more.
      span: the first micro-batch, and the first after the last.
      logprobs: float32 [m, b, t] of other micro-batches; None: there are none.

    Returns:
      The total, and the log-probabilities float32 [m, b, t].
    """

    def of_index(index: jax.Array | int) -> tuple[Any, jax.Array]:
        arrays = batch._replace(with_loss=None, used=None)
        micro = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), arrays)
        return each(with_all_rows(micro))

    def body(index: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        found, of_micro = of_index(index)
        of_rows = constrain(of_micro, "rows", "tokens")
        return add(carry[0], found), jax.lax.dynamic_update_index_in_dim(carry[1], of_rows, index, 0)

    start = zero(jax.eval_shape(of_index, 0)[0])
    before = jnp.zeros(batch.tokens.shape, jnp.float32) if logprobs is None else logprobs
    return jax.lax.fori_loop(*span, body, (start, constrain(before, "micro", "rows", "tokens")))


def with_all_rows(micro: PackedBatch) -> PackedBatch:
    """A micro-batch whose arrays, but for those that the policy reads, hold all rows on each device.

    Losses, corrections and measurements are a few operations a token with many sums. Done by every device for all
    tokens they take no collective of their own; on simulated CPU devices, whose order of independent collectives is
    not fixed, many of them can wait for each other for good. The arrays travel together, as one.
    """
    kept = {name: getattr(micro, name) for name in OF_POLICY}
    arrays, structure = jax.tree.flatten(micro._replace(**dict.fromkeys(OF_POLICY)))
    bits = [x.astype(jnp.int32) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, jnp.int32) for x in arrays]
    whole = constrain(jnp.stack(bits), None, None, None)
    found = [
        part.astype(x.dtype) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(part, x.dtype)
        for part, x in zip(whole, arrays, strict=True)
    ]
    return jax.tree.unflatten(structure, found)._replace(**kept)


def square_norm(grads: Params) -> jax.Array:
    """Squared global norm, in float32."""
    return sum((jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)), start=jnp.float32(0.0))


def zero_totals(grads: Params, loss: Statistics, measured: dict[str, Statistics]) -> Totals:
    """The totals of no micro-batch, in the shapes and dtypes of what one micro-batch gives."""
    no_grads = jax.tree.map(lambda shape: jnp.zeros(shape.shape, jnp.float32), grads)
    return Totals(no_grads, jnp.float32(0.0), zeros(loss), zeros(measured))


def add_micro_batch(
    totals: Totals, grads: Params, loss: Statistics, measured: dict[str, Statistics], measure_noise: jax.Array
) -> Totals:
    """Totals with one more micro-batch."""
    norm = jax.lax.cond(measure_noise, square_norm, lambda _: jnp.float32(0.0), grads)
    return Totals(
        jax.tree.map(lambda total, g: total + g.astype(jnp.float32), totals.grads, grads),
        totals.square_norms + norm,
        merge(totals.loss, loss),
        merge(totals.measured, measured),
    )


def place_batch(batch: PackedBatch, by_rows: NamedSharding, everywhere: NamedSharding) -> PackedBatch:
    """The batch on the devices, split by rows."""
    return jax.device_put(batch, batch_shardings(batch, by_rows, everywhere))


def _add_up(totals: Totals) -> Totals:
    grads, square_norms = sum_over_replicas((totals.grads, totals.square_norms))
    return Totals(grads, square_norms, merge_over_replicas(totals.loss), merge_over_replicas(totals.measured))


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple)


def _without_embed(axes: tuple[str, ...]) -> tuple[str | None, ...]:
    return tuple(None if axis == "embed" else axis for axis in axes)


def constrain_tree(params: Params, axes: Params) -> Params:
    """Each parameter constrained to its logical axes."""
    return jax.tree.map(lambda leaf, names: constrain(leaf, *names), params, axes)


def batch_shardings(batch: PackedBatch, by_rows: NamedSharding, everywhere: NamedSharding) -> PackedBatch:
    """The sharding of each array that ``batch`` has (see ``place_batch``)."""
    return jax.tree.map(lambda _: by_rows, batch)._replace(with_loss=everywhere, used=everywhere)


def abstract_batch(
    shape: tuple[int, int, int], by_rows: NamedSharding, everywhere: NamedSharding, given: Sequence[str] = ()
) -> PackedBatch:
    """``jax.ShapeDtypeStruct`` with a sharding for each array of a batch [m, b, t]; of the optional ones ``given``."""
    empty = fill([], {}, (0, 0, 0))._replace(**dict.fromkeys(given, np.zeros(0, np.float32)))
    return jax.tree.map(
        lambda array, sharding: jax.ShapeDtypeStruct(shape if array.ndim else (), array.dtype, sharding=sharding),
        empty,
        batch_shardings(empty, by_rows, everywhere),
    )


class TrainStep:
    """The compiled step, ``step(state, batch, learning_rate, apply_update)``, and a forward without a gradient."""

    def __init__(
        self,
        config: PolicyConfig,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        *,
        precision: PrecisionConfig,
        objective: Objective,
        batch_shape: tuple[int, int, int],
        temperature: float = 1.0,
        diagnosis: DiagnosisConfig | None,
        keep_gathered: bool = False,
        attention: AttentionName = "auto",
    ):
        """Builds the step; it is compiled at the first call and never again.

        Args:
          config: shape of the policy.
          tx: from ``make_optimizer``.
          mesh: from ``make_mesh``.
          precision: dtypes.
          objective: the loss of a batch.
          batch_shape: (micro-batches, rows, tokens) of every batch.
          temperature: of the rollouts; log-probabilities are of the distribution that was sampled from.
          diagnosis: how the mismatch is taken apart; None: it is not measured here.
          keep_gathered: as ``MeshConfig.keep_gathered``.
          attention: from the devices of the mesh (``choose_attention``, which may refuse it).
        """
        dynamic = precision.compute_dtype == "float16"
        dtype = jnp.dtype(precision.compute_dtype)
        score = make_score(config, precision, temperature, mesh_attention(attention, config, precision, mesh))
        axes = logical_axes(config)
        axes_of_copy = jax.tree.map(_without_embed, axes, is_leaf=_is_axes) if keep_gathered else axes

        def forward_alone(compute: Params, num_sequences: int, diagnosis: DiagnosisConfig | None) -> Any:
            def each(micro: PackedBatch) -> tuple[dict[str, Statistics], jax.Array]:
                scores = score(compute, micro)
                return measure(scores, micro, num_sequences, diagnosis), scores.logprobs

            return each

        def train_step(
            state: TrainState, batch: PackedBatch, controls: Controls
        ) -> tuple[TrainState, dict[str, jax.Array], jax.Array]:
            def work(
                batch: PackedBatch, compute: Params, scale: Any, provisional: Any, mean_weight: Any, noise: Any
            ) -> tuple[Totals, jax.Array]:
                def each(micro: PackedBatch) -> tuple[Found, jax.Array]:
                    grads, loss, scores = micro_gradients(
                        compute, micro, objective, score, scale, provisional, mean_weight
                    )
                    found = grads, loss, measure(scores, micro, objective.num_sequences, diagnosis)
                    return found, scores.logprobs

                def add(totals: Totals, found: Found) -> Totals:
                    return constrained(add_micro_batch(totals, *found, noise))

                with_loss, rest = (0, batch.with_loss), (batch.with_loss, batch.used)
                totals, logprobs = over_micro_batches(
                    batch, each, lambda shapes: constrained(zero_totals(*shapes)), add, with_loss
                )
                alone = forward_alone(compute, objective.num_sequences, diagnosis)
                measured, logprobs = over_micro_batches(batch, alone, lambda _: totals.measured, merge, rest, logprobs)
                return totals._replace(measured=measured), logprobs

            def constrained(totals: Totals) -> Totals:
                return totals._replace(grads=constrain_tree(totals.grads, axes))

            with jax.default_matmul_precision(matmul_precision(dtype)):
                compute = constrain_tree(cast_params(state.params, dtype), axes_of_copy)
                shared = (state.loss_scale.scale, objective.provisional(batch), objective.mean_weight(batch))
                totals, logprobs = on_each_replica(work, _add_up, batch, compute, *shared, controls.measure_noise)
            state, row = update_state(state, totals, batch, tx, objective, controls, dynamic=dynamic)
            return state, row | finalize_measured(totals.measured, diagnosis), logprobs

        def forward(
            params: Params, batch: PackedBatch, *, num_sequences: int, diagnosis: DiagnosisConfig
        ) -> tuple[dict[str, jax.Array], jax.Array]:
            def work(batch: PackedBatch, compute: Params) -> tuple[dict[str, Statistics], jax.Array]:
                each = forward_alone(compute, num_sequences, diagnosis)
                return over_micro_batches(batch, each, zeros, merge, (0, batch.used))

            with jax.default_matmul_precision(matmul_precision(dtype)):
                compute = constrain_tree(cast_params(params, dtype), axes_of_copy)
                measured, logprobs = on_each_replica(work, merge_over_replicas, batch, compute)
            return finalize_measured(measured, diagnosis), logprobs

        abstract = abstract_state(config, tx, mesh, dynamic_scale=dynamic)
        self._mesh = mesh
        self._abstract_state, self._batch_shape = abstract, batch_shape
        self._everywhere = replicated(mesh)
        self._by_rows = named_sharding(mesh, ("micro", "rows", "tokens"), batch_shape)
        self._jitted = jax.jit(
            train_step,
            in_shardings=(jax.tree.map(lambda leaf: leaf.sharding, abstract), None, self._everywhere),
            out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, abstract), self._everywhere, self._by_rows),
            donate_argnums=(0,),
        )
        out = (self._everywhere, self._by_rows)
        self._jitted_forward = jax.jit(forward, static_argnames=("num_sequences", "diagnosis"), out_shardings=out)

    @property
    def compilations(self) -> int:
        """How often the step was compiled; 1 after the first call."""
        return self._jitted._cache_size()  # type: ignore[attr-defined]

    def __call__(
        self,
        state: TrainState,
        batch: PackedBatch,
        learning_rate: float,
        apply_update: bool,
        measure_noise: bool = False,
    ) -> tuple[TrainState, dict[str, jax.Array], jax.Array]:
        """Trains on one batch.

        Args:
          state: donated.
          batch: of the declared shape.
          learning_rate: the rate of this update.
          apply_update: False leaves parameters and moments as they are, weight decay included; so do gradients that
            are not finite and batches of which every token was rejected. Each is counted.
          measure_noise: whether ``optimizer/grad_noise`` is wanted; otherwise it is not a number.

        Returns:
          The new state, the row's metrics on the device (scalars, and the histogram), ``trainer_logprobs`` [m, b, t].
        """
        placed = place_batch(batch, self._by_rows, self._everywhere)
        controls = place_controls(learning_rate, apply_update, measure_noise, self._everywhere)
        with jax.set_mesh(self._mesh), jax.transfer_guard("disallow"):
            return self._jitted(state, placed, controls)

    def lower(self, *given: Literal["old_logprobs", "reference_logprobs"]) -> jax.stages.Lowered:
        """The step's program for the mesh's devices, which need not be here: shapes stand for state and batch.

        Args:
          given: the optional arrays of ``PackedBatch`` that the batches have.

        Returns:
          What ``.compile()`` makes the executable of that ``__call__`` runs.
        """
        batch = abstract_batch(self._batch_shape, self._by_rows, self._everywhere, given)
        scalars = Controls(jnp.float32, jnp.bool_, jnp.bool_)
        controls = jax.tree.map(lambda dtype: jax.ShapeDtypeStruct((), dtype, sharding=self._everywhere), scalars)
        with jax.set_mesh(self._mesh):
            return self._jitted.lower(self._abstract_state, batch, controls)

    def forward(
        self, params: Params, batch: PackedBatch, *, num_sequences: int, diagnosis: DiagnosisConfig
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """The mismatch of a batch under ``params`` (float32 masters), and their log-probabilities [m, b, t].

        The number of micro-batches, and that of sequences, need not be those of the steps.
        """
        placed = place_batch(batch, self._by_rows, self._everywhere)
        with jax.set_mesh(self._mesh), jax.transfer_guard("disallow"):
            return self._jitted_forward(params, placed, num_sequences=num_sequences, diagnosis=diagnosis)


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
    """Unscales, clips and applies, or skips. Returns the state and the step's row less what was measured."""
    rescaling = objective.rescaling(totals.loss, objective.provisional(batch))
    factor = rescaling / state.loss_scale.scale
    grads = jax.tree.map(lambda g: g * factor, totals.grads)
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(grad_norm)
    opt_state = set_learning_rate(state.opt_state, controls.learning_rate)

    def update(params: Params, opt_state: Any) -> tuple[Params, Any]:
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    wanted = controls.apply_update & (totals.loss["denominator"] > 0)
    applied = wanted & finite
    params, opt_state = jax.lax.cond(applied, update, lambda p, s: (p, s), state.params, opt_state)
    # A batch without loss has zero gradients, which say nothing about the scale.
    adjusted = adjust_loss_scale(state.loss_scale, finite, dynamic=dynamic)
    loss_scale = jax.tree.map(lambda new, old: jnp.where(wanted, new, old), adjusted, state.loss_scale)
    state = TrainState(params, opt_state, loss_scale, state.skipped_updates + jnp.where(applied, 0, 1))
    noise = gradient_noise(totals.square_norms * factor**2, grad_norm**2, batch.with_loss * replicas())
    return state, loss_row(objective, totals.loss, rescaling) | {
        "optimizer/grad_norm": grad_norm,
        "optimizer/grad_noise": jnp.where(controls.measure_noise, noise, jnp.nan),
        "optimizer/skipped_updates": state.skipped_updates,
        "precision/loss_scale": state.loss_scale.scale,
        "precision/overflows": state.loss_scale.overflows,
        "schedule/learning_rate": get_learning_rate(state.opt_state),
    }


def gradient_noise(square_norms: jax.Array, square_of_sum: jax.Array, count: jax.Array) -> jax.Array:
    """Variance of the step's gradient, estimated from the spread of its micro-batches.

    With K micro-batches whose gradients g_k add up to the step's gradient G, K / (K - 1) sum_k norm(g_k - G / K)^2 is
    an unbiased estimate of E norm(G - E G)^2, the trace of its covariance (as in arXiv 1812.06162, appendix A.1, where
    two batch sizes serve).

    Args:
      square_norms: sum_k norm(g_k)^2.
      square_of_sum: norm(G)^2.
      count: K.

    Returns:
      The variance, at least 0; not a number with fewer than two micro-batches.
    """
    k = count.astype(jnp.float32)
    variance = k / jnp.maximum(k - 1, 1) * jnp.maximum(square_norms - square_of_sum / jnp.maximum(k, 1), 0.0)
    return jnp.where(count > 1, variance, jnp.nan)
