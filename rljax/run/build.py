"""Puts a run together from its configuration: problems, engine, update, and the components of the loop."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import optax
from jax.sharding import Mesh

from rljax.data.prompts import Problem, PromptStream, check_lengths, evaluation_datasets, training_problems
from rljax.data.tokenizer import Tokenizer
from rljax.errors import ConfigError, caller_errors
from rljax.policy.config import PolicyConfig
from rljax.policy.hf import load_params
from rljax.policy.qwen3 import Params, param_shardings
from rljax.report.rows import Row
from rljax.rewards.pool import RewardPool
from rljax.rollout.build import make_engine
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.types import SamplingParams
from rljax.run.checkpoint import Checkpointer
from rljax.run.config import Config
from rljax.run.evaluation import Evaluation
from rljax.run.guard import Guard
from rljax.run.loop import Components
from rljax.run.progress import Progress
from rljax.run.rate import make_rate_controller
from rljax.trainer.exact import ExactPass, ExactUpdate
from rljax.trainer.forward import ForwardPass
from rljax.trainer.objective import Objective
from rljax.trainer.packing import max_micro_batches, pack
from rljax.trainer.state import TrainState, abstract_state, create_state, make_optimizer
from rljax.trainer.step import TrainStep
from rljax.trainer.update import MultipleUpdates, Pack, Reference, SingleUpdate, Update


@dataclass(frozen=True)
class Problems:
    """What is trained on, in its order, and what is evaluated on by name."""

    stream: PromptStream
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
    if not config.eval.is_wanted:
        return Problems(stream, {})
    datasets = evaluation_datasets(config.eval.datasets, data, tokenizer)
    for name, problems in datasets.items():
        check_lengths(problems, tokenizer, limit, f" in eval.datasets {name}")
    if not datasets:
        print("warning: nothing is evaluated: eval.datasets is empty", file=sys.stderr)
    return Problems(stream, datasets)


def make_run_engine(config: Config, policy: PolicyConfig, mesh: Mesh, should_stop: Callable[[], bool]) -> RolloutEngine:
    """The engine that ``rollout.engine`` names; the exact one gets the trainer's executable. Raises as make_engine."""
    return make_engine(
        config.rollout,
        policy,
        mesh,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_tokens=config.max_engine_tokens,
        make_executable=functools.partial(make_exact_pass, config, policy, mesh),
        should_stop=should_stop,
    )


def build(
    config: Config,
    policy: PolicyConfig,
    tokenizer: Tokenizer,
    mesh: Mesh,
    engine: RolloutEngine,
    checkpointer: Checkpointer,
    problems: Problems,
) -> Components:
    """The components of a run at its first step.

    Raises:
      ConfigError: the reward cannot be used.
    """
    stops = policy.stop_token_ids or (tokenizer.eos_token_id,)
    with caller_errors():
        rewards = RewardPool(config.data.reward_name, config.data.reward_workers, config.data.reward_timeout_s)
    return Components(
        config=config,
        policy=policy,
        engine=engine,
        stream=problems.stream,
        tokenizer=tokenizer,
        rewards=rewards,
        sampling=SamplingParams(config.rollout.max_response_tokens, config.rollout.temperature, stops),
        evaluate=make_evaluation(config, engine, tokenizer, rewards, stops, problems.evaluation),
        update=make_update(config, policy, make_optimizer(config.optimizer), mesh),
        controller=make_rate_controller(config.schedule, config.optimizer.learning_rate, config.run.steps),
        guard=Guard(config.guard),
        checkpointer=checkpointer,
    )


def starting_point(run: Components, mesh: Mesh) -> tuple[TrainState, Progress]:
    """The newest checkpoint's state, the components put where it was taken; or the model's at step 0.

    Raises:
      ConfigError: the model or the checkpoint cannot be used.
    """
    config, policy = run.config, run.policy
    tx, dynamic = make_optimizer(config.optimizer), config.precision.compute_dtype == "float16"
    latest = run.checkpointer.latest_step()
    with caller_errors():
        if latest is None:
            params = load_params(config.model.path, policy, param_shardings(policy, mesh))
            return create_state(params, policy, tx, mesh, dynamic_scale=dynamic), Progress()
        try:
            state, host = run.checkpointer.restore(latest, abstract_state(policy, tx, mesh, dynamic_scale=dynamic))
        except RuntimeError as error:
            raise ConfigError(error) from error
        return state, run.load_state_dict(host)


def make_evaluation(
    config: Config,
    engine: RolloutEngine,
    tokenizer: Tokenizer,
    rewards: RewardPool,
    stops: tuple[int, ...],
    datasets: dict[str, Sequence[Problem]],
) -> Callable[[], Row] | None:
    """``eval/<dataset>/...`` of the published policy, or None if evaluation is off or has no datasets."""
    wanted = config.eval
    limit = wanted.max_response_tokens or config.rollout.max_response_tokens
    sampling = SamplingParams(limit, wanted.temperature, stops)
    if not datasets:
        return None
    return Evaluation(engine, tokenizer, datasets, rewards, sampling, wanted.n, wanted.pass_k, wanted.seed)


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
    """The executable of ``rollout.engine: exact``: one for a run, shared by the engine and the update."""
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
