"""One training step as one compiled, sharded, donated function.

    cast the masters once -> for each micro-batch: forward (log-probabilities, entropy, mismatch), loss, backward,
    accumulate in float32 -> for each micro-batch without loss: forward -> unscale -> clip -> AdamW

Where adapters are trained, the weights that they make are given to it (``MergedPolicy``), and a micro-batch's gradient
of these becomes that of the adapters before it is accumulated.
With one update per rollout batch ``old_logprobs`` is ``stop_gradient(trainer_logprobs)``: the loss forward is the
mismatch measurement. ``jax.jit`` with in- and out-shardings is pjit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from rljax.mismatch import Statistics, merge, zeros
from rljax.policy.config import DEFAULTS, PolicyConfig, PolicyOptions, route_dtype
from rljax.policy.head import matmul_precision
from rljax.policy.kernels import ON_ANY_BACKEND, Kernels, choose_kernels
from rljax.policy.layers import RoutingRecord
from rljax.policy.lora import OFF, LoraConfig, MergedPolicy
from rljax.policy.model import (
    Params,
    Remat,
    abstract_params,
    cast_params,
    gathered_axes,
    logical_axes,
    param_shardings,
)
from rljax.policy.score import Scores, packed_logprobs
from rljax.policy.trained import find_trained
from rljax.sharding import constrain, named_sharding, replicated
from rljax.trainer.measure import DiagnosisConfig, finalize_measured, measure
from rljax.trainer.micro_batches import abstract_batch, over_micro_batches, place_batch
from rljax.trainer.objective import Objective
from rljax.trainer.packing import Given, PackedBatch
from rljax.trainer.replicas import merge_over_replicas, on_each_replica
from rljax.trainer.router import balance_loss
from rljax.trainer.state import TrainState, abstract_state
from rljax.trainer.totals import (
    Controls,
    Totals,
    add_micro_batch,
    add_up_replicas,
    place_controls,
    update_state,
    zero_totals,
)

Dtype = Literal["bfloat16", "float16", "float32"]


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
      compute: parameters in the compute dtype that the gradient is taken of.
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
        balance: jax.Array | float = 0.0
        if objective.loss.router_balance and scores.stats.router is not None:
            balance = balance_loss(scores.stats.router)
        loss, statistics = objective.micro_loss(scores.logprobs, micro, provisional, mean_weight, balance)
        return loss * scale, (statistics, scores)

    (_, (statistics, scores)), grads = jax.value_and_grad(loss_fn, has_aux=True)(compute)
    return grads, statistics, scores


def given_choices(micro: PackedBatch, config: PolicyConfig) -> jax.Array | None:
    """``choices`` [b, t, layers, k] for ``hidden_states`` of a micro-batch with routes, else None."""
    if micro.routes is None:
        return None
    choices = micro.routes.astype(jnp.int32) - 1
    return choices.reshape(*micro.tokens.shape, config.num_layers, config.experts_per_token)


def taken_routes(routed: RoutingRecord, config: PolicyConfig) -> jax.Array:
    """``PackedBatch.routes`` [b, t, l * k] of the choices that a forward made."""
    choices = jnp.moveaxis(routed.choices, 0, 2)
    return (choices + 1).astype(route_dtype(config.num_experts)).reshape(*choices.shape[:2], -1)


def make_score(
    config: PolicyConfig, precision: PrecisionConfig, temperature: float, kernels: Kernels = ON_ANY_BACKEND
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
            attention=kernels.attention,
            grouped=kernels.grouped,
            choices=given_choices(micro, config),
        )
        logprobs, entropy = (constrain(x, None, None) for x in (scores.logprobs, scores.entropy))
        return scores._replace(logprobs=logprobs, entropy=entropy)

    return score


def constrain_tree(params: Params, axes: Params) -> Params:
    """Each parameter constrained to its logical axes."""
    return jax.tree.map(lambda leaf, names: constrain(leaf, *names), params, axes)


def _abstract_weights(config: PolicyConfig, mesh: Mesh, dtype: Any) -> Params:
    """``jax.ShapeDtypeStruct`` with a sharding at each leaf, of what ``MergedPolicy`` gives."""
    return jax.tree.map(
        lambda leaf, sharding: leaf.update(dtype=dtype, sharding=sharding),
        abstract_params(config),
        param_shardings(config, mesh),
    )


class Programs(NamedTuple):
    """The jitted functions of a ``TrainStep``, and what they take.

    Attributes:
      step: state, batch, controls and, with adapters, the weights that they make -> state, row, log-probabilities.
      forward: parameters and batch -> row and what was kept.
      abstract_state: ``jax.ShapeDtypeStruct`` with a sharding at each leaf.
      abstract_weights: likewise, of the weights that adapters make; empty without adapters.
    """

    step: Any
    forward: Any
    abstract_state: TrainState
    abstract_weights: list[Params]


@functools.lru_cache(maxsize=8)
def make_programs(
    config: PolicyConfig,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    precision: PrecisionConfig,
    objective: Objective,
    batch_shape: tuple[int, int, int],
    temperature: float,
    diagnosis: DiagnosisConfig | None,
    keep_gathered: bool,
    options: PolicyOptions,
    lora: LoraConfig,
) -> Programs:
    """The programs of a ``TrainStep``, whose arguments these are.

    Two steps in one process that are made alike, as by a run and the one that goes on from it, share them: they are
    traced and compiled once. The programs of the last eight kinds are kept.
    """
    dynamic = precision.compute_dtype == "float16"
    dtype = jnp.dtype(precision.compute_dtype)
    score = make_score(config, precision, temperature, choose_kernels(options, config, precision.compute_dtype, mesh))
    trained, axes = find_trained(config, lora), logical_axes(config)
    axes_of_copy = gathered_axes(config) if keep_gathered else axes

    def copy_weights(params: Params) -> Params:
        # Cast where they lie, and gathered after that: what travels has the compute dtype.
        return constrain_tree(constrain_tree(cast_params(params, dtype), axes), axes_of_copy)

    def forward_alone(
        compute: Params, num_sequences: int, diagnosis: DiagnosisConfig | None, with_routes: bool = False
    ) -> Any:
        def each(micro: PackedBatch) -> tuple[dict[str, Statistics], Any]:
            scores = score(compute, micro)
            routes = taken_routes(scores.stats.router, config) if with_routes else None
            kept = (scores.logprobs, routes) if with_routes else scores.logprobs
            return measure(scores, micro, num_sequences, diagnosis), kept

        return each

    def train_step(
        state: TrainState, batch: PackedBatch, controls: Controls, weights: Params | None = None
    ) -> tuple[TrainState, dict[str, jax.Array], jax.Array]:
        def work(
            batch: PackedBatch,
            compute: Params,
            needed: Any,
            scale: Any,
            provisional: Any,
            mean_weight: Any,
            noise: Any,
        ) -> tuple[Totals, jax.Array]:
            def score_part(part: Params, micro: PackedBatch) -> Scores:
                return score(trained.with_targets(compute, part), micro)

            def each(micro: PackedBatch) -> tuple[Found, jax.Array]:
                grads, loss, scores = micro_gradients(
                    trained.targets(compute), micro, objective, score_part, scale, provisional, mean_weight
                )
                measured = measure(scores, micro, objective.num_sequences, diagnosis)
                return (trained.gradients(needed, grads), loss, measured), scores.logprobs

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
            return totals._replace(grads=constrain_tree(totals.grads, trained.axes()))

        with jax.default_matmul_precision(matmul_precision(dtype)):
            compute = copy_weights(state.params if weights is None else weights)
            shared = (state.loss_scale.scale, objective.provisional(batch), objective.mean_weight(batch))
            needed = trained.residuals(state.params)
            totals, logprobs = on_each_replica(
                work, add_up_replicas, batch, compute, needed, *shared, controls.measure_noise
            )
        state, row = update_state(state, totals, batch, tx, objective, controls, dynamic=dynamic)
        return state, row | finalize_measured(totals.measured, diagnosis), logprobs

    def forward(
        params: Params, batch: PackedBatch, *, num_sequences: int, diagnosis: DiagnosisConfig, with_routes: bool
    ) -> tuple[dict[str, jax.Array], Any]:
        def work(batch: PackedBatch, compute: Params) -> tuple[dict[str, Statistics], Any]:
            each = forward_alone(compute, num_sequences, diagnosis, with_routes)
            return over_micro_batches(batch, each, zeros, merge, (0, batch.used))

        with jax.default_matmul_precision(matmul_precision(dtype)):
            compute = copy_weights(params)
            measured, kept = on_each_replica(work, merge_over_replicas, batch, compute)
        return finalize_measured(measured, diagnosis), kept

    abstract = abstract_state(config, tx, mesh, dynamic_scale=dynamic, lora=lora)
    everywhere, by_rows = replicated(mesh), named_sharding(mesh, ("micro", "rows", "tokens"), batch_shape)
    weights = [_abstract_weights(config, mesh, dtype)] if lora.rank else []
    by_state = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    step = jax.jit(
        train_step,
        in_shardings=(by_state, None, everywhere, *[None for _ in weights]),
        out_shardings=(by_state, everywhere, by_rows),
        donate_argnums=(0,),
    )
    alone = jax.jit(
        forward,
        static_argnames=("num_sequences", "diagnosis", "with_routes"),
        out_shardings=(everywhere, by_rows),
    )
    return Programs(step, alone, abstract, weights)


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
        options: PolicyOptions = DEFAULTS,
        lora: LoraConfig = OFF,
        merged: MergedPolicy | None = None,
    ):
        """Builds the step; it is compiled at the first call of one made alike and never again.

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
          options: how the policy is computed, on the devices of the mesh (``choose_kernels``, which may refuse them).
          lora: which adapters are trained; the state then holds these.
          merged: gives the weights that the adapters make; needed with adapters, but not to ``lower``.
        """
        self._programs = make_programs(
            config,
            tx,
            mesh,
            precision,
            objective,
            batch_shape,
            temperature,
            diagnosis,
            keep_gathered,
            options,
            lora,
        )
        self._mesh, self._merged, self._batch_shape = mesh, merged, batch_shape
        self._everywhere = replicated(mesh)
        self._by_rows = named_sharding(mesh, ("micro", "rows", "tokens"), batch_shape)

    @property
    def compilations(self) -> int:
        """How often the step was compiled, those of other ``TrainStep`` made alike included; 1 after the first call."""
        return int(self._programs.step._cache_size())

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
        weights = [] if self._merged is None else [self._merged(state.params)]
        with jax.set_mesh(self._mesh), jax.transfer_guard("disallow"):
            return self._programs.step(state, placed, controls, *weights)

    def lower(self, *given: Given) -> jax.stages.Lowered:
        """The step's program for the mesh's devices, which need not be here: shapes stand for state and batch.

        Args:
          given: the optional arrays of ``PackedBatch`` that the batches have.

        Returns:
          What ``.compile()`` makes the executable of that ``__call__`` runs.
        """
        batch = abstract_batch(self._batch_shape, self._by_rows, self._everywhere, given)
        scalars = Controls(jnp.float32, jnp.bool_, jnp.bool_)
        controls = jax.tree.map(lambda dtype: jax.ShapeDtypeStruct((), dtype, sharding=self._everywhere), scalars)
        programs = self._programs
        with jax.set_mesh(self._mesh):
            return programs.step.lower(programs.abstract_state, batch, controls, *programs.abstract_weights)

    def forward(
        self,
        params: Params,
        batch: PackedBatch,
        *,
        num_sequences: int,
        diagnosis: DiagnosisConfig,
        with_routes: bool = False,
    ) -> tuple[dict[str, jax.Array], Any]:
        """The mismatch of a batch under ``params`` (the whole policy), and their log-probabilities [m, b, t].

        The number of micro-batches, and that of sequences, need not be those of the steps. ``with_routes``: in place of
        the log-probabilities a pair of them and ``PackedBatch.routes`` as this forward took them.
        """
        placed = place_batch(batch, self._by_rows, self._everywhere)
        with jax.set_mesh(self._mesh), jax.transfer_guard("disallow"):
            return self._programs.forward(
                params, placed, num_sequences=num_sequences, diagnosis=diagnosis, with_routes=with_routes
            )
