"""Trains a policy: ``python -m rljax.train CONFIG.yaml [--a.b value ...]``.

Builds the parts of a run from its configuration, goes on from a checkpoint when there is one, and calls the loop.
SIGINT or SIGTERM ends the run after the step under way, saved; the same command then goes on from there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.config import Config
from rljax.config_loader import ConfigError, caller_errors, config_to_yaml, load_config, run_cli
from rljax.data.prompts import PromptStream, held_problems, training_problems
from rljax.data.tokenizer import Tokenizer, load_tokenizer
from rljax.evaluate import greedy_accuracy
from rljax.policy.config import PolicyConfig, config_to_hf, read_config
from rljax.policy.hf import hf_tensors, load_params
from rljax.policy.qwen3 import param_shardings
from rljax.policy.score import make_scorer
from rljax.record import Recorder, format_summary, read_rows, summarize, write_summary
from rljax.report_figure import draw_report
from rljax.rewards.toy import addition_reward
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.jax_engine import JaxEngine
from rljax.rollout.vllm_engine import VllmConfig, VllmEngine
from rljax.rollout.vllm_handshake import Expectation
from rljax.sharding import make_mesh
from rljax.training.checkpoint import Checkpointer
from rljax.training.loop import Parts, Progress, Row, batch_shape, load_host_state, train
from rljax.training.optimizer import make_optimizer
from rljax.training.rate import make_rate_controller
from rljax.training.state import TrainState, abstract_state, create_state
from rljax.training.step import TrainStep

PROG = "python -m rljax.train"
# Settings with which a run may be continued though they were others before: they change no row's meaning.
MAY_DIFFER = (
    *("run.steps", "run.dir", "run.resume", "mesh.", "eval.every", "checkpoint.", "model.path"),
    *("rollout.urls", "rollout.transfer_dir", "rollout.server_wait_s"),
)


def main(argv: Sequence[str]) -> int:
    """Runs training; returns the exit status."""
    config = load_config(Config, argv, prog=PROG, description=__doc__ or "")
    run_dir = Path(config.run.dir)
    with caller_errors():
        policy = read_config(config.model.path)
        tokenizer = load_tokenizer(config.model.path)
        mesh = make_mesh(config.mesh)
        check_fit(config, policy, tokenizer, mesh)
        prepare_directory(config, run_dir)
        engine = make_engine(config, policy, mesh)
    (run_dir / "config.yaml").write_text(config_to_yaml(config))
    checkpointer = Checkpointer(run_dir / "checkpoints", keep=config.checkpoint.keep)
    first_step = (checkpointer.latest_step() or 0) + 1
    recorder = Recorder(run_dir, config.run.steps, first_step=first_step)
    stop = StopRequest()
    try:
        parts, state, progress = build(config, policy, tokenizer, mesh, engine, recorder, checkpointer)
        with stop:
            train(parts, state, progress, stop.requested, last_row(run_dir))
    finally:
        recorder.close()
        engine.close()
        checkpointer.close()
    finish(run_dir)
    if stop.signal is not None:
        print(f"stopped after step {progress.step}, saved; the same command goes on from there", file=sys.stderr)
        return 128 + stop.signal
    return 0


def check_fit(config: Config, policy: PolicyConfig, tokenizer: Tokenizer, mesh: Mesh) -> None:
    """Raises ValueError for settings that only together make no sense."""
    if len(tokenizer) > policy.vocab_size:
        raise ValueError(
            f"{config.model.path}: the tokenizer has {len(tokenizer)} tokens, the model only {policy.vocab_size}"
        )
    if config.max_sequence_tokens > policy.max_position_embeddings:
        raise ValueError(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {config.max_sequence_tokens} is longer than the "
            f"model's max_position_embeddings = {policy.max_position_embeddings}"
        )
    if config.packing.rows_per_micro_batch % mesh.shape["fsdp"]:
        raise ValueError(
            f"packing.rows_per_micro_batch = {config.packing.rows_per_micro_batch} must be a multiple of the "
            f"{mesh.shape['fsdp']} ways that the mesh splits rows (mesh.fsdp)"
        )
    batch_shape(config)


def prepare_directory(config: Config, run_dir: Path) -> None:
    """Makes the run directory, or takes over the run of another (``run.resume`` is its path)."""
    holds_run = (run_dir / "metrics.jsonl").exists() or (run_dir / "checkpoints").exists()
    if config.run.resume == "never" and holds_run:
        raise ConfigError(f"run.resume: {run_dir} already holds a run, and run.resume = never; choose another run.dir")
    if config.run.resume == "auto" and (run_dir / "config.yaml").exists():
        check_same_run(config, run_dir)
    if config.run.resume not in ("auto", "never") and not holds_run:
        source = Path(config.run.resume)
        if not (source / "checkpoints").is_dir():
            raise ConfigError(f"run.resume: {source} is not a run directory (auto, never, or the path of one)")
        run_dir.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source / "checkpoints", run_dir / "checkpoints")
        shutil.copyfile(source / "metrics.jsonl", run_dir / "metrics.jsonl")
    run_dir.mkdir(parents=True, exist_ok=True)


def check_same_run(config: Config, run_dir: Path) -> None:
    """Raises ConfigError when the run in ``run_dir`` had settings that would make its later rows another run's."""
    recorded = load_config(Config, [str(run_dir / "config.yaml")], prog=PROG, description="")
    old, new = flat_settings(recorded), flat_settings(config)
    differing = [key for key in new if new[key] != old[key] and not key.startswith(MAY_DIFFER)]
    if differing:
        changes = ", ".join(f"{key} ({old[key]} there, {new[key]} now)" for key in differing)
        raise ConfigError(f"{run_dir} holds a run with other settings: {changes}; give another run.dir")


def flat_settings(section: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of a nested dataclass."""
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        nested = dataclasses.is_dataclass(value)
        settings |= flat_settings(value, f"{prefix}{field.name}.") if nested else {prefix + field.name: value}
    return settings


def make_engine(config: Config, policy: PolicyConfig, mesh: Mesh) -> RolloutEngine:
    """The engine that ``rollout.engine`` names. Raises ValueError when a server does not fit the run."""
    rollout = config.rollout
    if rollout.engine == "jax":
        return JaxEngine(policy, rollout.dtype, config.data.max_prompt_tokens, mesh=mesh)
    return VllmEngine(
        rollout.urls,
        Expectation(rollout.dtype, config_to_hf(policy, rollout.dtype), config.max_sequence_tokens),
        tensors=functools.partial(hf_tensors, config=policy, dtype=jnp.dtype(rollout.dtype)),
        score=make_scorer(policy, rollout.dtype),
        config=VllmConfig(transfer_dir=rollout.transfer_dir, server_wait_s=rollout.server_wait_s),
    )


def build(
    config: Config,
    policy: PolicyConfig,
    tokenizer: Tokenizer,
    mesh: Mesh,
    engine: RolloutEngine,
    recorder: Recorder,
    checkpointer: Checkpointer,
) -> tuple[Parts, TrainState, Progress]:
    """The parts, and the state to go on from: the newest checkpoint's, or the model's at step 0."""
    tx = make_optimizer(config.optimizer)
    dynamic = config.precision.compute_dtype == "float16"
    stops = policy.stop_token_ids or (tokenizer.eos_token_id,)
    parts = Parts(
        config=config,
        engine=engine,
        stream=PromptStream(training_problems(config.data), config.data.batch_size, config.run.seed),
        tokenizer=tokenizer,
        reward=addition_reward,
        evaluate=make_evaluation(config, engine, tokenizer, stops),
        step=TrainStep(
            policy,
            tx,
            mesh,
            precision=config.precision,
            loss_config=config.loss,
            batch_shape=batch_shape(config),
            num_sequences=config.num_sequences,
            temperature=config.rollout.temperature,
        ),
        controller=make_rate_controller(config.schedule, config.optimizer.learning_rate, config.run.steps),
        recorder=recorder,
        checkpointer=checkpointer,
        stop_token_ids=stops,
    )
    latest = checkpointer.latest_step()
    if latest is not None:
        state, host = checkpointer.restore(latest, abstract_state(policy, tx, mesh, dynamic_scale=dynamic))
        with caller_errors():
            return parts, state, load_host_state(parts, host)
    with caller_errors():
        params = load_params(config.model.path, policy, param_shardings(policy, mesh))
    return parts, create_state(params, policy, tx, mesh, dynamic_scale=dynamic), Progress()


def make_evaluation(
    config: Config, engine: RolloutEngine, tokenizer: Tokenizer, stops: tuple[int, ...]
) -> Callable[[], Row] | None:
    """``eval/<dataset>/...`` of the published policy on the held problems, or None when never asked for."""
    if config.eval.every == 0:
        return None
    measure = functools.partial(
        greedy_accuracy,
        engine,
        tokenizer,
        held_problems(config.data),
        addition_reward,
        max_response_tokens=config.rollout.max_response_tokens,
        stop_token_ids=stops,
    )
    return lambda: {f"eval/{config.data.task}/{name}": value for name, value in measure().items()}


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
