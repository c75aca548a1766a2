"""One training step as one compiled, sharded, donated function.

    cast the masters once -> for each micro-batch: forward (log-probabilities, entropy, mismatch), loss, backward,
    accumulate in float32 -> for each micro-batch without loss: forward -> unscale -> clip -> AdamW

If adapters are trained, the step receives the merged weights of ``MergedPolicy``. A micro-batch's gradient with respect
to these becomes the gradient of the adapters before it is accumulated. With one update for each rollout batch,
``old_logprobs`` is ``stop_gradient(trainer_logprobs)``, so the forward of the loss measures the mismatch.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from rljax.mismatch import Statistics, merge, zeros
from rljax.policy.config import DEFAULTS, PolicyConfig, PolicyOptions
from rljax.policy.head import TokenScores, matmul_precision
from rljax.policy.kernels import choose_kernels
from rljax.policy.lora import OFF, LoraConfig, MergedPolicy, TrainedParams, with_targets
from rljax.policy.model import Params, abstract_params, cast_params, gathered_axes, logical_axes, param_shardings
from rljax.policy.score import packed_logprobs
from rljax.sharding import compiler_options, constrain, constrain_tree, named_sharding, narrow_gradient_sums, replicated
from rljax.trainer.measure import DiagnosisConfig, finalize_measured, measure, replayed_choices, routes_of
from rljax.trainer.micro_batches import (
    BATCH_AXES,
    abstract_batch,
    batch_axes,
    merge_over_replicas,
    on_each_replica,
    over_micro_batches,
    place_batch,
)
from rljax.trainer.objective import MicroSums, Objective, micro_gradients, values_of
from rljax.trainer.packing import OptionalLogprobs, PackedBatch
from rljax.trainer.state import PrecisionConfig, TrainState, abstract_state
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

FLAGS = ("with_routes", "with_collision", "for_dumps")
"""The flags of ``TrainStep.forward``. Each is false where it is not given."""


@dataclass(frozen=True)
class TrainStep:
    """The compiled step ``step(state, batch, learning_rate, apply_update)``, and forwards beside it.

    It is compiled at the first call. Another step whose fields are equal, except ``merged`` and ``flat_tokens``, is not
    compiled again. ``choose_kernels`` refuses a kernel that the devices lack.
    """

    config: PolicyConfig
    tx: optax.GradientTransformation  # the optimizer of ``make_optimizer``
    mesh: Mesh
    _: KW_ONLY
    precision: PrecisionConfig
    objective: Objective
    batch_shape: tuple[int, int, int]  # the shape (micro-batches, rows, tokens) of every batch
    temperature: float = 1.0  # the temperature of the rollouts, at which the trainer scores their tokens, too
    diagnosis: DiagnosisConfig | None  # the settings of the mismatch metrics; None if the step does not measure them
    keep_gathered: bool = False  # whether every device keeps the gathered weights for the whole step (``MeshConfig``)
    options: PolicyOptions = DEFAULTS  # the choice of kernels
    lora: LoraConfig = OFF  # the choice of adapters; if there are any, the state has the adapters
    # Whether the rollouts were sampled from a cut distribution. All log-probabilities and entropies are then of the
    # distributions over ``PackedBatch.top_ids``, which each batch must have.
    cut: bool = False
    for_dumps: bool = False  # whether the token values have the entropies and, where the loss needs them, ``tops``
    # A function that returns the weights that the adapters make. ``lower`` does not need it.
    merged: MergedPolicy | None = field(default=None, compare=False)
    # The length of the flat rows of responses beside rows of trees, for ``lower``. 0: no trees.
    flat_tokens: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        self.score()

    @property
    def dtype(self) -> Any:
        """The compute dtype."""
        return jnp.dtype(self.precision.compute_dtype)

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale is dynamic, which only float16 needs."""
        return self.precision.compute_dtype == "float16"

    @property
    def trained(self) -> TrainedParams:
        """The description of the parameters that are trained: the adapters, or all weights."""
        return TrainedParams(self.config, self.lora)

    def score(self, *, tops: bool = False, collision: bool = False) -> Any:
        """Returns a function ``score(compute, micro) -> TokenScores``. Each device gets the scores of all tokens.

        If the distributions are ``cut``, scores are normalised over ``PackedBatch.top_ids``. ``tops`` adds the
        log-probabilities of ``top_ids`` to the scores, and ``collision`` the sums of squared probabilities.
        """
        precision, asked = self.precision, self.cut or tops
        kernels = choose_kernels(self.options, self.config, precision.compute_dtype, self.mesh)

        def score(compute: Params, micro: PackedBatch) -> TokenScores:
            tokens, top_ids = micro.tokens, micro.top_ids
            if top_ids is not None:
                # Losses need both whole. The policy works on the rows of each device.
                tokens, top_ids = (constrain(x, *batch_axes(x)) for x in (tokens, top_ids))
            elif asked:
                raise ValueError("the batch must have the sampler's likeliest tokens (top_ids) to be scored, got none")
            with narrow_gradient_sums(precision.reduce_dtype == "compute"):
                scores = packed_logprobs(
                    compute,
                    self.config,
                    *(tokens, micro.segment_ids, micro.positions),
                    temperature=self.temperature,
                    lm_head_dtype=precision.head_dtype,
                    remat=precision.remat_policy,
                    kernels=kernels,
                    choices=replayed_choices(micro, self.config),
                    top_ids=top_ids if asked else None,
                    cut=self.cut,
                    collision=collision,
                    trees=micro.trees,
                )
            of_tokens = {name: x for name, x in scores._asdict().items() if name != "stats" and x is not None}
            whole: dict[str, Any] = {name: constrain(x, *[None] * x.ndim) for name, x in of_tokens.items()}
            return scores._replace(**whole)

        return score

    def copy_weights(self, params: Params) -> Params:
        """Casts the masters to the compute dtype. With ``keep_gathered``, gathers the copy over the model width."""
        # The weights are cast before they are gathered, so that they travel in the compute dtype.
        axes = logical_axes(self.config)
        axes_of_copy = gathered_axes(self.config) if self.keep_gathered else axes
        return constrain_tree(constrain_tree(cast_params(params, self.dtype), axes), axes_of_copy)

    def constrained(self, totals: Totals) -> Totals:
        """Returns totals whose gradients are sharded as the parameters are."""
        return totals._replace(grads=constrain_tree(totals.grads, self.trained.declared.axes()))

    def alone(
        self,
        compute: Params,
        score: Any,
        num_sequences: int,
        diagnosis: DiagnosisConfig | None,
        *,
        for_dumps: bool,
        with_routes: bool = False,
    ) -> Any:
        """Returns a function of a micro-batch that returns its statistics and token values, without a gradient."""

        def each(micro: PackedBatch) -> tuple[dict[str, Statistics], TokenScores]:
            scores = score(compute, micro)
            routes = routes_of(scores.stats.router, self.config) if with_routes else None
            values = values_of(scores, for_dumps)._replace(routes=routes, collision=scores.collision)
            return measure(scores, micro, num_sequences, diagnosis), values

        return each

    def sums(
        self, batch: PackedBatch, counts: tuple[Any, Any], compute: Params, needed: Any, noise: Any, *of_loss: Any
    ) -> tuple[Totals, TokenScores]:
        """Adds up the gradients and statistics of the micro-batches of one replica; returns them and the token values.

        ``counts`` are the numbers of micro-batches with loss and with sequences. ``compute`` has the weights in the
        compute dtype, and ``needed`` the residuals that the gradients of adapters need. With ``noise`` the noise of the
        gradients is measured. ``of_loss`` is the factor of the loss, its provisional denominator, and the numbers of
        ``Objective.batch_numbers``.
        """
        trained, objective = self.trained, self.objective
        score = self.score(tops=objective.correction.needs_tops)

        def score_part(part: Params, micro: PackedBatch) -> TokenScores:
            return score(with_targets(compute, part), micro)

        def each(micro: PackedBatch) -> tuple[MicroSums, TokenScores]:
            targets = trained.targets(compute)
            grads, loss, scores = micro_gradients(targets, micro, objective, score_part, *of_loss)
            measured = measure(scores, micro, objective.num_sequences, self.diagnosis)
            return (trained.gradients(needed, grads), loss, measured), values_of(scores, self.for_dumps)

        def add(totals: Totals, sums: MicroSums) -> Totals:
            return self.constrained(add_micro_batch(totals, *sums, noise))

        def zero(shapes: MicroSums) -> Totals:
            return self.constrained(zero_totals(*shapes))

        totals, values = over_micro_batches(batch, each, zero, add, (0, counts[0]))
        # The values that are kept must be the same in both kinds of micro-batches.
        score_rest = score if self.for_dumps else self.score()
        alone = self.alone(compute, score_rest, objective.num_sequences, self.diagnosis, for_dumps=self.for_dumps)
        measured, values = over_micro_batches(batch, alone, lambda _: totals.measured, merge, counts, values)
        return totals._replace(measured=measured), values

    def gradients(
        self, state: TrainState, batch: PackedBatch, controls: Controls, weights: Params | None
    ) -> tuple[Totals, TokenScores]:
        """Adds up the gradients and the statistics of a batch over micro-batches and replicas."""
        # A single micro-batch needs no loop. So neither the copy of the weights nor the total of the gradients has to
        # be kept across a loop, which saves four bytes a parameter.
        casts_alone = len(batch.tokens) == 1

        def work(batch: PackedBatch, *shared: Any) -> tuple[Totals, Any]:
            if not casts_alone:
                return self.sums(batch, (batch.with_loss, batch.used), *shared)
            params, *others = shared
            return jax.lax.cond(
                batch.with_loss > 0,
                lambda: self.sums(batch, (1, 1), self.copy_weights(params), *others),
                lambda: self.sums(batch, (0, batch.used), self.copy_weights(params), *others),
            )

        objective = self.objective
        with jax.default_matmul_precision(matmul_precision(self.dtype)):
            compute = state.params if weights is None else weights
            compute = compute if casts_alone else self.copy_weights(compute)
            of_loss = (state.loss_scale.scale, objective.provisional(batch), objective.batch_numbers(batch))
            shared = (compute, self.trained.residuals(state.params), controls.measure_noise, *of_loss)
            return on_each_replica(work, add_up_replicas, batch, *shared)

    def train_step(
        self, state: TrainState, batch: PackedBatch, controls: Controls, weights: Params | None = None
    ) -> tuple[TrainState, dict[str, jax.Array], TokenScores]:
        """Makes one step; returns the new state, the metrics of the row, and the token values before the update."""
        totals, values = self.gradients(state, batch, controls, weights)
        state, row = update_state(state, totals, batch, self.tx, self.objective, controls, dynamic=self.dynamic)
        return state, row | finalize_measured(totals.measured, self.diagnosis), values

    def loss_values(
        self, state: TrainState, batch: PackedBatch, controls: Controls, weights: Params | None = None
    ) -> tuple[TokenScores, jax.Array]:
        """Returns the token values of a step's forward and backward, and the squared norm of the gradients."""
        totals, values = self.gradients(state, batch, controls, weights)
        return values, square_norm(totals.grads)  # without a use the compiler would leave the backward out

    def measure_batch(
        self,
        params: Params,
        batch: PackedBatch,
        *,
        num_sequences: int,
        diagnosis: DiagnosisConfig,
        with_routes: bool = False,
        with_collision: bool = False,
        for_dumps: bool = False,
    ) -> tuple[dict[str, jax.Array], TokenScores]:
        """Computes a row of metrics and the token values of a batch, with forwards only."""
        score = self.score(collision=with_collision)

        def work(batch: PackedBatch, compute: Params) -> tuple[dict[str, Statistics], TokenScores]:
            each = self.alone(compute, score, num_sequences, diagnosis, for_dumps=for_dumps, with_routes=with_routes)
            return over_micro_batches(batch, each, zeros, merge, (0, batch.used))

        with jax.default_matmul_precision(matmul_precision(self.dtype)):
            compute = self.copy_weights(params)
            measured, values = on_each_replica(work, merge_over_replicas, batch, compute)
        return finalize_measured(measured, diagnosis), values

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of an array that every device has."""
        return replicated(self.mesh)

    @property
    def by_rows(self) -> NamedSharding:
        """The sharding of the arrays of a batch."""
        return named_sharding(self.mesh, BATCH_AXES, self.batch_shape)

    @functools.cached_property
    def programs(self) -> Programs:
        """The compiled functions, which steps with equal arguments share. They do not hold the weights of adapters."""
        return make_programs(dataclasses.replace(self, merged=None))

    @property
    def compilations(self) -> int:
        """The number of compilations of this step and of steps with equal arguments; 1 after the first call."""
        return int(self.programs.step._cache_size())

    def __call__(
        self,
        state: TrainState,
        batch: PackedBatch,
        learning_rate: float,
        apply_update: bool,
        measure_noise: bool = False,
    ) -> tuple[TrainState, dict[str, jax.Array], TokenScores]:
        """Trains on one batch of the shape ``batch_shape``. The state is donated.

        Without ``apply_update`` parameters and moments do not change, not even by weight decay. The same happens if
        gradients are not finite or every token was rejected. Each case is counted. Without ``measure_noise``
        ``optimizer/grad_noise`` is NaN.

        Returns:
          The new state, the metrics of the row on the device (scalars, and the histogram), and the values of the
          tokens before the update.
        """
        controls = place_controls(learning_rate, apply_update, measure_noise, self.everywhere)
        return self._run(self.programs.step, state, batch, controls)

    def loss_forward(self, state: TrainState, batch: PackedBatch) -> TokenScores:
        """Computes the values of the tokens by the forward and backward of the step, without an update.

        The batch may have another number of micro-batches than the steps. The state is not donated.
        """
        controls = place_controls(0.0, False, False, self.everywhere)
        return self._run(self.programs.loss_forward, state, batch, controls)[0]

    def _run(self, program: Any, state: TrainState, batch: PackedBatch, controls: Controls) -> Any:
        placed = place_batch(batch, self.by_rows, self.everywhere)
        weights = [] if self.merged is None else [self.merged(state.params)]
        with jax.set_mesh(self.mesh), jax.transfer_guard("disallow"):
            return program(state, placed, controls, *weights)

    def lower(self, *optional: OptionalLogprobs, reported: int = 0) -> jax.stages.Lowered:
        """Lowers the step for the devices of the mesh, which need not exist: shapes replace state and batch.

        Its ``.compile()`` returns the executable that ``__call__`` runs. ``optional`` names the optional
        log-probabilities that the batches have. ``reported`` is the number of likeliest tokens that they have.
        """
        batch = abstract_batch(self.batch_shape, self.by_rows, self.everywhere, optional, reported, self.flat_tokens)
        scalars = Controls(jnp.float32, jnp.bool_, jnp.bool_)
        controls = jax.tree.map(lambda dtype: jax.ShapeDtypeStruct((), dtype, sharding=self.everywhere), scalars)
        programs = self.programs
        with jax.set_mesh(self.mesh):
            return programs.step.lower(programs.abstract_state, batch, controls, *programs.abstract_weights)

    def forward(self, params: Params, batch: PackedBatch, **wanted: Any) -> tuple[dict[str, jax.Array], TokenScores]:
        """Measures the mismatch of a batch under the parameters of a whole policy, without a gradient.

        The batch may have another number of micro-batches than the steps. ``wanted`` are keywords of ``measure_batch``:
        the number of responses, the settings of the metrics, and ``FLAGS`` for further values of the tokens.
        Returns the metrics of the row, and the values of the tokens.
        """
        program, placed = self.programs.forward, place_batch(batch, self.by_rows, self.everywhere)
        with jax.set_mesh(self.mesh), jax.transfer_guard("disallow"):
            return program(params, placed, **(dict.fromkeys(FLAGS, False) | wanted))  # no flag is left to its default


class Programs(NamedTuple):
    """The jitted functions of a ``TrainStep``, and the shapes of their arguments."""

    step: Any  # a function (state, batch, controls, merged weights of adapters) -> (new state, row, ``TokenScores``)
    loss_forward: Any  # a function of the arguments of ``step`` -> (``TokenScores``, squared norm of the gradients)
    forward: Any  # a function (parameters, batch) -> (row, ``TokenScores``)
    abstract_state: TrainState  # the state, with a jax.ShapeDtypeStruct and a sharding at each leaf
    abstract_weights: list[Params]  # the merged weights of adapters, in the same form; empty without adapters


@functools.lru_cache(maxsize=8)
def make_programs(made: TrainStep) -> Programs:
    """Makes the programs of a step, which are traced and compiled once.

    Two steps with equal arguments share them, such as the steps of a run and of its continuation in the same process.
    The programs of the last eight kinds are kept.
    """
    config, mesh, lora = made.config, made.mesh, made.lora
    abstract = abstract_state(config, made.tx, mesh, dynamic_scale=made.dynamic, lora=lora)
    everywhere, by_rows = made.everywhere, made.by_rows
    merged = [(abstract_params(config), param_shardings(config, mesh))] if lora.rank else []
    weights = [
        jax.tree.map(lambda leaf, where: leaf.update(dtype=made.dtype, sharding=where), *trees) for trees in merged
    ]
    by_state = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    program = functools.partial(jax.jit, compiler_options=compiler_options(mesh))
    arguments: Any = (by_state, None, everywhere, *[None for _ in weights])
    step = program(
        made.train_step, in_shardings=arguments, out_shardings=(by_state, everywhere, by_rows), donate_argnums=(0,)
    )
    again = program(made.loss_values, in_shardings=arguments, out_shardings=(by_rows, everywhere))
    names = ("num_sequences", "diagnosis", *FLAGS)
    alone = program(made.measure_batch, static_argnames=names, out_shardings=(everywhere, by_rows))
    return Programs(step, again, alone, abstract, weights)
