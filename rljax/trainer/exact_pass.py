"""The one executable that samples, scores and differentiates.

A compiled forward-and-backward at one fixed [b, t], one sequence a row. The exact engine draws tokens from its
log-softmax rows and ``ExactUpdate`` differentiates through it, so the trainer's log-probability of a token has the bits
that the token was drawn with. Any other graph of the same function may differ: another shape, a forward without a
backward, a cache.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from rljax.policy.config import PolicyConfig
from rljax.policy.qwen3 import Params, abstract_params, cast_params, hidden_states, lm_head_table, param_shardings
from rljax.policy.score import matmul_precision
from rljax.sharding import constrain, named_sharding, replicated
from rljax.trainer.objective import LossTotals, Objective
from rljax.trainer.packing import PackedBatch, pack
from rljax.trainer.step import PrecisionConfig, micro_gradients


class FullScores(NamedTuple):
    """What the executable says of its rows, float32."""

    log_softmax: Float[Array, "b t v"]  # of the token that follows each place
    logprobs: Float[Array, "b t"]  # of each token; 0 at position 0 and on padding
    entropy: Float[Array, "b t"]  # nats; likewise
    activation_max: Float[Array, ""]


class ExactOutput(NamedTuple):
    """What one run of the executable gives."""

    grads: Params  # compute dtype, of the scaled loss over the provisional denominator
    loss: LossTotals
    scores: FullScores


def full_scores(
    compute: Params, config: PolicyConfig, micro: PackedBatch, temperature: Array, precision: PrecisionConfig
) -> FullScores:
    """Scores of a micro-batch [b, t] whose log-softmax is there in full before any token's is picked.

    Args:
      compute: parameters in the compute dtype.
      config: their shape.
      micro: one sequence a row.
      temperature: float32 scalar, positive; of the distribution scored.
      precision: dtype of the LM head's products, and whether to recompute blocks.
    """
    hidden, activation_max = hidden_states(
        compute, config, micro.tokens, micro.segment_ids, micro.positions, remat=precision.remat
    )
    dtype = precision.head_dtype or hidden.dtype
    hidden, table = hidden.astype(dtype), lm_head_table(compute).astype(dtype)
    logits = jnp.einsum("btd,vd->btv", hidden, table, preferred_element_type=jnp.float32)
    logits = constrain(logits, "rows", "tokens", "vocab")
    # The barrier keeps the gather from a log-softmax of its own, fused and rounded otherwise than the one drawn from.
    log_softmax = jax.lax.optimization_barrier(jax.nn.log_softmax(logits / temperature))
    picked = jnp.take_along_axis(log_softmax[:, :-1], micro.tokens[:, 1:, None], axis=-1)[..., 0]
    known = jax.lax.stop_gradient(log_softmax[:, :-1])
    entropy = -jnp.sum(jnp.exp(known) * known, axis=-1)
    inside = (micro.positions > 0) & (micro.segment_ids > 0)
    logprobs, entropy = (jnp.where(inside, jnp.pad(x, ((0, 0), (1, 0))), 0.0) for x in (picked, entropy))
    return FullScores(jax.lax.stop_gradient(log_softmax), logprobs, entropy, activation_max)


class ExactPass:
    """The one executable: ``exact(params, micro, scale, provisional, temperature)``."""

    def __init__(
        self,
        config: PolicyConfig,
        mesh: Mesh,
        *,
        precision: PrecisionConfig,
        objective: Objective,
        rows: int,
        row_tokens: int,
    ):
        """Compiled at the first call; any other shape is an error, never a second compilation.

        Args:
          config: shape of the policy.
          mesh: the trainer's.
          precision: dtypes.
          objective: the loss of a step.
          rows: b, rows of a micro-batch, and sequences drawn at a time.
          row_tokens: t, the longest prompt with its response.
        """
        dtype = jnp.dtype(precision.compute_dtype)

        def run(
            params: Params, micro: PackedBatch, scale: Array, provisional: Array, temperature: Array
        ) -> ExactOutput:
            def score(compute: Params, micro: PackedBatch) -> FullScores:
                return full_scores(compute, config, micro, temperature, precision)

            with jax.default_matmul_precision(matmul_precision(dtype)):
                compute = cast_params(params, dtype)
                found: Any = micro_gradients(compute, micro, objective, score, scale, provisional)
                return ExactOutput(*found)

        self.rows, self.row_tokens, self.objective, self.mesh = rows, row_tokens, objective, mesh
        self._run = run
        self._empty = micro_of(empty_rows(rows, row_tokens, reference=objective.loss.kl != "none"), 0)
        self._abstract_params = abstract_params(config)
        self._by_param = param_shardings(config, mesh)
        self._by_rows = named_sharding(mesh, ("rows", "tokens"), (rows, row_tokens))
        self._whole = replicated(mesh)
        self._one = jax.device_put(np.float32(1.0), self._whole)

    @functools.cached_property
    def forms(self) -> ExactOutput:
        """``jax.ShapeDtypeStruct`` of what a call returns."""
        with jax.set_mesh(self.mesh):
            return jax.eval_shape(self._run, *self._abstract())

    @functools.cached_property
    def _compiled(self) -> Any:
        by_micro = jax.tree.map(lambda _: self._by_rows, self._empty)
        by_vocabulary = named_sharding(self.mesh, ("rows", "tokens", "vocab"), self.forms.scores.log_softmax.shape)
        out = jax.tree.map(lambda _: self._whole, self.forms)
        scores: Any = (by_vocabulary, self._by_rows, self._by_rows, self._whole)
        jitted = jax.jit(
            self._run,
            in_shardings=(self._by_param, by_micro, *[self._whole] * 3),
            out_shardings=out._replace(grads=self._by_param, scores=FullScores(*scores)),
        )
        with jax.set_mesh(self.mesh):
            return jitted.lower(*self._abstract()).compile()

    def _abstract(self) -> tuple[Any, ...]:
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        micro = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), self._empty)
        return self._abstract_params, micro, scalar, scalar, scalar

    def place(self, micro: PackedBatch) -> PackedBatch:
        """A micro-batch [b, t] on the devices, rows over the mesh."""
        return jax.device_put(micro, self._by_rows)

    def scalar(self, value: Any) -> jax.Array:
        """A float32 scalar on every device."""
        return jax.device_put(value if isinstance(value, jax.Array) else np.float32(value), self._whole)

    def __call__(
        self, params: Params, micro: PackedBatch, scale: jax.Array, provisional: jax.Array, temperature: jax.Array
    ) -> ExactOutput:
        """Runs it.

        Args:
          params: float32 masters; cast inside.
          micro: from ``place``.
          scale: from ``scalar``, as the next two: the loss is multiplied by it.
          provisional: denominator of the loss.
          temperature: of the distribution.
        """
        with jax.set_mesh(self.mesh):
            return self._compiled(params, micro, scale, provisional, temperature)

    def log_softmax(
        self, params: Params, tokens: np.ndarray, lengths: np.ndarray, temperature: float
    ) -> Float[Array, "b t v"]:
        """What the engine draws from: the log-softmax after each place of rows that carry no loss.

        Args:
          params: float32 masters.
          tokens: int32 [b, t], each row from its left.
          lengths: int32 [b], tokens of each row so far; 0 for a row not in use.
          temperature: of the distribution, positive.
        """
        index = np.arange(self.row_tokens, dtype=np.int32)[None]
        known = index < lengths[:, None]
        micro = self._empty._replace(
            tokens=tokens, segment_ids=known.astype(np.int32), positions=np.where(known, index, 0).astype(np.int32)
        )
        return self(params, self.place(micro), self._one, self._one, self.scalar(temperature)).scores.log_softmax


def empty_rows(rows: int, row_tokens: int, *, reference: bool) -> PackedBatch:
    """One micro-batch [1, b, t] of padding."""
    nothing = pack([], row_tokens=row_tokens, rows_per_micro_batch=rows, micro_batches=1)
    return nothing._replace(reference_logprobs=np.zeros((1, rows, row_tokens), np.float32) if reference else None)


def micro_of(batch: PackedBatch, index: int) -> PackedBatch:
    """Micro-batch ``index`` of a batch [m, b, t] of numpy arrays."""
    return jax.tree.map(lambda array: array[index], batch._replace(used=None))
