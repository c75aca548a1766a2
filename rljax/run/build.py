"""The parts of a run that compute, made from its configuration."""

from __future__ import annotations

import functools

import optax
from jax.sharding import Mesh

from rljax.policy.config import PolicyConfig
from rljax.policy.hf import load_params
from rljax.policy.qwen3 import Params, param_shardings
from rljax.run.config import Config
from rljax.trainer.exact import ExactPass, ExactUpdate
from rljax.trainer.forward import ForwardPass
from rljax.trainer.objective import Objective
from rljax.trainer.packing import max_micro_batches, pack
from rljax.trainer.step import TrainStep
from rljax.trainer.update import MultipleUpdates, Pack, Reference, SingleUpdate, Update


def batch_shape(config: Config, num_sequences: int | None = None) -> tuple[int, int, int]:
    """(micro-batches, rows, tokens) that hold any batch of ``num_sequences``, by default a whole step's."""
    tokens = config.packing.resolve_row_tokens(config.max_sequence_tokens)
    rows = config.packing.rows_per_micro_batch
    count = num_sequences or config.num_sequences
    return max_micro_batches(count, config.max_sequence_tokens, tokens, rows), rows, tokens


def make_update(config: Config, policy: PolicyConfig, tx: optax.GradientTransformation, mesh: Mesh) -> Update:
    """One fused update a step, mini-batches and epochs as ``loss`` says, or one through the exact engine's executable.

    Raises:
      OSError, ValueError: a KL penalty is wanted and the reference policy cannot be read.
    """
    if config.rollout.engine == "exact":
        return make_exact_update(config, policy, tx, mesh)
    count = config.num_sequences // config.loss.mini_batches
    objective = Objective(config.loss, config.correction.resolved(), count, config.rollout.max_response_tokens)
    several = config.loss.mini_batches * config.loss.epochs > 1 or objective.needs_old_logprobs
    step = TrainStep(
        policy,
        tx,
        mesh,
        precision=config.precision,
        objective=objective,
        batch_shape=batch_shape(config, count),
        temperature=config.rollout.temperature,
        diagnosis=None if several else config.diagnosis,
    )
    forward = make_forward(config, policy, mesh)
    reference = None
    if config.loss.kl != "none":
        reference = Reference(forward, load_reference(config, policy, mesh))
    if not several:
        return SingleUpdate(step, make_pack(config, config.num_sequences), reference)
    return MultipleUpdates(
        step,
        forward,
        make_pack(config, config.num_sequences),
        make_pack(config, count),
        mini_batches=config.loss.mini_batches,
        epochs=config.loss.epochs,
        group_size=config.rollout.group_size,
        reference=reference,
    )


def load_reference(config: Config, policy: PolicyConfig, mesh: Mesh) -> Params:
    """The frozen policy of a KL penalty: the model that the run starts from."""
    return load_params(config.model.path, policy, param_shardings(policy, mesh))


@functools.lru_cache(maxsize=1)
def make_exact_pass(config: Config, policy: PolicyConfig, mesh: Mesh) -> ExactPass:
    """The executable of ``rollout.engine: exact``: one for a run, whoever asks, the engine or the update."""
    return ExactPass(
        policy,
        mesh,
        precision=config.precision,
        objective=Objective(
            config.loss, config.correction.resolved(), config.num_sequences, config.rollout.max_response_tokens
        ),
        rows=config.packing.rows_per_micro_batch,
        row_tokens=config.packing.resolve_row_tokens(config.max_engine_tokens),
    )


def make_exact_update(config: Config, policy: PolicyConfig, tx: optax.GradientTransformation, mesh: Mesh) -> Update:
    """The update that differentiates through the engine's executable."""
    return ExactUpdate(
        make_exact_pass(config, policy, mesh),
        policy,
        tx,
        precision=config.precision,
        temperature=config.rollout.temperature,
        diagnosis=config.diagnosis,
        reference=None if config.loss.kl == "none" else load_reference(config, policy, mesh),
    )


def make_forward(config: Config, policy: PolicyConfig, mesh: Mesh) -> ForwardPass:
    """The forward over a whole rollout batch."""
    return ForwardPass(
        policy,
        mesh,
        precision=config.precision,
        batch_shape=batch_shape(config),
        num_sequences=config.num_sequences,
        temperature=config.rollout.temperature,
        diagnosis=config.diagnosis,
    )


def make_pack(config: Config, num_sequences: int) -> Pack:
    """Packs batches of ``num_sequences`` responses into the run's rows."""
    micro, rows, tokens = batch_shape(config, num_sequences)
    return functools.partial(pack, row_tokens=tokens, rows_per_micro_batch=rows, micro_batches=micro)
