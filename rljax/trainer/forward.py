"""Log-probabilities of a packed batch without a gradient.

They are ``old_logprobs`` before the first of several updates, and those of a frozen reference policy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.mismatch import Statistics, merge, zeros
from rljax.policy.config import PolicyConfig
from rljax.policy.qwen3 import Params, cast_params
from rljax.policy.score import matmul_precision
from rljax.sharding import named_sharding, replicated
from rljax.trainer.measure import DiagnosisConfig, finalize_measured, measure
from rljax.trainer.packing import PackedBatch
from rljax.trainer.step import PrecisionConfig, make_score, over_micro_batches, place_batch


class ForwardPass:
    """A compiled, sharded forward over a packed batch: ``forward(params, batch)``."""

    def __init__(
        self,
        config: PolicyConfig,
        mesh: Mesh,
        *,
        precision: PrecisionConfig,
        batch_shape: tuple[int, int, int],
        num_sequences: int,
        temperature: float,
        diagnosis: DiagnosisConfig,
    ):
        """The arguments are those of ``TrainStep``."""
        dtype = jnp.dtype(precision.compute_dtype)
        score = make_score(config, precision, temperature)

        def forward(params: Params, batch: PackedBatch) -> tuple[dict[str, jax.Array], jax.Array]:
            compute = cast_params(params, dtype)

            def each(micro: PackedBatch) -> tuple[dict[str, Statistics], jax.Array]:
                scores = score(compute, micro)
                return measure(scores, micro, num_sequences, diagnosis), scores.logprobs

            with jax.default_matmul_precision(matmul_precision(dtype)):
                measured, logprobs = over_micro_batches(batch, each, zeros, merge)
            return finalize_measured(measured, diagnosis), logprobs

        self._mesh = mesh
        self._everywhere = replicated(mesh)
        self._by_rows = named_sharding(mesh, ("micro", "rows", "tokens"), batch_shape)
        self._jitted = jax.jit(forward, out_shardings=(self._everywhere, self._by_rows))

    def __call__(self, params: Params, batch: PackedBatch) -> tuple[dict[str, jax.Array], jax.Array]:
        """The mismatch of the batch under ``params`` (float32 masters), and their log-probabilities [m, b, t]."""
        placed = place_batch(batch, self._by_rows, self._everywhere)
        with jax.set_mesh(self._mesh), jax.transfer_guard("disallow"):
            return self._jitted(params, placed)
