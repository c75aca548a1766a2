"""Zero mismatch: one executable for sampling, scores and gradients, and the training step around it.

``ExactPass`` is one compiled forward and backward of a fixed shape [b, t], with one sequence in a row. The exact engine
samples tokens from its log-softmax rows, and ``ExactUpdate`` differentiates through it. So the trainer's
log-probability of a token has the same bits as the one that the token was sampled with. Any other graph of the same
function may differ: another shape, a forward without a backward, or a cache. Other executables accumulate the
gradients, measure the mismatch and make the update.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from rljax.mismatch import Statistics
from rljax.policy.config import DEFAULTS, PolicyConfig, PolicyOptions
from rljax.policy.head import TokenScores, head_operands, matmul_precision
from rljax.policy.kernels import Kernels, choose_kernels
from rljax.policy.lora import OFF, LoraConfig, MergedPolicy, TrainedParams
from rljax.policy.model import Params, abstract_params, cast_params, hidden_states, lm_head_table, param_shardings
from rljax.policy.score import align, over_support, segment_ends
from rljax.sharding import constrain, fetch, named_sharding, put, replicated
from rljax.trainer.measure import DiagnosisConfig, finalize_measured, measure
from rljax.trainer.objective import MicroSums, Objective, micro_gradients, values_of
from rljax.trainer.packing import PackedBatch, TrainSequence, fill, trajectories
from rljax.trainer.state import PrecisionConfig, TrainState, abstract_state
from rljax.trainer.totals import Controls, Totals, add_micro_batch, place_controls, update_state, zero_totals
from rljax.trainer.update import TrainerValues, Updated, UpdateOptions, fetch_metrics, unpack_values


class ExactOutput(NamedTuple):
    """The result of one call of an ``ExactPass``."""

    grads: Params  # the gradients of the scaled loss over the provisional denominator, in the compute dtype
    loss: Statistics  # the statistics of Objective.micro_loss
    scores: TokenScores  # the scores of the rows, with ``log_softmax``


def full_scores(
    compute: Params,
    config: PolicyConfig,
    micro: PackedBatch,
    temperature: Array,
    precision: PrecisionConfig,
    kernels: Kernels,
    *,
    cut: bool = False,
    tops: bool = False,
) -> TokenScores:
    """Scores a micro-batch [b, t], which has one sequence in a row, at a positive float32 temperature.

    The log-softmax of the whole vocabulary is computed before any token is picked from it. With ``cut`` the scores are
    then normalised over ``micro.top_ids``. ``tops`` asks for the log-probabilities of ``micro.top_ids``.
    """
    rows = (micro.tokens, segment_ends(micro.segment_ids), micro.positions)
    hidden, stats = hidden_states(compute, config, *rows, remat=precision.remat_policy, kernels=kernels)
    hidden, table = head_operands(hidden, lm_head_table(compute), precision.head_dtype)
    exactness = matmul_precision(table.dtype)
    logits = jnp.einsum("btd,vd->btv", hidden, table, precision=exactness, preferred_element_type=jnp.float32)
    logits = constrain(logits, "rows", "tokens", "vocab")
    # Without the barrier XLA fuses a second log-softmax into the gather, and rounds it differently.
    log_softmax = jax.lax.optimization_barrier(jax.nn.log_softmax(logits / temperature))
    picked = jnp.take_along_axis(log_softmax[:, :-1], micro.tokens[:, 1:, None], axis=-1)[..., 0]
    known = jax.lax.stop_gradient(log_softmax[:, :-1])
    scored = TokenScores(picked, -jnp.sum(jnp.exp(known) * known, axis=-1))
    if cut or tops:
        ids = micro.top_ids[:, 1:]
        of_ids = jnp.take_along_axis(log_softmax[:, :-1], jnp.maximum(ids, 0), axis=-1)
        scored = scored._replace(tops=jnp.where(ids >= 0, of_ids, -jnp.inf))
        scored = over_support(picked, of_ids, ids) if cut else scored
    scored = align(scored, micro.positions, micro.segment_ids)
    return scored._replace(stats=stats, log_softmax=jax.lax.stop_gradient(log_softmax))


@dataclass(eq=False)
class ExactPass:
    """The executable ``exact(params, micro, scale, provisional, temperature)`` of the engine and the update.

    It is compiled at the first call. A micro-batch of another shape is an error and is not compiled.
    """

    config: PolicyConfig
    mesh: Mesh
    _: KW_ONLY
    precision: PrecisionConfig
    objective: Objective
    rows: int  # the number b of rows of a micro-batch, and of sequences that are sampled at the same time
    row_tokens: int  # the number t of tokens of a row: the longest prompt with its response
    options: PolicyOptions = DEFAULTS  # the choice of kernels, which ``choose_kernels`` refuses if the devices lack one
    reported: int = 0  # the number of the sampler's likeliest tokens that every micro-batch has at each position
    cut: bool = False  # whether the rollouts are sampled from a cut distribution, over ``PackedBatch.top_ids``

    def __post_init__(self) -> None:
        config, mesh, precision, objective = self.config, self.mesh, self.precision, self.objective
        rows, row_tokens, reported = self.rows, self.row_tokens, self.reported
        dtype = jnp.dtype(precision.compute_dtype)
        kernels = choose_kernels(self.options, config, precision.compute_dtype, mesh)
        asked = {"cut": self.cut, "tops": objective.correction.needs_tops}

        def run(params: Params, micro: PackedBatch, scale: Array, provisional: Array, temperature: Array) -> Any:
            def score(compute: Params, micro: PackedBatch) -> TokenScores:
                return full_scores(compute, config, micro, temperature, precision, kernels, **asked)

            with jax.default_matmul_precision(matmul_precision(dtype)):
                compute = cast_params(params, dtype)
                grads, loss, scores = micro_gradients(compute, micro, objective, score, scale, provisional)
                return ExactOutput(grads, loss, scores._replace(tops=None))

        nothing = fill([], {}, (1, rows, row_tokens))
        if objective.loss.kl != "none":
            nothing = nothing._replace(reference_logprobs=nothing.rollout_logprobs)
        if reported:
            ids = np.full((*nothing.tokens.shape, reported), -1, np.int32)
            nothing = nothing._replace(top_ids=ids, top_logprobs=np.full(ids.shape, -np.inf, np.float32))
        self._empty = micro_of(nothing, 0)
        by_param: Any = param_shardings(config, mesh)
        everywhere: Any = replicated(mesh)
        by_rows: Any = named_sharding(mesh, ("rows", "tokens"), (rows, row_tokens))
        by_vocabulary: Any = named_sharding(mesh, ("rows", "tokens", "vocab"), (rows, row_tokens, config.vocab_size))
        by_scores = TokenScores(by_rows, by_rows, stats=everywhere, log_softmax=by_vocabulary)
        self._jitted = jax.jit(
            run,
            in_shardings=(by_param, by_rows, everywhere, everywhere, everywhere),
            out_shardings=ExactOutput(by_param, everywhere, by_scores),
        )
        self._by_rows, self._everywhere, self._one = by_rows, everywhere, put(np.float32(1.0), everywhere)
        # Only shapes: JAX refuses arrays of the host if other processes hold a part of the mesh.
        rows_of = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), self._empty)
        self._arguments = (abstract_params(config), rows_of, self._one, self._one, self._one)

    @functools.cached_property
    def _compiled(self) -> Any:
        with jax.set_mesh(self.mesh):
            return self._jitted.lower(*self._arguments).compile()

    def place(self, micro: PackedBatch) -> PackedBatch:
        """Puts a micro-batch [b, t] on the devices, with its rows split over the mesh."""
        return put(micro, self._by_rows)

    def scalar(self, value: Any) -> jax.Array:
        """Puts a float32 scalar on every device."""
        return put(value if isinstance(value, jax.Array) else np.float32(value), self._everywhere)

    def __call__(
        self, params: Params, micro: PackedBatch, scale: jax.Array, provisional: jax.Array, temperature: jax.Array
    ) -> ExactOutput:
        """Runs the executable on a micro-batch from ``place``, with three numbers from ``scalar``.

        ``params`` are the float32 masters, or the float32 weights of a ``MergedPolicy``. The executable casts them.
        ``scale`` is the factor of the loss, ``provisional`` its denominator.
        """
        with jax.set_mesh(self.mesh):
            return self._compiled(params, micro, scale, provisional, temperature)

    def log_softmax(
        self, params: Params, tokens: np.ndarray, lengths: np.ndarray, temperature: float
    ) -> Float[Array, "b t v"]:
        """Returns the log-softmax after each token, from which the engine samples. The rows carry no loss.

        ``params`` are as in ``__call__``. Each row of ``tokens``, int32 [b, t], begins at the left. ``lengths``, int32
        [b], are the numbers of its tokens, 0 for unused rows. The temperature is positive.
        """
        index = np.arange(self.row_tokens, dtype=np.int32)[None]
        known = index < lengths[:, None]
        micro = self._empty._replace(
            tokens=tokens, segment_ids=known.astype(np.int32), positions=np.where(known, index, 0).astype(np.int32)
        )
        scores = self(params, self.place(micro), self._one, self._one, self.scalar(temperature)).scores
        assert scores.log_softmax is not None
        return scores.log_softmax


def micro_of(batch: PackedBatch, index: int) -> PackedBatch:
    """Returns micro-batch ``index`` of a batch [m, b, t] of numpy arrays."""
    return jax.tree.map(lambda array: array[index], batch._replace(with_loss=None, used=None))


def lay_out(sequences: Sequence[TrainSequence], rows: int, row_tokens: int) -> PackedBatch:
    """Puts the only sequence of trajectory i in row i % b of micro-batch i // b, the row in which it was sampled.

    Raises:
      ValueError: A sequence does not fit a row, or only some of the sequences have one of the optional arrays.
    """
    longest = max(len(s.ids) for s in sequences)
    if longest > row_tokens:
        raise ValueError(f"a sequence of {longest} tokens does not fit a row of {row_tokens}")
    numbers = trajectories(sequences).tolist()
    shape = (1 + max(numbers) // rows, rows, row_tokens)
    return fill(sequences, {divmod(number, rows): [i] for i, number in enumerate(numbers)}, shape)


@dataclass(eq=False)
class ExactUpdate:
    """An ``Update`` that makes one update for each rollout batch through an ``ExactPass``."""

    exact: ExactPass  # the pass that the engine samples with
    config: PolicyConfig
    tx: optax.GradientTransformation
    _: KW_ONLY
    precision: PrecisionConfig
    temperature: float  # the temperature of the rollouts
    diagnosis: DiagnosisConfig
    # The masters of the frozen policy of a KL penalty, on the devices. The same pass scores them.
    reference: Params | None = None
    lora: LoraConfig = OFF  # the choice of adapters; if there are any, the state has the adapters
    merged: MergedPolicy | None = None  # the function that returns the weights of adapters, in float32
    for_dumps: bool = False  # whether the entropies of the tokens are kept for token dumps

    def __post_init__(self) -> None:
        config, tx, lora, diagnosis, exact = self.config, self.tx, self.lora, self.diagnosis, self.exact
        dynamic, objective = self.precision.compute_dtype == "float16", exact.objective
        trained = TrainedParams(config, lora)
        self._temperature = exact.scalar(self.temperature)
        self._everywhere = replicated(exact.mesh)
        by_state = jax.tree.map(
            lambda leaf: leaf.sharding, abstract_state(config, tx, exact.mesh, dynamic_scale=dynamic, lora=lora)
        )
        shardings: Any = (by_state.params, *[self._everywhere] * 4)
        totals = Totals(*shardings)

        def sums(output: ExactOutput, needed: Any, micro: PackedBatch) -> MicroSums:
            grads = trained.gradients(needed, trained.targets(output.grads))
            return grads, output.loss, measure(output.scores, micro, objective.num_sequences, diagnosis)

        def start(output: ExactOutput, needed: Any, micro: PackedBatch) -> Totals:
            return zero_totals(*sums(output, needed, micro))

        def add(totals: Totals, output: ExactOutput, needed: Any, micro: PackedBatch, noise: jax.Array) -> Totals:
            return add_micro_batch(totals, *sums(output, needed, micro), noise)

        def finish(
            state: TrainState, totals: Totals, batch: PackedBatch, controls: Controls
        ) -> tuple[TrainState, dict[str, jax.Array]]:
            state, row = update_state(state, totals, batch, tx, objective, controls, dynamic=dynamic)
            return state, row | finalize_measured(totals.measured, diagnosis)

        self._needed = trained.residuals
        self._start = jax.jit(start, out_shardings=totals)
        self._add = jax.jit(add, out_shardings=totals, donate_argnums=0)
        self._finish = jax.jit(finish, out_shardings=(by_state, self._everywhere), donate_argnums=0)

    def pack(self, sequences: Sequence[TrainSequence]) -> PackedBatch:
        """Lays out the sequences in the rows where the engine sampled them."""
        return lay_out(sequences, self.exact.rows, self.exact.row_tokens)

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Runs the pass on each micro-batch, adds up the gradients, and makes one update."""
        exact = self.exact
        if self.reference is not None:
            batch = self._with_reference(batch, self.reference)
        noise = options.noise and int(batch.loss_mask.any(axis=(1, 2)).sum()) > 1
        scale, provisional = exact.scalar(state.loss_scale.scale), exact.scalar(exact.objective.provisional(batch))
        has_loss = any(s.in_loss for s in sequences)
        controls = place_controls(options.learning_rate, has_loss, noise, self._everywhere)
        values: list[TokenScores] = []
        totals, needed = None, self._needed(state.params)
        weights = state.params if self.merged is None else self.merged(state.params)
        with jax.set_mesh(exact.mesh):
            for index in range(int(batch.used)):
                micro = exact.place(micro_of(batch, index))
                output = exact(weights, micro, scale, provisional, self._temperature)
                values.append(values_of(output.scores, self.for_dumps))
                if totals is None:
                    totals = self._start(output, needed, micro)
                totals = self._add(totals, output, needed, micro, controls.measure_noise)
            state, metrics = self._finish(state, totals, batch, controls)
        row, histograms = fetch_metrics(metrics, noise=noise)

        def trainer() -> TrainerValues:
            return unpack_values(jax.tree.map(lambda *parts: np.stack(parts), *fetch(values)), batch, sequences)

        return Updated(state, row, histograms, trainer)

    def _with_reference(self, batch: PackedBatch, reference: Params) -> PackedBatch:
        """Adds the log-probabilities of the frozen policy, which the same executable computes."""
        exact, zeros = self.exact, np.zeros(batch.tokens.shape, np.float32)
        batch, one = batch._replace(reference_logprobs=zeros), exact.scalar(1.0)
        logprobs = [
            exact(reference, exact.place(micro_of(batch, index)), one, one, self._temperature).scores.logprobs
            for index in range(int(batch.used))
        ]
        return batch._replace(reference_logprobs=np.stack(fetch(logprobs)))
