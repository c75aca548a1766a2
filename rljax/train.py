"""Trains a policy: ``python -m rljax.train CONFIG.yaml [--a.b value ...] [--dry-run]``.

Builds the parts of a run from its configuration, goes on from a checkpoint when there is one, and calls the loop.
SIGINT or SIGTERM ends the run after the step under way, saved, or at once where it waits for servers that are gone; the
same command then goes on from there. A guard's stop rule does likewise, with exit status 3. ``--dry-run`` only tells
what the run would take, from shapes alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from jax.sharding import Mesh

from rljax.data.prompts import Problem, PromptStream, check_lengths, evaluation_datasets, training_problems
from rljax.data.tokenizer import Tokenizer, load_tokenizer
from rljax.errors import ConfigError, caller_errors, run_cli
from rljax.policy.config import PolicyConfig, read_config
from rljax.policy.hf import load_params
from rljax.policy.hub import model_directory
from rljax.policy.qwen3 import param_shardings
from rljax.report.figure import draw_report
from rljax.report.rows import read_rows
from rljax.report.summary import format_summary, summarize, write_summary
from rljax.rewards.pool import RewardPool, make_pool
from rljax.rollout.build import serve_policy
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.exact_engine import ExactEngine, LogitNoise
from rljax.rollout.inject import InjectedEngine
from rljax.rollout.jax_engine import JaxEngine
from rljax.rollout.served.engine import VllmConfig
from rljax.rollout.types import SamplingParams
from rljax.run.build import make_exact_pass, make_update
from rljax.run.checkpoint import Checkpointer
from rljax.run.config import Config
from rljax.run.config_file import config_to_yaml, load_config
from rljax.run.directory import prepare_directory
from rljax.run.dry_run import check_shapes, dry_run
from rljax.run.evaluation import Evaluation
from rljax.run.guard import Guard
from rljax.run.loop import Parts, Progress, load_host_state, train
from rljax.run.rate import make_rate_controller
from rljax.run.record import Recorder
from rljax.sharding import make_mesh
from rljax.trainer.state import TrainState, abstract_state, create_state, make_optimizer

PROG = "python -m rljax.train"
DRY_RUN = "--dry-run"
GUARD_STATUS = 3


def main(argv: Sequence[str]) -> int:
    """Runs training; returns the exit status."""
    config = load_config(Config, [word for word in argv if word != DRY_RUN], prog=PROG, description=__doc__ or "")
    run_dir = Path(config.run.dir)
    with caller_errors():
        if DRY_RUN in argv:
            print(dry_run(config))
            return 0
        model = dataclasses.replace(config.model, path=model_directory(config.model.path))
        config = dataclasses.replace(config, model=model)
        policy = read_config(config.model.path)
        tokenizer = load_tokenizer(config.model.path)
        mesh = make_mesh(config.mesh)
        check_fit(config, policy, tokenizer, mesh)
        problems = load_problems(config, tokenizer)
        prepare_directory(config, run_dir)
        stop = StopRequest()
        engine = make_engine(config, policy, mesh, stop.requested)
    with contextlib.ExitStack() as stack:
        stack.callback(engine.close)
        checkpointer = Checkpointer(run_dir / "checkpoints", keep=config.checkpoint.keep)
        stack.callback(checkpointer.close)
        parts = build(config, policy, tokenizer, mesh, engine, checkpointer, problems)
        stack.callback(parts.rewards.close)
        state, progress = starting_point(parts, mesh)
        recorder = open_recorder(run_dir, config.run.steps, progress.step + 1)
        stack.callback(recorder.close)
        (run_dir / "config.yaml").write_text(config_to_yaml(config))
        with stop:
            train(parts, state, progress, recorder.write, stop.requested, last_row(run_dir))
    finish(run_dir)
    for line in progress.stopped_by:
        print(f"guard: {line}; stopped, saved", file=sys.stderr)
    if progress.stopped_by:
        return GUARD_STATUS
    if stop.signal is not None:
        done = f"stopped after step {progress.step}, saved" if progress.step else "stopped before the first step"
        print(f"{done}; the same command goes on from there", file=sys.stderr)
        return 128 + stop.signal
    return 0


def check_fit(config: Config, policy: PolicyConfig, tokenizer: Tokenizer, mesh: Mesh) -> None:
    """Raises ValueError for settings that only together make no sense."""
    if len(tokenizer) > policy.vocab_size:
        raise ValueError(
            f"{config.model.path}: the tokenizer has {len(tokenizer)} tokens, the model only {policy.vocab_size}"
        )
    check_shapes(config, policy, mesh)


@dataclasses.dataclass(frozen=True)
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


def make_engine(config: Config, policy: PolicyConfig, mesh: Mesh, should_stop: Callable[[], bool]) -> RolloutEngine:
    """The engine that ``rollout.engine`` names.

    Raises:
      ValueError: a server does not fit the run, or none answers.
    """
    rollout, inject = config.rollout, config.rollout.inject
    if rollout.engine != "vllm":
        engine: RolloutEngine
        if rollout.engine == "jax":
            engine = JaxEngine(policy, rollout.dtype, config.data.max_prompt_tokens, mesh=mesh)
        else:
            noise = LogitNoise(inject.logit_noise, inject.seed) if inject.logit_noise else None
            engine = ExactEngine(make_exact_pass(config, policy, mesh), noise=noise)
        return InjectedEngine(engine, inject, policy, mesh) if inject.changes_weights else engine
    try:
        settings = VllmConfig(transfer_dir=rollout.transfer_dir, server_wait_s=rollout.server_wait_s)
        return serve_policy(rollout.urls, policy, rollout.dtype, config.max_engine_tokens, settings, should_stop)
    except RuntimeError as error:
        raise ConfigError(error) from error


def build(
    config: Config,
    policy: PolicyConfig,
    tokenizer: Tokenizer,
    mesh: Mesh,
    engine: RolloutEngine,
    checkpointer: Checkpointer,
    problems: Problems,
) -> Parts:
    """The parts of a run at its first step."""
    stops = policy.stop_token_ids or (tokenizer.eos_token_id,)
    tx = make_optimizer(config.optimizer)
    with caller_errors():
        rewards = make_pool(config.reward)
    return Parts(
        config=config,
        policy=policy,
        tx=tx,
        engine=engine,
        stream=problems.stream,
        tokenizer=tokenizer,
        rewards=rewards,
        evaluate=make_evaluation(config, engine, tokenizer, rewards, stops, problems.evaluation),
        update=make_update(config, policy, tx, mesh),
        controller=make_rate_controller(config.schedule, config.optimizer.learning_rate, config.run.steps),
        guard=Guard(config.guard),
        checkpointer=checkpointer,
        stop_token_ids=stops,
    )


def starting_point(parts: Parts, mesh: Mesh) -> tuple[TrainState, Progress]:
    """The newest checkpoint's state, the parts put where it was taken; or the model's at step 0."""
    policy, dynamic = parts.policy, parts.config.precision.compute_dtype == "float16"
    latest = parts.checkpointer.latest_step()
    if latest is None:
        with caller_errors():
            params = load_params(parts.config.model.path, policy, param_shardings(policy, mesh))
        return create_state(params, policy, parts.tx, mesh, dynamic_scale=dynamic), Progress()
    wanted = abstract_state(policy, parts.tx, mesh, dynamic_scale=dynamic)
    try:
        state, host = parts.checkpointer.restore(latest, wanted)
    except RuntimeError as error:
        raise ConfigError(error) from error
    with caller_errors():
        return state, load_host_state(parts, host)


def open_recorder(run_dir: Path, steps: int, first_step: int) -> Recorder:
    """The record from ``first_step`` on. Raises ConfigError when the rows before it are gone."""
    try:
        return Recorder(run_dir, steps, first_step=first_step)
    except RuntimeError as error:
        raise ConfigError(error) from error


def make_evaluation(
    config: Config,
    engine: RolloutEngine,
    tokenizer: Tokenizer,
    rewards: RewardPool,
    stops: tuple[int, ...],
    datasets: dict[str, Sequence[Problem]],
) -> Callable[[], dict[str, Any]] | None:
    """``eval/<dataset>/...`` of the published policy, or None when never asked for or on nothing."""
    wanted = config.eval
    limit = wanted.max_response_tokens or config.rollout.max_response_tokens
    sampling = SamplingParams(limit, wanted.temperature, stops)
    if not datasets:
        return None
    return Evaluation(engine, tokenizer, datasets, rewards, sampling, wanted.n, wanted.pass_k, wanted.seed)


def last_row(run_dir: Path) -> dict[str, Any]:
    """The last row recorded so far, or {}."""
    rows = read_rows(run_dir / "metrics.jsonl") if (run_dir / "metrics.jsonl").exists() else []
    return rows[-1] if rows else {}


def finish(run_dir: Path) -> None:
    """Writes summary.json and report.png and prints the summary."""
    rows = read_rows(run_dir / "metrics.jsonl")
    if not rows:
        return
    summary = summarize(rows)
    write_summary(run_dir, summary)
    draw_report([run_dir], run_dir / "report.png")
    print(format_summary(summary))
    print(json.dumps({"run_dir": str(run_dir), "report": str(run_dir / "report.png")}))


class StopRequest:
    """Turns the first SIGINT or SIGTERM inside a ``with`` block into a request; a second one acts as usual."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def requested(self) -> bool:
        """True once a signal came."""
        return self.signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = number
        for each, handler in self._previous.items():
            signal.signal(each, handler)
        print("\nstopping after this step (once more to stop at once)", file=sys.stderr)

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(run_cli(main))
