"""Puts the parts of a run together from its configuration; each feature of a step is chosen here."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jax.sharding import Mesh

from rljax.data.files import Tally
from rljax.data.prompts import (
    TOYS,
    Problem,
    PromptStream,
    check_lengths,
    drop_long,
    evaluation_datasets,
    training_problems,
)
from rljax.data.tokenizer import Tokenizer
from rljax.distributed.acts import Act
from rljax.distributed.processes import ALONE, Processes
from rljax.errors import caller_errors
from rljax.policy.config import PolicyConfig
from rljax.rewards.pool import RewardPool
from rljax.rollout.build import PolicyFunctions, make_engine, policy_functions
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.types import SERVED, SamplingParams
from rljax.run.acts import FollowerState, PublishToServers, Save, SharedEngine, Step
from rljax.run.checkpoint import Checkpointer
from rljax.run.config import Config
from rljax.run.data_check import check_answers, short, table
from rljax.run.evaluation import Evaluation
from rljax.run.fingerprint import json_checksum
from rljax.run.guard import Guard, SkippedUpdates
from rljax.run.pipeline import BatchesAhead
from rljax.run.progress import Progress
from rljax.run.rate import make_rate_controller
from rljax.run.sampling import Batches, BatchesInTurn, Sampler
from rljax.run.step import RunParts
from rljax.run.stop import StopRequest
from rljax.run.training import make_exact_pass, make_trainer, starting_state
from rljax.trainer.state import TrainState
from rljax.weights.access import find_key_file
from rljax.weights.outlets import make_part_writer
from rljax.weights.writer import PartWriter


@dataclass(frozen=True)
class Problems:
    """The problems of a run.

    Attributes:
      stream: The training problems in their order.
      fingerprint: The checksum of their prompts and answers, in the order of the data.
      evaluation: The problems to evaluate on by the name of their dataset.
      tallies: The counts of each data set that was read from a file.
    """

    stream: PromptStream
    fingerprint: str
    evaluation: dict[str, Sequence[Problem]]
    tallies: Sequence[Tally] = ()


def load_problems(config: Config, tokenizer: Tokenizer) -> Problems:
    """Reads the problems, and warns on stderr if there is no dataset to evaluate on.

    Training problems without a right answer, or with a prompt that is too long, are left out and counted.

    Raises:
      ValueError: The problems cannot be read, a prompt of an evaluation is too long, or fewer problems are left than a
        batch takes.
    """
    data, limit = config.data, config.data.max_prompt_tokens
    command = f"rljax prepare {data.path} OUT.parquet --model {config.model.path} --max-prompt-tokens {limit}"
    remedy = f" in {data.path}; raise it, or: {command}" if data.path else ""
    tally = Tally(Path(data.path or data.task).name)
    read = training_problems(data, tokenizer, tally)
    training = tally.problems = drop_long(read, tokenizer, limit, remedy)
    tally.too_long = len(read) - len(training)
    if len(training) < data.batch_size and (tally.too_long or tally.unanswered):
        raise ValueError(
            f"a batch takes {data.batch_size} problems, but only {len(training)} of {tally.rows} rows are left: "
            f"{tally.unanswered} have no right answer, {tally.too_long} have more than {limit} tokens{remedy}"
        )
    stream = PromptStream(training, data.batch_size, config.run.seed)
    fingerprint = json_checksum([[problem["prompt"], problem["answer"]] for problem in training])
    tallies = [tally] if data.path else []
    if not config.eval.is_wanted:
        return Problems(stream, fingerprint, {}, tallies)
    datasets = evaluation_datasets(config.eval.datasets, data, tokenizer)
    for name, problems in datasets.items():
        check_lengths(problems, tokenizer, limit, f" in eval.datasets {name}")
        if name not in TOYS:
            tallies.append(Tally(f"eval {name}", problems, len(problems), too_long=0))
    if not datasets:
        print("warning: nothing is evaluated: eval.datasets is empty", file=sys.stderr)
    return Problems(stream, fingerprint, datasets, tallies)


def look_at_data(config: Config, problems: Problems) -> str:
    """Checks the right answers of all files, prints the table of their counts on stderr, and returns it.

    Raises:
      ValueError: There is no such reward, or a shipped reward refuses every right answer that the run trains on.
    """
    if not problems.tallies:
        return ""
    data = config.data
    found = check_answers(
        [tally.problems for tally in problems.tallies],
        data.reward_name,
        count=data.check_answers,
        seed=data.seed,
        workers=data.reward_workers,
        timeout_s=data.reward_timeout_s,
    )
    first = found[0]
    if data.path and first.checked and len(first.failed) == first.checked:
        raise ValueError(
            f"data.path = {data.path}: data.reward = {data.reward_name} refuses all {first.checked} right answers when "
            f"they are given as the response, such as {short(first.failed[0]['answer'])}; choose another reward, "
            "correct the answers, or set data.check_answers = 0"
        )
    text = table(list(zip(problems.tallies, found, strict=True)), data.max_prompt_tokens)
    print(text, file=sys.stderr)
    return text


def make_run_engine(
    config: Config, policy: PolicyConfig, mesh: Mesh, stop: StopRequest, processes: Processes = ALONE
) -> RolloutEngine:
    """Builds the engine that ``rollout.engine`` names; the exact engine gets the trainer's executable.

    Args:
      config: The configuration of the run.
      policy: The shape of the policy.
      mesh: The mesh of the trainer.
      stop: The stop request of the run.
      processes: The processes of the run; this is process 0, or the caller wraps the engine itself.

    Raises:
      ConfigError: No server answers in time, or weights cannot be written.
      ValueError: The settings do not fit the engine, or a server does not fit the policy.
    """
    several, is_served = processes.count > 1, config.rollout.engine in SERVED
    if several and not is_served and config.rollout.max_staleness:
        raise ValueError("rollout.max_staleness: the embedded engine of several processes samples in turn; give 0")
    functions = None
    if several and is_served:
        functions = make_publish(config, policy, processes)[0].functions()
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
        stop=stop,
    )
    return SharedEngine(processes, engine) if several and not is_served else engine


def make_checkpointer(config: Config, processes: Processes) -> Checkpointer:
    """Opens the checkpoints in the run directory; all processes do so at the same time."""
    if processes.count > 1:
        return make_save(config, processes)
    return Checkpointer(Path(config.run.dir) / "checkpoints", keep=config.checkpoint.keep)


def make_save(config: Config, processes: Processes) -> Save:
    """Opens the checkpoints in the run directory, to which every process of several writes its shards."""
    return Save(processes, Path(config.run.dir) / "checkpoints", keep=config.checkpoint.keep)


def make_publish(
    config: Config, policy: PolicyConfig, processes: Processes
) -> tuple[PublishToServers, PartWriter | None]:
    """Makes the publish of several processes to HTTP servers, and the files that this process writes for it.

    Raises:
      ConfigError: The files cannot be kept, or cannot be served.
    """
    functions = policy_functions(policy, config.rollout.dtype)
    parts = make_own_parts(config, functions, processes)
    return PublishToServers(processes, functions, parts), parts


def make_own_parts(config: Config, functions: PolicyFunctions, processes: Processes) -> PartWriter | None:
    """Returns the writer of this process's part of each version; None where process 0 writes whole versions.

    Raises:
      ConfigError: The files cannot be kept, or cannot be served.
    """
    if config.publish.store == "shared":
        return None
    return make_part_writer(
        functions.parts,
        config.publish.store,
        config.rollout.transfer_dir,
        host=config.publish.host,
        port=config.publish.port,
        api_key_file=find_key_file(config.rollout.api_key_file),
        index=processes.index,
        coordinator=processes.coordinator,
    )


def make_acts(
    config: Config, policy: PolicyConfig, mesh: Mesh, processes: Processes, at_end: contextlib.ExitStack
) -> list[Act[FollowerState]]:
    """Makes the acts of the engine that a process other than 0 follows; ``at_end`` closes the files that it serves.

    Raises:
      ConfigError: The files cannot be kept, or cannot be served.
    """
    if config.rollout.engine not in SERVED:
        return SharedEngine(processes, make_run_engine(config, policy, mesh, StopRequest())).acts
    publish, parts = make_publish(config, policy, processes)
    if parts is not None:
        at_end.callback(parts.close)
    return [publish]


def build(
    config: Config,
    policy: PolicyConfig,
    tokenizer: Tokenizer,
    mesh: Mesh,
    engine: RolloutEngine,
    checkpointer: Checkpointer,
    problems: Problems,
    stop: StopRequest | None = None,
    processes: Processes = ALONE,
) -> RunParts:
    """Puts the parts of a run together, as they are at its first step.

    Process 0 calls it. The other processes meanwhile build the part of it that they share (``make_trainer``).

    Args:
      config: The configuration of the run.
      policy: The shape of the policy.
      tokenizer: The tokenizer of the policy.
      mesh: The mesh of the trainer.
      engine: The engine that samples.
      checkpointer: The checkpoints of the run.
      problems: The problems to train on and to evaluate on.
      stop: The stop request of the run. None: the run is never asked to stop.
      processes: The processes of the run.

    Raises:
      ConfigError: The reward cannot be used.
      OSError: Frozen weights cannot be read.
      ValueError: Frozen weights are not those of a policy of this shape.
    """
    stop = stop or StopRequest()
    stops = policy.stops(tokenizer.eos_token_id, config.rollout.stop_token_ids)
    with caller_errors():
        rewards = RewardPool(config.data.reward_name, config.data.reward_workers, config.data.reward_timeout_s)
    trainer = make_trainer(config, policy, mesh)
    update = trainer.update
    return RunParts(
        config=config,
        policy=policy,
        engine=engine,
        batches=make_batches(config, engine, tokenizer, rewards, stops, problems.stream, stop),
        tokenizer=tokenizer,
        rewards=rewards,
        evaluation=make_evaluation(config, engine, tokenizer, rewards, stops, problems.evaluation, stop),
        update=Step(processes, update) if processes.count > 1 else update,
        controller=make_rate_controller(config.schedule, config.optimizer.learning_rate, config.run.steps),
        guard=Guard(config.guard),
        skipped=SkippedUpdates(config.guard.max_skipped_updates, config.loss.mini_batches * config.loss.epochs),
        checkpointer=checkpointer,
        fingerprints={"problems": problems.fingerprint} | trainer.fingerprints,
        stop=stop,
        weights=trainer.weights,
    )


def make_batches(
    config: Config,
    engine: RolloutEngine,
    tokenizer: Tokenizer,
    rewards: RewardPool,
    stop_token_ids: tuple[int, ...],
    stream: PromptStream,
    stop: StopRequest,
) -> Batches:
    """Builds the source of the run's batches; ``rollout.max_staleness`` says whether they are sampled ahead."""
    rollout = config.rollout
    sampler = Sampler(
        engine,
        tokenizer,
        rewards,
        SamplingParams(rollout.max_response_tokens, rollout.temperature, stop_token_ids),
        rollout.group_size,
        seed=config.run.seed,
        stop=stop,
        counts_mixed=rollout.update != "wait",
    )
    if not rollout.max_staleness:
        return BatchesInTurn(stream, sampler)
    return BatchesAhead(
        stream,
        sampler,
        engine,
        stop,
        steps=config.run.steps,
        max_staleness=rollout.max_staleness,
        always_drains=rollout.update == "wait",
    )


def make_evaluation(
    config: Config,
    engine: RolloutEngine,
    tokenizer: Tokenizer,
    rewards: RewardPool,
    stop_token_ids: tuple[int, ...],
    datasets: Mapping[str, Sequence[Problem]],
    stop: StopRequest,
) -> Evaluation:
    """Builds the evaluation of the run."""
    wanted = config.eval
    limit = wanted.max_response_tokens or config.rollout.max_response_tokens
    params = SamplingParams(limit, wanted.temperature, stop_token_ids)
    sampler = Sampler(engine, tokenizer, rewards, params, wanted.n, stop=stop)
    return Evaluation(wanted, config.run.steps, sampler, datasets)


def starting_point(parts: RunParts, mesh: Mesh) -> tuple[TrainState, Progress]:
    """Reads the newest whole checkpoint and puts the parts into its state, or else reads the model.

    A line on stderr then says what is trained, and where.

    Returns:
      The device state at which the run starts, and its counters.

    Raises:
      ConfigError: The model or the checkpoint cannot be used.
      StartAgainError: One of several processes found the newest checkpoint damaged, and moved it away.
    """
    config = parts.config
    state, host = starting_state(config, parts.policy, mesh, parts.checkpointer, parts.load_state_dict)
    print(f"training {config.model.path} for {config.run.steps} steps into {config.run.dir}", file=sys.stderr)
    return state, Progress.from_state_dict(host) if host else Progress()
