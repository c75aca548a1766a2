"""One training step as one compiled, sharded, donated function.

    cast the masters once -> for each micro-batch: forward (log-probabilities, entropy, mismatch), loss, backward,
    accumulate in float32 -> for each micro-batch without loss: forward -> unscale -> clip -> AdamW

If adapters are trained, the step receives the merged weights of ``MergedPolicy``. A micro-batch's gradient with respect
to these becomes the gradient of the adapters before it is accumulated. With one update for each rollout batch,
``old_logprobs`` is ``stop_gradient(trainer_logprobs)``, so the forward of the loss measures the mismatch.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from rljax.mismatch import Statistics, merge, zeros
from rljax.policy.config import DEFAULTS, PolicyConfig, PolicyOptions
from rljax.policy.head import matmul_precision
from rljax.policy.kernels import Kernels, choose_kernels
from rljax.policy.lora import OFF, LoraConfig, MergedPolicy, TrainedParams
from rljax.policy.model import Params, abstract_params, cast_params, gathered_axes, logical_axes, param_shardings
from rljax.policy.score import Scores, packed_logprobs
from rljax.sharding import constrain, constrain_tree, named_sharding, replicated
from rljax.trainer.measure import DiagnosisConfig, finalize_measured, measure
from rljax.trainer.micro_batches import (
    BATCH_AXES,
    abstract_batch,
    batch_axes,
    merge_over_replicas,
    on_each_replica,
    over_micro_batches,
    place_batch,
)
from rljax.trainer.objective import Objective
from rljax.trainer.packing import OptionalLogprobs, PackedBatch
from rljax.trainer.precision import PrecisionConfig
from rljax.trainer.router import balance_loss, replayed_choices, routes_of
from rljax.trainer.state import TrainState, abstract_state
from rljax.trainer.totals import (
    Controls,
    Totals,
    add_micro_batch,
    add_up_replicas,
    place_controls,
    square_norm,
    update_state,
    zero_totals,
)

# The sums of a micro-batch: gradients, the statistics of ``Objective.micro_loss`` and the statistics of ``measure``.
MicroSums = tuple[Params, Statistics, dict[str, Statistics]]


def micro_gradients(
    compute: Params,
    micro: PackedBatch,
    objective: Objective,
    score: Any,
    scale: jax.Array,
    provisional: jax.Array,
    mean_weight: jax.Array | float = 1.0,
) -> tuple[Params, Statistics, Scores]:
    """Computes the forward and backward of one micro-batch [b, t].

    Args:
      compute: The parameters in the compute dtype, with respect to which the gradient is taken.
      score: A function of parameters and a micro-batch that returns ``Scores``.
      scale: The factor of the loss.
      provisional: The provisional denominator of the loss.
      mean_weight: The mean weight, from ``Objective.mean_weight``.

    Returns:
      The gradients in the compute dtype, the statistics of the loss, and the scores.
    """

    def loss_fn(compute: Params) -> tuple[jax.Array, tuple[Statistics, Scores]]:
        scores = score(compute, micro)
        balance: jax.Array | float = 0.0
        if objective.loss.router_balance and scores.stats.router is not None:
            balance = balance_loss(scores.stats.router)
        loss, statistics = objective.micro_loss(scores, micro, provisional, mean_weight, balance)
        return loss * scale, (statistics, scores)

    (_, (statistics, scores)), grads = jax.value_and_grad(loss_fn, has_aux=True)(compute)
    return grads, statistics, scores


def make_score(
    config: PolicyConfig,
    precision: PrecisionConfig,
    temperature: float,
    kernels: Kernels,
    *,
    cut: bool = False,
    tops: bool = False,
    collision: bool = False,
) -> Any:
    """Returns a function ``score(compute, micro) -> Scores``. Each device gets the scores of all tokens.

    Args:
      cut: Whether the sampled distributions are cut to ``PackedBatch.top_ids``, and scored as such.
      tops: Whether the scores have the log-probabilities of ``PackedBatch.top_ids``.
      collision: Whether the scores have the sums of squared probabilities.
    """

    def score(compute: Params, micro: PackedBatch) -> Scores:
        tokens, top_ids = micro.tokens, micro.top_ids
        if top_ids is not None:
            # Losses need both whole. The policy works on the rows of each device.
            tokens, top_ids = (constrain(x, *batch_axes(x)) for x in (tokens, top_ids))
        elif cut or tops:
            raise ValueError("the batch must have the sampler's likeliest tokens (top_ids) to be scored, got none")
        scores = packed_logprobs(
            compute,
            config,
            *(tokens, micro.segment_ids, micro.positions),
            temperature=temperature,
            lm_head_dtype=precision.head_dtype,
            remat=precision.remat_policy,
            kernels=kernels,
            choices=replayed_choices(micro, config),
            top_ids=top_ids if cut or tops else None,
            cut=cut,
            collision=collision,
        )
        of_tokens: dict[str, Any] = {
            name: x for name, x in scores._asdict().items() if name != "stats" and x is not None
        }
        whole: dict[str, Any] = {name: constrain(x, *[None] * x.ndim) for name, x in of_tokens.items()}
        return scores._replace(**whole)

    return score


class TokenValues(NamedTuple):
    """The values of the tokens of a batch that a forward keeps. Those that were not asked for are None."""

    logprobs: Any  # float32 [m, b, t], the trainer's log-probabilities
    routes: Any = None  # the ``PackedBatch.routes`` that the forward chose
    collision: Any = None  # float32 [m, b, t], the sums of the squared probabilities
    entropy: Any = None  # float32 [m, b, t], the entropies of the scored distributions (nats)
    tops: Any = None  # float32 [m, b, t, k], the trainer's log-probabilities of ``PackedBatch.top_ids``


def values_of(scores: Any, for_dumps: bool) -> TokenValues:
    """Returns the values of tokens from their scores. ``for_dumps``: Whether token dumps need more of them."""
    values = TokenValues(scores.logprobs)
    return values._replace(entropy=scores.entropy, tops=scores.tops) if for_dumps else values


class Programs(NamedTuple):
    """The jitted functions of a ``TrainStep``, and the shapes of their arguments."""

    step: Any  # a function (state, batch, controls, merged weights of adapters) -> (new state, row, ``TokenValues``)
    loss_forward: Any  # a function of the arguments of ``step`` -> (``TokenValues``, squared norm of the gradients)
    forward: Any  # a function (parameters, batch) -> (row, ``TokenValues``)
    abstract_state: TrainState  # the state, with a jax.ShapeDtypeStruct and a sharding at each leaf
    abstract_weights: list[Params]  # the merged weights of adapters, in the same form; empty without adapters


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
    cut: bool,
    for_dumps: bool,
) -> Programs:
    """Makes the programs of a ``TrainStep`` from the arguments of the step.

    Two steps with equal arguments share their programs, such as the steps of a run and of its continuation in the same
    process. They are traced and compiled once. The programs of the last eight kinds are kept.
    """
    dynamic = precision.compute_dtype == "float16"
    dtype = jnp.dtype(precision.compute_dtype)
    kernels, correction = choose_kernels(options, config, precision.compute_dtype, mesh), objective.correction
    make = functools.partial(make_score, config, precision, temperature, kernels, cut=cut)
    score_alone, score_collision = make(), make(collision=True)
    score = make(tops=correction.needs_tops, collision=correction.needs_collision)
    trained, axes = TrainedParams(config, lora), logical_axes(config)
    axes_of_copy = gathered_axes(config) if keep_gathered else axes

    def copy_weights(params: Params) -> Params:
        # The weights are cast before they are gathered, so that they travel in the compute dtype.
        return constrain_tree(constrain_tree(cast_params(params, dtype), axes), axes_of_copy)

    def casts_alone(batch: PackedBatch) -> bool:
        # Without a loop over micro-batches, neither the copy of the weights nor the total of the gradients has to be
        # kept from its beginning to its end. That takes four bytes a parameter less.
        return len(batch.tokens) == 1

    def forward_alone(
        compute: Params,
        num_sequences: int,
        diagnosis: DiagnosisConfig | None,
        score: Any,
        for_dumps: bool,
        with_routes: bool = False,
        with_collision: bool = False,
    ) -> Any:
        def each(micro: PackedBatch) -> tuple[dict[str, Statistics], TokenValues]:
            scores = score(compute, micro)
            routes = routes_of(scores.stats.router, config) if with_routes else None
            collision = scores.collision if with_collision else None
            values = values_of(scores, for_dumps)._replace(routes=routes, collision=collision)
            return measure(scores, micro, num_sequences, diagnosis), values

        return each

    def gradients(
        state: TrainState, batch: PackedBatch, controls: Controls, weights: Params | None
    ) -> tuple[Totals, TokenValues]:
        def work(batch: PackedBatch, *shared: Any) -> tuple[Totals, Any]:
            if not casts_alone(batch):
                return sums(batch, (batch.with_loss, batch.used), *shared)
            params, *others = shared
            return jax.lax.cond(
                batch.with_loss > 0,
                lambda: sums(batch, (1, 1), copy_weights(params), *others),
                lambda: sums(batch, (0, batch.used), copy_weights(params), *others),
            )

        def sums(
            batch: PackedBatch, counts: tuple[Any, Any], compute: Params, needed: Any, noise: Any, *of_loss: Any
        ) -> tuple[Totals, Any]:
            def score_part(part: Params, micro: PackedBatch) -> Scores:
                return score(trained.with_targets(compute, part), micro)

            def each(micro: PackedBatch) -> tuple[MicroSums, TokenValues]:
                targets = trained.targets(compute)
                grads, loss, scores = micro_gradients(targets, micro, objective, score_part, *of_loss)
                measured = measure(scores, micro, objective.num_sequences, diagnosis)
                return (trained.gradients(needed, grads), loss, measured), values_of(scores, for_dumps)

            def add(totals: Totals, sums: MicroSums) -> Totals:
                return constrained(add_micro_batch(totals, *sums, noise))

            def zero(shapes: MicroSums) -> Totals:
                return constrained(zero_totals(*shapes))

            totals, values = over_micro_batches(batch, each, zero, add, (0, counts[0]))
            # The values that are kept must be the same in both kinds of micro-batches.
            score_rest = score if for_dumps else score_alone
            alone = forward_alone(compute, objective.num_sequences, diagnosis, score_rest, for_dumps)
            measured, values = over_micro_batches(batch, alone, lambda _: totals.measured, merge, counts, values)
            return totals._replace(measured=measured), values

        def constrained(totals: Totals) -> Totals:
            return totals._replace(grads=constrain_tree(totals.grads, trained.axes()))

        with jax.default_matmul_precision(matmul_precision(dtype)):
            compute = state.params if weights is None else weights
            compute = compute if casts_alone(batch) else copy_weights(compute)
            of_loss = (state.loss_scale.scale, objective.provisional(batch), objective.mean_weight(batch))
            shared = (compute, trained.residuals(state.params), controls.measure_noise, *of_loss)
            return on_each_replica(work, add_up_replicas, batch, *shared)

    def train_step(
        state: TrainState, batch: PackedBatch, controls: Controls, weights: Params | None = None
    ) -> tuple[TrainState, dict[str, jax.Array], TokenValues]:
        totals, values = gradients(state, batch, controls, weights)
        state, row = update_state(state, totals, batch, tx, objective, controls, dynamic=dynamic)
        return state, row | finalize_measured(totals.measured, diagnosis), values

    def loss_forward(
        state: TrainState, batch: PackedBatch, controls: Controls, weights: Params | None = None
    ) -> tuple[TokenValues, jax.Array]:
        totals, values = gradients(state, batch, controls, weights)
        return values, square_norm(totals.grads)  # without a use the compiler would leave the backward out

    def forward(
        params: Params,
        batch: PackedBatch,
        *,
        num_sequences: int,
        diagnosis: DiagnosisConfig,
        with_routes: bool,
        with_collision: bool,
        for_dumps: bool,
    ) -> tuple[dict[str, jax.Array], TokenValues]:
        def work(batch: PackedBatch, compute: Params) -> tuple[dict[str, Statistics], TokenValues]:
            chosen = score_collision if with_collision else score_alone
            flags = (for_dumps, with_routes, with_collision)
            each = forward_alone(compute, num_sequences, diagnosis, chosen, *flags)
            return over_micro_batches(batch, each, zeros, merge, (0, batch.used))

        with jax.default_matmul_precision(matmul_precision(dtype)):
            compute = copy_weights(params)
            measured, values = on_each_replica(work, merge_over_replicas, batch, compute)
        return finalize_measured(measured, diagnosis), values

    abstract = abstract_state(config, tx, mesh, dynamic_scale=dynamic, lora=lora)
    everywhere, by_rows = replicated(mesh), named_sharding(mesh, BATCH_AXES, batch_shape)
    merged = [(abstract_params(config), param_shardings(config, mesh))] if lora.rank else []
    weights = [jax.tree.map(lambda leaf, where: leaf.update(dtype=dtype, sharding=where), *trees) for trees in merged]
    by_state = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    step = jax.jit(
        train_step,
        in_shardings=(by_state, None, everywhere, *[None for _ in weights]),
        out_shardings=(by_state, everywhere, by_rows),
        donate_argnums=(0,),
    )
    again = jax.jit(
        loss_forward,
        in_shardings=(by_state, None, everywhere, *[None for _ in weights]),
        out_shardings=(by_rows, everywhere),
    )
    alone = jax.jit(
        forward,
        static_argnames=("num_sequences", "diagnosis", "with_routes", "with_collision", "for_dumps"),
        out_shardings=(everywhere, by_rows),
    )
    return Programs(step, again, alone, abstract, weights)


class TrainStep:
    """The compiled step ``step(state, batch, learning_rate, apply_update)``, and a forward without a gradient."""

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
        cut: bool = False,
        for_dumps: bool = False,
    ):
        """Prepares the step. It is compiled at the first call; a step with equal arguments is not compiled again.

        Args:
          tx: The optimizer of ``make_optimizer``.
          batch_shape: The shape (micro-batches, rows, tokens) of every batch.
          temperature: The temperature of the rollouts. Log-probabilities are those of the sampled distribution.
          diagnosis: The settings of the mismatch metrics; None if the step does not measure the mismatch.
          keep_gathered: Whether every device keeps the gathered weights for the whole step (``MeshConfig``).
          options: The choice of kernels, which ``choose_kernels`` refuses if the devices lack one.
          lora: The choice of adapters. If there are any, the state has the adapters.
          merged: A function that returns the weights that the adapters make. ``lower`` does not need it.
          cut: Whether the rollouts were sampled from a cut distribution. All log-probabilities and entropies are then
            of the distributions over ``PackedBatch.top_ids``, which each batch must have.
          for_dumps: Whether the token values have the entropies and, where the loss needs them, ``tops``.
        """
        settings = (temperature, diagnosis, keep_gathered, options, lora, cut, for_dumps)
        self._programs = make_programs(config, tx, mesh, precision, objective, batch_shape, *settings)
        self._mesh, self._merged, self._batch_shape = mesh, merged, batch_shape
        self._everywhere = replicated(mesh)
        self._by_rows = named_sharding(mesh, BATCH_AXES, batch_shape)

    @property
    def compilations(self) -> int:
        """The number of compilations of this step and of steps with equal arguments; 1 after the first call."""
        return int(self._programs.step._cache_size())

    def __call__(
        self,
        state: TrainState,
        batch: PackedBatch,
        learning_rate: float,
        apply_update: bool,
        measure_noise: bool = False,
    ) -> tuple[TrainState, dict[str, jax.Array], TokenValues]:
        """Trains on one batch of the shape ``batch_shape``. The state is donated.

        Args:
          apply_update: Whether to apply the update. If not, parameters and moments stay as they are, without weight
            decay. The same happens if gradients are not finite or every token was rejected. Each case is counted.
          measure_noise: Whether to measure ``optimizer/grad_noise``, which is NaN otherwise.

        Returns:
          The new state, the metrics of the row on the device (scalars, and the histogram), and the values of the
          tokens before the update.
        """
        controls = place_controls(learning_rate, apply_update, measure_noise, self._everywhere)
        return self._run(self._programs.step, state, batch, controls)

    def loss_forward(self, state: TrainState, batch: PackedBatch) -> TokenValues:
        """Computes the values of the tokens by the forward and backward of the step, without an update.

        The batch may have another number of micro-batches than the steps. The state is not donated.
        """
        controls = place_controls(0.0, False, False, self._everywhere)
        return self._run(self._programs.loss_forward, state, batch, controls)[0]

    def _run(self, program: Any, state: TrainState, batch: PackedBatch, controls: Controls) -> Any:
        """Places the batch and calls a program of gradients."""
        placed = place_batch(batch, self._by_rows, self._everywhere)
        weights = [] if self._merged is None else [self._merged(state.params)]
        with jax.set_mesh(self._mesh), jax.transfer_guard("disallow"):
            return program(state, placed, controls, *weights)

    def lower(self, *optional: OptionalLogprobs, reported: int = 0) -> jax.stages.Lowered:
        """Lowers the step for the devices of the mesh, which need not exist: shapes replace state and batch.

        Its ``.compile()`` returns the executable that ``__call__`` runs. ``optional`` names the optional
        log-probabilities that the batches have. ``reported`` is the number of likeliest tokens that they have.
        """
        batch = abstract_batch(self._batch_shape, self._by_rows, self._everywhere, optional, reported)
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
        with_collision: bool = False,
        for_dumps: bool = False,
    ) -> tuple[dict[str, jax.Array], TokenValues]:
        """Measures the mismatch of a batch under the whole policy's parameters, without a gradient.

        The batch may have another number of micro-batches than the steps. The flags ask for more values of its tokens.

        Returns:
          The metrics of the row, and the values of the tokens.
        """
        placed = place_batch(batch, self._by_rows, self._everywhere)
        with jax.set_mesh(self._mesh), jax.transfer_guard("disallow"):
            return self._programs.forward(
                params,
                placed,
                num_sequences=num_sequences,
                diagnosis=diagnosis,
                with_routes=with_routes,
                with_collision=with_collision,
                for_dumps=for_dumps,
            )
