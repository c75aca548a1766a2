"""The training step around the exact engine's executable.

Gradients are accumulated, the mismatch measured and the update made by executables of their own, so that the one that
was drawn with is the one that is differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from rljax.policy.config import PolicyConfig
from rljax.policy.qwen3 import Params
from rljax.sharding import replicated
from rljax.trainer.exact_pass import ExactOutput, ExactPass, empty_rows, micro_of
from rljax.trainer.measure import (
    DiagnosisConfig,
    Measured,
    finalize_measured,
    measure,
    merge_measured,
    nothing_measured,
)
from rljax.trainer.packing import PackedBatch, TrainSequence, pack, unpack
from rljax.trainer.state import TrainState, abstract_state
from rljax.trainer.step import PrecisionConfig, Totals, add_micro_batch, no_totals, update_state
from rljax.trainer.update import Updated, fetch


def lay_out(sequences: Sequence[TrainSequence], rows: int, row_tokens: int) -> PackedBatch:
    """Sequence i in row i % b of micro-batch i // b, where the engine drew it: nothing packed, nothing sorted.

    Raises:
      ValueError: a sequence does not fit a row, or only some of them have reference log-probabilities.
    """
    count = -(-len(sequences) // rows)
    # Each goes through ``pack`` alone and then to its place.
    single = [pack([s], row_tokens=row_tokens, rows_per_micro_batch=1, micro_batches=1) for s in sequences]
    used = np.asarray(count, np.int32)

    def join(*parts: np.ndarray) -> np.ndarray:
        whole = np.zeros((count * rows, row_tokens), parts[0].dtype)
        whole[: len(parts)] = np.concatenate([part[0] for part in parts])
        return whole.reshape(count, rows, row_tokens)

    batch = jax.tree.map(join, *(part._replace(used=None) for part in single))
    index = np.arange(count * rows, dtype=np.int32).reshape(count, rows, 1)
    return batch._replace(sequence_ids=np.where(batch.segment_ids > 0, index, 0).astype(np.int32), used=used)


class ExactUpdate:
    """One update a rollout batch through an ``ExactPass``; see ``Update``."""

    def __init__(
        self,
        exact: ExactPass,
        config: PolicyConfig,
        tx: optax.GradientTransformation,
        *,
        precision: PrecisionConfig,
        temperature: float,
        diagnosis: DiagnosisConfig,
        reference: Params | None = None,
    ):
        """Builds the executables around the pass.

        Args:
          exact: the pass that the engine draws with.
          config: shape of the policy.
          tx: from ``make_optimizer``.
          precision: that of the pass.
          temperature: of the rollouts.
          diagnosis: how the mismatch is taken apart.
          reference: masters of the frozen policy of a KL penalty, kept on the devices; scored by the same pass.
        """
        dynamic, objective = precision.compute_dtype == "float16", exact.objective
        self._exact, self._reference = exact, reference
        self._temperature = exact.scalar(temperature)
        self._whole = replicated(exact.mesh)
        by_state = jax.tree.map(
            lambda leaf: leaf.sharding, abstract_state(config, tx, exact.mesh, dynamic_scale=dynamic)
        )
        shardings: Any = (by_state.params, *[self._whole] * 5)
        totals = Totals(*shardings)

        def finish(
            state: TrainState,
            totals: Totals,
            measured: Measured,
            batch: PackedBatch,
            learning_rate: jax.Array,
            apply_update: jax.Array,
            measure_noise: jax.Array,
        ) -> tuple[TrainState, dict[str, jax.Array]]:
            state, row = update_state(
                state, totals, batch, tx, objective, learning_rate, apply_update, measure_noise, dynamic=dynamic
            )
            return state, row | finalize_measured(measured, diagnosis)

        def start() -> tuple[Totals, Measured]:
            empty = empty_rows(exact.rows, exact.row_tokens, reference=reference is not None)
            nothing = nothing_measured(empty, objective.num_sequences, diagnosis)
            return no_totals(exact.forms.grads, exact.forms.loss), nothing

        def add(
            carry: tuple[Totals, Measured], output: ExactOutput, micro: PackedBatch, measure_noise: jax.Array
        ) -> tuple[Totals, Measured]:
            scores = output.scores
            found = measure(scores.logprobs, scores.entropy, micro, objective.num_sequences, diagnosis)
            totals = add_micro_batch(carry[0], output.grads, output.loss, output.scores, micro, measure_noise)
            return totals, merge_measured(carry[1], found)

        self._start = jax.jit(start, out_shardings=(totals, self._whole))
        self._add = jax.jit(add, out_shardings=(totals, self._whole), donate_argnums=0)
        self._finish = jax.jit(finish, out_shardings=(by_state, self._whole), donate_argnums=0)

    def pack(self, sequences: Sequence[TrainSequence]) -> PackedBatch:
        """See ``Update``; sequences stay where the engine sampled them."""
        return lay_out(sequences, self._exact.rows, self._exact.row_tokens)

    def __call__(
        self,
        state: TrainState,
        batch: PackedBatch,
        sequences: Sequence[TrainSequence],
        learning_rate: float,
        *,
        seed: int,
        noise: bool,
    ) -> Updated:
        """See ``Update``."""
        del seed
        exact = self._exact
        if self._reference is not None:
            batch = self._with_reference(batch, self._reference)
        noise = noise and int(batch.used) > 1
        scale, provisional = exact.scalar(state.loss_scale.scale), exact.scalar(exact.objective.provisional(batch))
        values = (np.float32(learning_rate), np.bool_(any(s.in_loss for s in sequences)), np.bool_(noise))
        rate, apply_update, measure_noise = jax.device_put(values, self._whole)
        logprobs = []
        with jax.set_mesh(exact.mesh):
            carry = self._start()
            for index in range(int(batch.used)):
                micro = exact.place(micro_of(batch, index))
                output = exact(state.params, micro, scale, provisional, self._temperature)
                logprobs.append(output.scores.logprobs)
                carry = self._add(carry, output, micro, measure_noise)
            state, metrics = self._finish(state, *carry, batch, rate, apply_update, measure_noise)
        row, histograms = fetch(metrics, noise=noise)
        return Updated(state, row, histograms, lambda: unpack(np.stack(jax.device_get(logprobs)), batch, sequences))

    def _with_reference(self, batch: PackedBatch, reference: Params) -> PackedBatch:
        """The batch with the frozen policy's log-probabilities, from the same executable."""
        exact, zeros = self._exact, np.zeros(batch.tokens.shape, np.float32)
        batch, one = batch._replace(reference_logprobs=zeros), exact.scalar(1.0)
        found = [
            exact(reference, exact.place(micro_of(batch, index)), one, one, self._temperature).scores.logprobs
            for index in range(int(batch.used))
        ]
        return batch._replace(reference_logprobs=np.stack(jax.device_get(found)))
