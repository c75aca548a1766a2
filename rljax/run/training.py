"""The trainer of a run: the weights that it reads, the state that it starts from, and its updates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.errors import caller_errors
from rljax.policy.config import PolicyConfig
from rljax.policy.hf import load_params
from rljax.policy.kernels import choose_kernels
from rljax.policy.lora import MergedPolicy, TrainedParams, init_adapters
from rljax.policy.model import Params, copy_params, param_shardings
from rljax.policy.peft import load_adapters
from rljax.rollout.kinds import can
from rljax.run.checkpoint import Checkpointer
from rljax.run.config import Config
from rljax.run.fingerprint import array_checksums, json_checksum
from rljax.run.packing import (
    batch_shape,
    flat_rows,
    make_pack,
    micro_batch_shape,
    other_rows,
    responses_per_update,
    shares_prefixes,
    with_separate_rows,
)
from rljax.sharding import HOST_MEMORY, has_host_memory, num_parts, on_host
from rljax.trainer.behaviour import SplitUpdate
from rljax.trainer.exact import ExactPass, ExactUpdate
from rljax.trainer.measure import Cause
from rljax.trainer.objective import Objective
from rljax.trainer.packing import OptionalLogprobs, PackedBatch
from rljax.trainer.self_check import (
    FLOORS,
    MOST,
    OTHER_REMAT,
    Check,
    CheckedTrees,
    SelfCheckedUpdate,
    at_other_shape,
    in_other_program,
    other_mesh,
)
from rljax.trainer.state import TrainState, abstract_state, create_state, make_optimizer
from rljax.trainer.step import TrainStep
from rljax.trainer.update import (
    Forward,
    MultipleUpdates,
    OffloadedUpdate,
    SingleUpdate,
    TurnsUpdate,
    Update,
    reference_logprobs,
    subtract_baselines,
)

SELF_RESPONSES = 64
"""The number of responses of a step on which ``mismatch_self/`` is measured, the trainer's mismatch with itself. For
another shape they are spread over the batch. For another mesh or remat they are those of its first micro-batches."""


def check_offload(config: Config, mesh: Mesh) -> None:
    """Raises ValueError if the state should be in the host's memory and the devices do not support that."""
    if config.rollout.colocated and not has_host_memory(mesh):
        kind = f"the memory kind {HOST_MEMORY}, which the devices ({mesh.local_devices[0].platform}) do not have"
        raise ValueError(f"rollout.colocated needs {kind}: give false")


def load_merged(config: Config, policy: PolicyConfig, mesh: Mesh) -> MergedPolicy | None:
    """Reads the base model of a run with adapters. With ``rollout.colocated`` it is put into the host's memory.

    Returns a function from adapters to the base with them merged in; None if the run has no adapters. Raises OSError or
    ValueError if the model cannot be read, or does not have the shape of ``policy``.
    """
    lora, dtype = config.lora, config.precision.compute_dtype
    if not lora.rank:
        return None
    base = load_params(config.model.path, policy, param_shardings(policy, mesh), dtype)
    base = on_host(base) if config.rollout.colocated else base
    return MergedPolicy(policy, lora, mesh, base, dtype, as_float32=can(config.rollout.engine, "is_exact"))


def initial_params(config: Config, policy: PolicyConfig, mesh: Mesh) -> Params:
    """Reads the weights of the model, or reads or initialises adapters: the parameters that a run trains, at step 0.

    Raises OSError or ValueError if they cannot be read, or do not have the shape of ``policy``.
    """
    lora = config.lora
    if not lora.rank:
        dtype = config.precision.compute_dtype
        return load_params(config.model.path, policy, param_shardings(policy, mesh), computes_in=dtype)
    shardings = TrainedParams(policy, lora).declared.shardings(mesh)
    if lora.adapter is not None:
        return load_adapters(lora.adapter, policy, lora, shardings)
    make: Any = jax.jit(functools.partial(init_adapters, policy, lora, config.run.seed), out_shardings=shardings)
    return make()


def load_reference(
    config: Config, policy: PolicyConfig, mesh: Mesh, merged: MergedPolicy | None = None
) -> Params | None:
    """Reads the frozen policy of a KL penalty, which is the policy that the run starts from.

    ``merged`` comes from ``load_merged``. If the run starts from new adapters, the base of ``merged`` is the reference
    and is not read again. Returns None without a KL penalty. Raises OSError or ValueError as ``initial_params``.
    """
    if config.loss.kl == "none":
        return None
    if merged is not None and not config.lora.adapter:
        return merged.frozen()
    params = initial_params(config, policy, mesh)
    params = on_host(params) if config.rollout.colocated else params
    return params if merged is None else merged(params)


def make_trainer(
    config: Config, policy: PolicyConfig, mesh: Mesh
) -> tuple[Update, Callable[[Params], Params], dict[str, str]]:
    """Builds the objects with which a run trains; every process calls it.

    Returns the ``Update`` that trains on a step, and a function from the state's parameters to the policy that engines
    sample from. The third part has the checksums of frozen weights: "reference" (KL penalty), "base" (adapters).

    Raises OSError or ValueError if frozen weights cannot be read, or do not have the shape of ``policy``.
    """
    merged = load_merged(config, policy, mesh)
    reference = load_reference(config, policy, mesh, merged)
    update = make_update(config, policy, mesh, reference, merged)
    frozen = {"reference": reference, "base": None if merged is None else merged.base}
    prints = {name: json_checksum(array_checksums(tree)) for name, tree in frozen.items() if tree is not None}
    if config.rollout.colocated:
        update = OffloadedUpdate(update)
    return update, (lambda params: params) if merged is None else merged, prints


def starting_state(
    config: Config,
    policy: PolicyConfig,
    mesh: Mesh,
    checkpointer: Checkpointer,
    load_host: Callable[[dict[str, Any]], object] = lambda host: None,
) -> tuple[TrainState, dict[str, Any]]:
    """Reads the newest whole checkpoint, or else the model; every process calls it.

    Returns the training state at which the run starts, and the JSON part of its checkpoint, {} without a checkpoint.
    ``load_host`` is called with that part before the arrays are read.

    Raises:
      ConfigError: The model or the checkpoint cannot be used.
      StartAgainError: One of several processes found the newest checkpoint damaged, and moved it away.
    """
    with caller_errors(RuntimeError):
        restored = checkpointer.restore_newest(wanted_state(config, policy, mesh), load_host)
    if restored:
        state, host = restored
    else:
        with caller_errors():
            params = initial_params(config, policy, mesh)
        state, host = create_state(params, policy, make_optimizer(config.optimizer), mesh, **_state_options(config)), {}
    return (on_host(state) if config.rollout.colocated else state), host


def wanted_state(config: Config, policy: PolicyConfig, mesh: Mesh) -> TrainState:
    """Returns the form of the training state: a ``jax.ShapeDtypeStruct`` with a sharding at each leaf."""
    return abstract_state(policy, make_optimizer(config.optimizer), mesh, **_state_options(config))


def _state_options(config: Config) -> dict[str, Any]:
    return {"dynamic_scale": config.precision.compute_dtype == "float16", "lora": config.lora}


def make_update(
    config: Config, policy: PolicyConfig, mesh: Mesh, reference: Params | None, merged: MergedPolicy | None = None
) -> Update:
    """Builds the ``Update`` of a run: one fused update a step, several, or one by the exact engine's executable.

    ``reference`` is the frozen policy of the KL penalty, from ``load_reference``. ``merged`` is the function from
    adapters to a whole policy, from ``load_merged``; None: the state holds the policy itself. If rows share prefixes,
    the first call compares them with separate rows.
    """
    update = _make_update(config, policy, mesh, reference, merged)
    if not shares_prefixes(config):
        return update
    apart, count = with_separate_rows(config), min(MOST, config.num_sequences)
    _, forward = make_forwards(config, make_step(config, policy, mesh, merged), merged)
    packs = (
        make_pack(config, policy, count),
        make_pack(apart, policy, count),
        make_pack(apart, policy, count, other_rows(apart)),
    )
    floor = FLOORS[config.precision.compute_dtype]
    return CheckedTrees(update, forward, packs, floor, lambda: _make_update(apart, policy, mesh, reference, merged))


def _make_update(
    config: Config, policy: PolicyConfig, mesh: Mesh, reference: Params | None, merged: MergedPolicy | None
) -> Update:
    if can(config.rollout.engine, "is_exact"):
        exact = ExactUpdate(
            make_exact_pass(config, policy, mesh),
            policy,
            make_optimizer(config.optimizer),
            precision=config.precision,
            temperature=config.rollout.temperature,
            diagnosis=config.diagnosis,
            reference=reference,
            lora=config.lora,
            merged=merged,
            for_dumps=config.rollout.dump_every > 0,
        )
        return _measured(config, exact, policy, mesh, merged)
    step = make_step(config, policy, mesh, merged)
    forward, forward_of_state = make_forwards(config, step, merged)
    score = None if reference is None else functools.partial(reference_logprobs, forward, reference)
    pack_all = make_pack(config, policy, config.num_sequences)
    update: Update
    if not has_separate_forward(config):
        update = SingleUpdate(step, forward_of_state, pack_all, score)
    else:
        baseline = functools.partial(
            subtract_baselines, group_size=config.rollout.group_size, correction=config.correction.resolved()
        )
        update = MultipleUpdates(
            step,
            forward_of_state,
            pack_all,
            make_pack(config, policy, responses_per_update(config)),
            mini_batches=config.loss.mini_batches,
            epochs=config.loss.epochs,
            group_size=config.rollout.group_size,
            reference=score,
            replays_own=config.rollout.router_replay == "r2",
            baseline=baseline if config.advantage.estimator == "optimal_token" else None,
            for_dumps=config.rollout.dump_every > 0,
        )
    return _measured(config, _with_split_mismatch(config, policy, update, forward_of_state), policy, mesh, merged)


def make_forwards(config: Config, step: TrainStep, merged: MergedPolicy | None = None) -> tuple[Forward, Forward]:
    """Returns two forwards (parameters, batch): of a whole policy, and of the parameters of a training state."""
    forward = functools.partial(step.forward, num_sequences=config.num_sequences, diagnosis=config.diagnosis)

    def forward_of_state(params: Params, batch: PackedBatch, **options: Any) -> Any:
        return forward(params if merged is None else merged(params), batch, **options)

    return forward, forward_of_state


def _with_split_mismatch(config: Config, policy: PolicyConfig, update: Update, forward: Forward) -> Update:
    """Wraps ``update`` to split the mismatch of stale rollouts into parts; returns it as it is if none can be stale."""
    for_correction = config.correction.part != "whole"
    count = min(config.diagnosis.behaviour_responses, config.num_sequences)
    if not config.max_version_lag or not (count or for_correction):
        return update
    # Adapters are merged in float32.
    dtype = jnp.float32 if config.lora.rank else config.precision.compute_dtype
    return SplitUpdate(
        update,
        forward,
        make_pack(config, policy, count or config.num_sequences),
        copy=jax.jit(functools.partial(copy_params, dtype=dtype)),
        versions=config.max_version_lag,
        sample=count,
        is_threshold=config.diagnosis.is_threshold,
        for_correction=for_correction,
    )


def _measured(config: Config, update: Update, policy: PolicyConfig, mesh: Mesh, merged: MergedPolicy | None) -> Update:
    """Wraps ``update`` to measure the trainer's mismatch with itself, and by turn, where that is wanted."""
    if config.diagnosis.self_every:
        update = SelfCheckedUpdate(update, _self_checks(config, policy, mesh, merged))
    has_turns = config.rollout.environment is not None or config.rollout.trajectories is not None
    return TurnsUpdate(update) if has_turns else update


def _self_checks(config: Config, policy: PolicyConfig, mesh: Mesh, merged: MergedPolicy | None) -> dict[Cause, Check]:
    """Returns the checks of the trainer against itself: at another shape, on another mesh and with another remat."""
    count, checks = min(SELF_RESPONSES, config.num_sequences), dict[Cause, Check]()
    _, forward = make_forwards(config, make_step(config, policy, mesh, merged), merged)
    checks["shape"] = at_other_shape(forward, make_pack(config, policy, count, other_rows(config)), sample=count)
    if (other := other_mesh(mesh)) is not None and _fits(config, policy, other):
        _, forward_there = make_forwards(config, make_step(config, policy, other, merged), merged)
        checks["mesh"] = in_other_program(lambda state, batch: forward_there(state.params, batch)[1], sample=count)
    remat = OTHER_REMAT[config.precision.remat_policy]
    changed = dataclasses.replace(config, precision=dataclasses.replace(config.precision, remat=remat))
    step = make_step(changed, policy, mesh, merged)
    checks["remat"] = in_other_program(step.loss_forward, sample=count, stand_ins=optional_logprobs(config))
    return checks


def _fits(config: Config, policy: PolicyConfig, mesh: Mesh) -> bool:
    """Returns whether the trainer's program can run on another mesh, with micro-batches of the same shape."""
    try:
        choose_kernels(config.policy, policy, config.precision.compute_dtype, mesh)
    except ValueError:
        return False
    return mesh.shape["context"] == 1 or batch_shape(config)[1] % num_parts(mesh.shape, "batch_rows") == 0


def optional_logprobs(config: Config) -> list[OptionalLogprobs]:
    """Returns the names of the optional log-probabilities that the batches of a run's steps have."""
    wanted: dict[OptionalLogprobs, bool] = {
        "old_logprobs": has_separate_forward(config),
        "reference_logprobs": config.loss.kl != "none",
        "behaviour_logprobs": config.correction.part != "whole",
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def make_step(config: Config, policy: PolicyConfig, mesh: Mesh, merged: MergedPolicy | None = None) -> TrainStep:
    """Builds the compiled step of one update. The update of ``rollout.engine: exact`` does not use it."""
    count = responses_per_update(config)
    return TrainStep(
        policy,
        make_optimizer(config.optimizer),
        mesh,
        precision=config.precision,
        objective=make_objective(config, count, policy),
        batch_shape=batch_shape(config, count),
        temperature=config.rollout.temperature,
        diagnosis=None if has_separate_forward(config) else config.diagnosis,
        keep_gathered=config.mesh.keep_gathered,
        options=config.policy,
        lora=config.lora,
        merged=merged,
        cut=config.rollout.is_cut,
        for_dumps=config.rollout.dump_every > 0,
        flat_tokens=flat_rows(config, batch_shape(config, count)[2]),
    )


def has_separate_forward(config: Config) -> bool:
    """Returns whether a separate forward before the updates computes the old log-probabilities of a batch."""
    several = config.loss.mini_batches * config.loss.epochs > 1
    several = several or config.advantage.estimator == "optimal_token"
    return several or make_objective(config, responses_per_update(config)).needs_old_logprobs


@functools.lru_cache(maxsize=1)
def make_exact_pass(config: Config, policy: PolicyConfig, mesh: Mesh) -> ExactPass:
    """Builds the executable of ``rollout.engine: exact``, which the engine and the update share."""
    rows, row_tokens = micro_batch_shape(config, config.max_engine_tokens)  # it also samples for evaluations
    return ExactPass(
        policy,
        mesh,
        precision=config.precision,
        objective=make_objective(config, config.num_sequences, policy),
        rows=rows,
        row_tokens=row_tokens,
        options=config.policy,
        reported=config.rollout.reported,
        cut=config.rollout.is_cut,
    )


def make_objective(config: Config, num_sequences: int, policy: PolicyConfig | None = None) -> Objective:
    """Builds the objective that an update of ``num_sequences`` responses minimises.

    ``policy`` tells whether the sampler's reported tokens are the whole vocabulary. None: they are not.
    """
    rollout, longest = config.rollout, config.rollout.max_response_tokens
    is_whole = rollout.is_cut or (policy is not None and rollout.reported >= policy.vocab_size)
    return Objective(config.loss, config.correction.resolved(), num_sequences, longest, has_tail=not is_whole)
