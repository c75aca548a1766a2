"""Puts a run together from its configuration: problems, engine, update, and the components of the loop."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from rljax.data.prompts import Problem, PromptStream, check_lengths, evaluation_datasets, training_problems
from rljax.data.tokenizer import Tokenizer
from rljax.distributed.processes import ALONE, Processes
from rljax.errors import caller_errors
from rljax.policy.config import PolicyConfig
from rljax.policy.lora import MergedPolicy
from rljax.policy.model import Params
from rljax.record.rows import Row
from rljax.rewards.pool import RewardPool
from rljax.rollout.build import PolicyFunctions, make_engine, policy_functions
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.servers.parts import PartFiles, make_parts
from rljax.rollout.types import SERVED, SamplingParams
from rljax.run.checkpoint import Checkpointer
from rljax.run.config import Config
from rljax.run.evaluation import evaluate_datasets
from rljax.run.fingerprint import array_checksums, json_checksum
from rljax.run.follow import OfParams, engine_acts, function_acts, part_acts
from rljax.run.guard import Guard, SkippedUpdates
from rljax.run.lead import LedCheckpointer, LedEngine, LedUpdate, led_functions, led_parts
from rljax.run.loop import Components
from rljax.run.pipeline import Ahead, Batches, InTurn
from rljax.run.progress import Progress
from rljax.run.rate import make_rate_controller
from rljax.run.sampling import sample_batch
from rljax.run.stop import StopRequest
from rljax.run.weights import initial_params, is_offloaded, load_merged, load_reference
from rljax.sharding import on_host
from rljax.trainer.behaviour import SplitUpdate, copy_of
from rljax.trainer.exact import ExactPass, ExactUpdate
from rljax.trainer.objective import Objective
from rljax.trainer.offload import OffloadedUpdate
from rljax.trainer.packing import PackedBatch, max_micro_batches, pack
from rljax.trainer.state import TrainState, abstract_state, create_state, make_optimizer
from rljax.trainer.step import TrainStep
from rljax.trainer.update import Forward, MultipleUpdates, Pack, SingleUpdate, Update, reference_logprobs
from rljax.weights.writer import PartWriter


@dataclass(frozen=True)
class Problems:
    """What is trained on, in its order, and what is evaluated on by name.

    Attributes:
      stream: of the training problems.
      fingerprint: of their prompts and answers, in the order of the data.
      evaluation: problems by name.
    """

    stream: PromptStream
    fingerprint: str
    evaluation: dict[str, Sequence[Problem]]


def load_problems(config: Config, tokenizer: Tokenizer) -> Problems:
    """Reads the problems; warns when nothing is evaluated on.

    Raises:
      ValueError: they cannot be read, a prompt is too long, or they are fewer than a batch takes.
    """
    data, limit = config.data, config.data.max_prompt_tokens
    command = f"python tools/prepare_data.py {data.path} OUT.parquet --model {config.model.path} --max-prompt-tokens"
    remedy = f" in {data.path}; raise it, or: {command} {limit}" if data.path else ""
    training = training_problems(data, tokenizer)
    check_lengths(training, tokenizer, limit, remedy)
    stream = PromptStream(training, data.batch_size, config.run.seed)
    fingerprint = json_checksum([[problem["prompt"], problem["answer"]] for problem in training])
    if not config.eval.is_wanted:
        return Problems(stream, fingerprint, {})
    datasets = evaluation_datasets(config.eval.datasets, data, tokenizer)
    for name, problems in datasets.items():
        check_lengths(problems, tokenizer, limit, f" in eval.datasets {name}")
    if not datasets:
        print("warning: nothing is evaluated: eval.datasets is empty", file=sys.stderr)
    return Problems(stream, fingerprint, datasets)


def make_run_engine(
    config: Config, policy: PolicyConfig, mesh: Mesh, stop: StopRequest, processes: Processes = ALONE
) -> RolloutEngine:
    """The engine that ``rollout.engine`` names, of process 0; the exact one gets the trainer's executable.

    Raises as ``make_engine``.
    """
    several, is_served = processes.count > 1, config.rollout.engine in SERVED
    if several and not is_served and config.rollout.max_staleness:
        raise ValueError("rollout.max_staleness: the embedded engine of several processes samples in turn; give 0")
    functions = None
    if several and is_served:
        functions = policy_functions(policy, config.rollout.dtype)
        parts = make_own_parts(config, functions, processes)
        functions = led_functions(functions, processes) if parts is None else led_parts(functions, parts, processes)
    engine = make_engine(
        config.rollout,
        policy,
        mesh,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_tokens=config.max_engine_tokens,
        lm_head_dtype=config.precision.lm_head_dtype,
        make_executable=functools.partial(make_exact_pass, config, policy, mesh),
        functions=functions,
        publish=config.publish,
        should_stop=stop.requested,
        gives_up=stop.gives_up,
    )
    return LedEngine(engine, processes) if several and not is_served else engine


def make_checkpointer(config: Config, processes: Processes) -> Checkpointer:
    """Of the run's directory; all processes make one. Raises as ``Checkpointer``."""
    directory, keep = Path(config.run.dir) / "checkpoints", config.checkpoint.keep
    if processes.count > 1 and processes.is_leader:
        return LedCheckpointer(directory, keep=keep, processes=processes)
    return Checkpointer(directory, keep=keep)


def make_own_parts(config: Config, functions: PolicyFunctions, processes: Processes) -> PartFiles | None:
    """Where this process of several writes its part of each version; None where process 0 writes them whole.

    Raises:
      ConfigError: as ``make_parts``.
    """
    if config.publish.store == "shared":
        return None
    writer = PartWriter(functions.parts, str(processes.index))
    return make_parts(writer, config.publish, config.rollout, processes.index, processes.coordinator)


def make_acts(
    config: Config, policy: PolicyConfig, mesh: Mesh, processes: Processes, at_end: contextlib.ExitStack
) -> dict[str, OfParams]:
    """What a process other than 0 does for the engine of process 0; ``at_end`` ends what serves its weights.

    Raises:
      ConfigError: as ``make_own_parts``.
    """
    if config.rollout.engine not in SERVED:
        return engine_acts(make_run_engine(config, policy, mesh, StopRequest()))
    functions = policy_functions(policy, config.rollout.dtype)
    acts = function_acts(functions, processes)
    parts = make_own_parts(config, functions, processes)
    if parts is None:
        return acts
    at_end.callback(parts.close)
    return acts | part_acts(parts, processes)


def build(
    config: Config,
    policy: PolicyConfig,
    tokenizer: Tokenizer,
    mesh: Mesh,
    engine: RolloutEngine,
    checkpointer: Checkpointer,
    problems: Problems,
    gives_up: Callable[[], bool] = lambda: False,
    processes: Processes = ALONE,
) -> Components:
    """The components of a run at its first step; ``gives_up`` ends what is sampled (``StopRequest.gives_up``).

    Of several processes, 0 calls it, while the others make what they have of it (``make_trainer``).

    Raises:
      ConfigError: the reward cannot be used.
      OSError, ValueError: as ``load_reference``.
    """
    stops = policy.stop_token_ids or (tokenizer.eos_token_id,)
    with caller_errors():
        rewards = RewardPool(config.data.reward_name, config.data.reward_workers, config.data.reward_timeout_s)
    wanted, evaluate = config.eval, None
    if problems.evaluation:
        limit = wanted.max_response_tokens or config.rollout.max_response_tokens
        sampling = SamplingParams(limit, wanted.temperature, stops)
        run = (engine, tokenizer, problems.evaluation, rewards, sampling)
        evaluate = functools.partial(
            evaluate_datasets, *run, n=wanted.n, pass_k=wanted.pass_k, seed=wanted.seed, gives_up=gives_up
        )
    trainer = make_trainer(config, policy, mesh)
    update = trainer.update
    return Components(
        config=config,
        policy=policy,
        engine=engine,
        stream=problems.stream,
        batches=make_batches(config, engine, tokenizer, rewards, stops, problems.stream, gives_up),
        tokenizer=tokenizer,
        rewards=rewards,
        evaluate=evaluate,
        update=LedUpdate(update, processes) if processes.count > 1 else update,
        controller=make_rate_controller(config.schedule, config.optimizer.learning_rate, config.run.steps),
        guard=Guard(config.guard),
        skipped=SkippedUpdates(config.guard.max_skipped_updates, config.loss.mini_batches * config.loss.epochs),
        checkpointer=checkpointer,
        fingerprints={"problems": problems.fingerprint} | trainer.fingerprints,
        weights=trainer.weights,
        enter_phase=processes.at,
    )


def make_batches(
    config: Config,
    engine: RolloutEngine,
    tokenizer: Tokenizer,
    rewards: RewardPool,
    stop_token_ids: tuple[int, ...],
    stream: PromptStream,
    gives_up: Callable[[], bool],
) -> Batches:
    """Where the run's batches come from; ``rollout.max_staleness`` says whether they are sampled ahead."""
    rollout = config.rollout
    sample = functools.partial(
        sample_batch,
        engine,
        tokenizer,
        rewards,
        SamplingParams(rollout.max_response_tokens, rollout.temperature, stop_token_ids),
        group_size=rollout.group_size,
        run_seed=config.run.seed,
        gives_up=gives_up,
    )
    if not rollout.max_staleness:
        return InTurn(stream, sample, rewards.pop_metrics)

    def pop_metrics() -> Row:
        return rewards.pop_metrics() | engine.pop_metrics()

    return Ahead(stream, sample, pop_metrics, steps=config.run.steps, max_staleness=rollout.max_staleness)


class Trainer(NamedTuple):
    """What trains in a run.

    Attributes:
      update: makes the updates of a step.
      weights: the policy that the state's parameters make, which engines sample from.
      fingerprints: of the frozen weights: the reference policy of a KL penalty, the base of adapters.
    """

    update: Update
    weights: Callable[[Params], Params]
    fingerprints: dict[str, str]


def make_trainer(config: Config, policy: PolicyConfig, mesh: Mesh) -> Trainer:
    """What trains in a run; all processes call it.

    Raises:
      OSError, ValueError: as ``load_merged`` and ``load_reference``.
    """
    merged = load_merged(config, policy, mesh)
    reference = load_reference(config, policy, mesh, merged)
    update = make_update(config, policy, make_optimizer(config.optimizer), mesh, reference, merged)
    frozen = {"reference": reference, "base": None if merged is None else merged.base}
    prints = {name: json_checksum(array_checksums(tree)) for name, tree in frozen.items() if tree is not None}
    if is_offloaded(config):
        update = OffloadedUpdate(update)
    return Trainer(update, (lambda params: params) if merged is None else merged, prints)


def starting_point(run: Components, mesh: Mesh) -> tuple[TrainState, Progress]:
    """The newest whole checkpoint's state, the components put where it was taken; or the model's at step 0.

    Once that has been read, a line on stderr says what is trained where.

    Raises:
      ConfigError: the model or the checkpoint cannot be used.
      StartAgainError: as ``starting_state``.
    """
    config = run.config
    state, host = starting_state(config, run.policy, mesh, run.checkpointer, run.load_state_dict)
    print(f"training {config.model.path} for {config.run.steps} steps into {config.run.dir}", file=sys.stderr)
    return state, Progress.from_state_dict(host) if host else Progress()


def starting_state(
    config: Config,
    policy: PolicyConfig,
    mesh: Mesh,
    checkpointer: Checkpointer,
    load_host: Callable[[dict[str, Any]], object] = lambda host: None,
) -> tuple[TrainState, dict[str, Any]]:
    """The state that a run starts from, and the host state of its checkpoint, {} without one; all processes call it.

    Raises:
      ConfigError: the model or the checkpoint cannot be used.
      StartAgainError: as ``Checkpointer.restore_newest``.
    """
    tx, dynamic = make_optimizer(config.optimizer), config.precision.compute_dtype == "float16"
    with caller_errors(RuntimeError):
        wanted = abstract_state(policy, tx, mesh, dynamic_scale=dynamic, lora=config.lora)
        found = checkpointer.restore_newest(wanted, load_host)
    if found:
        state, host = found
    else:
        with caller_errors():
            params = initial_params(config, policy, mesh)
        state, host = create_state(params, policy, tx, mesh, dynamic_scale=dynamic, lora=config.lora), {}
    return (on_host(state) if is_offloaded(config) else state), host


def batch_shape(config: Config, num_sequences: int | None = None) -> tuple[int, int, int]:
    """(micro-batches, rows, tokens) that hold any batch of ``num_sequences``, by default those of a step."""
    tokens = config.packing.resolve_row_tokens(config.max_sequence_tokens)
    rows = micro_batch_rows(config, tokens)
    count = num_sequences or config.num_sequences
    return max_micro_batches(count, config.max_sequence_tokens, tokens, rows), rows, tokens


def micro_batch_rows(config: Config, row_tokens: int) -> int:
    """Rows of a micro-batch, of ``row_tokens`` each, on the run's mesh."""
    *by_rows, _ = config.mesh.shape(jax.device_count())
    return config.packing.resolve_rows(row_tokens, math.prod(by_rows))


def make_update(
    config: Config,
    policy: PolicyConfig,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    frozen: Params | None,
    merged: MergedPolicy | None = None,
) -> Update:
    """One fused update a step, mini-batches and epochs as ``loss`` says, or one through the exact engine's executable.

    ``frozen``: from ``load_reference``. ``merged``: from ``load_merged``.
    """
    loss = config.loss
    if config.rollout.engine == "exact":
        return ExactUpdate(
            make_exact_pass(config, policy, mesh),
            policy,
            tx,
            precision=config.precision,
            temperature=config.rollout.temperature,
            diagnosis=config.diagnosis,
            reference=frozen,
            lora=config.lora,
            merged=merged,
        )
    step = make_step(config, policy, tx, mesh, merged)
    forward = functools.partial(step.forward, num_sequences=config.num_sequences, diagnosis=config.diagnosis)
    reference = None if frozen is None else functools.partial(reference_logprobs, forward, frozen)

    def of_state(params: Params, batch: PackedBatch, **options: Any) -> Any:
        return forward(params if merged is None else merged(params), batch, **options)

    pack_all = make_pack(config, config.num_sequences)
    update: Update
    if not makes_several_updates(config):
        update = SingleUpdate(step, of_state, pack_all, reference)
        return told_apart(config, update, of_state)
    update = MultipleUpdates(
        step,
        of_state,
        pack_all,
        make_pack(config, of_update(config)),
        mini_batches=loss.mini_batches,
        epochs=loss.epochs,
        group_size=config.rollout.group_size,
        reference=reference,
        replays_own=config.rollout.router_replay == "r2",
    )
    return told_apart(config, update, of_state)


def told_apart(config: Config, update: Update, forward: Forward) -> Update:
    """``update``, with the mismatch of stale rollouts told apart where there may be any."""
    for_correction = config.correction.part != "whole"
    count = min(config.diagnosis.behaviour_responses, config.num_sequences)
    if not kept_versions(config) or not (count or for_correction):
        return update
    # Adapters are merged in float32.
    dtype = jnp.float32 if config.lora.rank else config.precision.compute_dtype
    return SplitUpdate(
        update,
        forward,
        make_pack(config, count or config.num_sequences),
        copy=copy_of(dtype),
        versions=kept_versions(config),
        sample=count,
        is_threshold=config.diagnosis.is_threshold,
        for_correction=for_correction,
    )


def kept_versions(config: Config) -> int:
    """Most versions from the policy that samples a batch to the one that is trained on it."""
    return config.rollout.max_staleness + config.rollout.inject.staleness


def make_step(
    config: Config,
    policy: PolicyConfig,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    merged: MergedPolicy | None = None,
) -> TrainStep:
    """The step of an update that does not go through the exact engine's executable; ``merged`` as ``TrainStep``."""
    count = of_update(config)
    return TrainStep(
        policy,
        tx,
        mesh,
        precision=config.precision,
        objective=make_objective(config, count),
        batch_shape=batch_shape(config, count),
        temperature=config.rollout.temperature,
        diagnosis=None if makes_several_updates(config) else config.diagnosis,
        keep_gathered=config.mesh.keep_gathered,
        options=config.policy,
        lora=config.lora,
        merged=merged,
    )


def of_update(config: Config) -> int:
    """Responses of one update."""
    return config.num_sequences // config.loss.mini_batches


def makes_several_updates(config: Config) -> bool:
    """Whether a rollout batch's old log-probabilities come from a forward of their own, before its updates."""
    several = config.loss.mini_batches * config.loss.epochs > 1
    return several or make_objective(config, of_update(config)).needs_old_logprobs


@functools.lru_cache(maxsize=1)
def make_exact_pass(config: Config, policy: PolicyConfig, mesh: Mesh) -> ExactPass:
    """The executable of ``rollout.engine: exact``: one for a run, shared by the engine and the update."""
    row_tokens = config.packing.resolve_row_tokens(config.max_engine_tokens)
    return ExactPass(
        policy,
        mesh,
        precision=config.precision,
        objective=make_objective(config, config.num_sequences),
        rows=micro_batch_rows(config, row_tokens),
        row_tokens=row_tokens,
        options=config.policy,
    )


def make_objective(config: Config, num_sequences: int) -> Objective:
    """What an update of ``num_sequences`` responses minimises."""
    return Objective(config.loss, config.correction.resolved(), num_sequences, config.rollout.max_response_tokens)


def make_pack(config: Config, num_sequences: int) -> Pack:
    """Packs batches of ``num_sequences`` responses into the run's rows."""
    micro, rows, tokens = batch_shape(config, num_sequences)
    return functools.partial(pack, row_tokens=tokens, rows_per_micro_batch=rows, micro_batches=micro)
