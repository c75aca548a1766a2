"""Builds the objects of a run from its configuration, which decides which features the steps have."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from rljax.data.files import ALTERNATIVES, CHAT_TOOLS, COLUMNS, TRUTH, Tally, right_answers, single_answer
from rljax.data.prompts import (
    DATA_SEED,
    RAW_PROMPT,
    TEMPLATED,
    TOYS,
    DataConfig,
    Problem,
    PromptStream,
    drop_long,
    evaluation_datasets,
    is_own,
    prompt_ids,
    say_marks,
    template_arguments,
    training_problems,
)
from rljax.data.tokenizer import Tokenizer
from rljax.policy.config import PolicyConfig
from rljax.rewards.pool import RewardPool
from rljax.rollout.build import PolicyFunctions, make_engine
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.episodes.hosts import EnvironmentHosts
from rljax.rollout.kinds import can
from rljax.rollout.types import RolloutConfig, SamplingParams
from rljax.run.checkpoint import Checkpointer
from rljax.run.config import Config
from rljax.run.data_check import check_answers, refuse_placeholders, short, table
from rljax.run.episodes import Episodes
from rljax.run.evaluation import Evaluation
from rljax.run.external import make_external_batches
from rljax.run.fingerprint import json_checksum
from rljax.run.guard import Guard
from rljax.run.pipeline import Batches, BatchesAhead
from rljax.run.rate import make_rate_controller
from rljax.run.sampling import RefillingSampler, ResponseSource, Sampler, SampleStep, SingleTurn
from rljax.run.step import Progress, RunParts
from rljax.run.stop import StopRequest
from rljax.run.training import make_exact_pass, make_trainer, starting_state
from rljax.trainer.state import TrainState

PROBED_PROMPTS = 64  # the number of training prompts from which the prompts that check a server are made


class Inputs(NamedTuple):
    """The inputs of a run, which every process reads for itself."""

    config: Config  # the configuration; its ``model.path`` is a local directory
    policy: PolicyConfig  # the shape of the model
    tokenizer: Tokenizer  # the tokenizer of the model
    mesh: Mesh  # the devices of the trainer

    @property
    def stops(self) -> tuple[int, ...]:
        """The ids of the tokens that end a response."""
        return self.policy.stops(self.tokenizer.eos_token_id, self.config.rollout.stop_token_ids)


@dataclass(frozen=True)
class Problems:
    """The problems of a run."""

    stream: PromptStream  # the training problems in their order
    # The checksums of the ordered training problems: of prompts and answers ("problems"), of all else ("extra_info").
    fingerprints: dict[str, str]
    evaluation: dict[str, Sequence[Problem]]  # the problems to evaluate on, by the name of their dataset
    tallies: Sequence[Tally] = ()  # the counts of each data set that is not a toy task
    prompts: Sequence[np.ndarray] = ()  # the token ids of some training prompts, int32 [s] each


def load_problems(config: Config, tokenizer: Tokenizer) -> Problems:
    """Reads the problems, and warns on stderr if evaluations are wanted but there is no dataset for them.

    Training problems without a right answer, or with a prompt that is too long, are left out and counted. Raises
    ValueError if problems cannot be read, a prompt of an evaluation is too long, or too few are left for a batch.
    """
    limit, environment = config.data.max_prompt_tokens, config.rollout.environment
    data = replace(config.data, reward=environment or config.data.reward)  # An environment gets whole rows.
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
    texts = [[problem["prompt"], right_answers(problem)] for problem in training]
    # Other entries compare the answers and the prompts, from which these and a number under TRUTH follow.
    own = ["prompt", "answer", ALTERNATIVES, TEMPLATED, RAW_PROMPT, CHAT_TOOLS]
    if environment and not is_own(config.data.reward_name):  # checkpoints of earlier versions were made without these
        own += [COLUMNS, TRUTH]
        texts = [[problem["prompt"], problem.get(ALTERNATIVES) or single_answer(problem)] for problem in training]
    rest = [
        {key: it for key, it in problem.items() if key not in own and (key != TRUTH or isinstance(it, list | dict))}
        for problem in training
    ]
    prints = {"problems": json_checksum(texts), "extra_info": json_checksum(rest)}
    tallies = [] if data.task in TOYS else [tally]
    prompts = [prompt_ids(problem, tokenizer) for problem in itertools.islice(training, PROBED_PROMPTS)]
    datasets = evaluation_datasets(config.eval.datasets, data, tokenizer) if config.eval.is_wanted else {}
    say_marks([*training, *itertools.chain(*datasets.values())], tokenizer)
    for name, problems in datasets.items():
        drop_long(problems, tokenizer, limit, f" in eval.datasets {name}", may_drop=False)
        if name not in TOYS:
            tallies.append(Tally(f"eval {name}", problems, len(problems), too_long=0))
    if config.eval.is_wanted and not datasets:
        print("warning: nothing is evaluated: eval.datasets is empty", file=sys.stderr)
    return Problems(stream, prints, datasets, tallies, prompts)


def look_at_data(config: Config, problems: Problems) -> str:
    """Scores right answers of the data as responses. Returns the table of counts, which it prints on stderr, or "".

    Raises ValueError for an unknown reward, or if a shipped one refuses all training answers, or all are placeholders.
    """
    if not problems.tallies or config.rollout.environment is not None:
        return ""
    data = config.data
    for tally in problems.tallies:
        refuse_placeholders(tally.problems, data.reward_name, tally.name)
    found = check_answers(
        [tally.problems for tally in problems.tallies],
        data.reward_name,
        count=data.check_answers,
        seed=DATA_SEED,
        workers=data.reward_workers,
        timeout_s=data.reward_timeout_s,
    )
    first = found[0]
    if data.task not in TOYS and first.checked and len(first.failed) == first.checked:
        source = f"data.path = {data.path}" if data.path else f"data.task = {data.task}"
        raise ValueError(
            f"{source}: data.reward = {data.reward_name} refuses all {first.checked} right answers when "
            f"they are given as the response, such as {short(first.failed[0]['answer'])}; choose another reward, "
            "correct the answers, or set data.check_answers = 0"
        )
    text = table(list(zip(problems.tallies, found, strict=True)), data.max_prompt_tokens)
    print(text, file=sys.stderr)
    return text


def make_run_engine(
    inputs: Inputs, stop: StopRequest, functions: PolicyFunctions | None = None, prompts: Sequence[np.ndarray] = ()
) -> RolloutEngine:
    """Builds the engine that ``rollout.engine`` names; the exact engine gets the trainer's executable.

    For HTTP servers, ``functions`` read the policy (None: in a single process), and ``prompts`` of the run serve to
    check a server's weights. Raises ConfigError if no server answers or memory lacks room for weights. Raises
    ValueError if settings do not fit the engine, or a server does not fit the policy.
    """
    config, policy, _, mesh = inputs
    rollout = config.rollout
    if (rollout.urls or rollout.discovery) and not can(rollout.engine, "serves"):
        line = f"servers are not used: rollout.engine = {rollout.engine} samples in this process"
        print(f"warning: rollout.urls and rollout.discovery: {line}", file=sys.stderr)
    return make_engine(
        rollout,
        policy,
        mesh,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_tokens=config.max_engine_tokens,
        lm_head_dtype=config.precision.lm_head_dtype,
        make_executable=functools.partial(make_exact_pass, config, policy, mesh),
        functions=functions,
        publish=config.publish,
        stop=stop,
        probe_prompts=prompts,
        step_prompts=config.data.batch_size if config.rollout.refill else 0,
    )


def make_scorer(data: DataConfig, rollout: RolloutConfig) -> RewardPool | EnvironmentHosts:
    """Returns the worker processes that score responses, by a reward function or an environment of several turns.

    Raises OSError or ValueError if the reward or the environment cannot be used.
    """
    if rollout.environment is None:
        return RewardPool(data.reward_name, data.reward_workers, data.reward_timeout_s)
    return EnvironmentHosts(rollout.environment, rollout.episode)


def make_source(
    data: DataConfig,
    rollout: RolloutConfig,
    engine: RolloutEngine,
    tokenizer: Tokenizer,
    scorer: RewardPool | EnvironmentHosts,
    stop: StopRequest | None = None,
) -> ResponseSource:
    """Returns the source of responses that ``scorer`` scores. ``stop`` None: sampling is never given up."""
    stop = stop or StopRequest()
    if isinstance(scorer, RewardPool):
        return SingleTurn(engine, tokenizer, scorer, stop)
    arguments = template_arguments(data.enable_thinking, data.chat_template_kwargs)
    limits: dict[str, Any] = {"max_prompt_tokens": data.max_prompt_tokens, "template_arguments": arguments}
    return Episodes(engine, tokenizer, scorer, rollout.episode, **limits, stop=stop)


def make_batches(
    inputs: Inputs, engine: RolloutEngine, source: ResponseSource, problems: Problems, stop: StopRequest
) -> Batches:
    """Returns the batches of the run: taken from another program, sampled ahead of the trainer, or sampled in turn.

    ``source`` samples responses, unless they come from another program. Raises OSError or ValueError if that program's
    trajectories cannot be received.
    """
    config, rollout = inputs.config, inputs.config.rollout
    sampled = SamplingParams(
        rollout.max_response_tokens,
        rollout.temperature,
        inputs.stops,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        reported=rollout.reported,
    )
    if rollout.trajectories is not None:
        return make_external_batches(config, inputs.policy, problems.stream, sampled, stop)
    plain = Sampler(source, sampled, rollout.group_size, seed=config.run.seed, counts_mixed=rollout.update != "wait")
    sample: SampleStep = RefillingSampler(plain, problems.stream, config).sample if rollout.refill else plain.sample
    if not rollout.max_staleness:
        return Batches(problems.stream, sample)
    return BatchesAhead(
        problems.stream,
        sample,
        engine,
        stop,
        steps=config.run.steps,
        max_staleness=rollout.max_staleness,
        always_drains=rollout.update == "wait",
    )


def build(
    inputs: Inputs, engine: RolloutEngine, checkpointer: Checkpointer, problems: Problems, stop: StopRequest
) -> RunParts:
    """Builds the objects of a run, in their state before step 1, except the training state.

    Raises OSError or ValueError if the reward, the environment, frozen weights, or the trajectories of another program
    cannot be used.
    """
    config, policy, tokenizer, mesh = inputs
    scorer = make_scorer(config.data, config.rollout)
    source = make_source(config.data, config.rollout, engine, tokenizer, scorer, stop)
    update, weights, of_weights = make_trainer(config, policy, mesh)
    batches = make_batches(inputs, engine, source, problems, stop)
    limit = config.eval.max_response_tokens or config.rollout.max_response_tokens
    of_evaluation = SamplingParams(limit, config.eval.temperature, inputs.stops)
    evaluator = Sampler(source, of_evaluation, config.eval.n)
    of_tokens = {name: json_checksum(facts) for name, facts in tokenizer.facts().items()}
    return RunParts(
        config=config,
        policy=policy,
        engine=engine,
        batches=batches,
        tokenizer=tokenizer,
        source=source,
        evaluation=Evaluation(config.eval, config.run.steps, evaluator, problems.evaluation),
        update=update,
        controller=make_rate_controller(config.schedule, config.optimizer.learning_rate, config.run.steps),
        guard=Guard(config.guard),
        checkpointer=checkpointer,
        fingerprints=of_tokens | problems.fingerprints | of_weights,
        stop=stop,
        weights=weights,
    )


def starting_point(parts: RunParts, mesh: Mesh) -> tuple[TrainState, Progress]:
    """Reads the newest whole checkpoint and restores ``parts`` from it, or else reads the model.

    Returns the training state and the counters at which the run starts. A line on stderr names the model, the number of
    steps and the run directory. Raises ConfigError or StartAgainError as ``starting_state`` does.
    """
    config = parts.config
    state, host = starting_state(config, parts.policy, mesh, parts.checkpointer, parts.load_state_dict)
    print(f"training {config.model.path} for {config.run.steps} steps into {config.run.dir}", file=sys.stderr)
    return state, Progress.from_state_dict(host) if host else Progress()
