"""The training loop.

Step t (1-based) is one rollout batch and at most one update:

1. take ``batch_size`` problems
2. roll out ``group_size`` responses each with the published policy; rewards are scored as responses land
3. observe the mean response length over all of them; the rate of this very update follows
4. advantages; groups whose rewards are all equal carry no loss, and with no group left the update is skipped
5. pack into rows
6. one compiled step (forward, mismatch, loss, backward, AdamW), or several mini-batches
7. publish the weights as policy version t
8. evaluate when due, then record one row
9. check the guard; checkpoint when due

Everything random derives from (seed, step), so a resumed run repeats what an uninterrupted one would have done. The
loop knows neither which engine it talks to nor where its metrics go.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optax

from rljax.algorithms.advantages import compute_advantages, groups_with_loss, groups_with_signal
from rljax.data.prompts import PromptStream
from rljax.data.tokenizer import Tokenizer
from rljax.errors import ConfigError, StoppedWaitingError
from rljax.mismatch import split_sum_rise
from rljax.policy.config import PolicyConfig
from rljax.rewards.pool import RewardPool
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.types import Response, SamplingParams
from rljax.run.checkpoint import Checkpointer
from rljax.run.config import Config
from rljax.run.evaluation import mean_accuracy
from rljax.run.guard import Guard, unknown_metric
from rljax.run.profiling import StepProfiler
from rljax.run.rate import RateController
from rljax.run.rollout_files import StepRollouts, write_tokens, write_transcript
from rljax.trainer.measure import without_empty_buckets
from rljax.trainer.packing import TrainSequence
from rljax.trainer.state import TrainState
from rljax.trainer.update import Update, Updated

GRAD_NORM_EMA_DECAY = 0.9
Row = dict[str, Any]
Record = Callable[[Row, dict[str, np.ndarray]], None]


@dataclass
class Parts:
    """What a run is made of; built by ``rljax.train``."""

    config: Config
    policy: PolicyConfig
    tx: optax.GradientTransformation
    engine: RolloutEngine
    stream: PromptStream
    tokenizer: Tokenizer
    rewards: RewardPool
    evaluate: Callable[[], Row] | None
    update: Update
    controller: RateController
    guard: Guard
    checkpointer: Checkpointer
    stop_token_ids: tuple[int, ...]


@dataclass
class Progress:
    """Where a run stands: what a checkpoint holds besides the device state and the parts' own states."""

    step: int = 0
    policy_version: int = 0
    grad_norm_ema: float | None = None
    reference: dict[str, float] = dataclasses.field(default_factory=dict)  # sums of the first steps' mismatch
    stopped_by: list[str] = dataclasses.field(default_factory=list)  # the guard's lines that ended the run


@dataclass
class Rollouts:
    """The responses of a step, [b][g]."""

    prompts: list[np.ndarray]
    responses: list[list[Response]]
    rewards: np.ndarray  # float32 [b, g]

    def all(self) -> list[Response]:
        """Row by row."""
        return [response for group in self.responses for response in group]


class Timers:
    """Seconds of each phase of a step, as ``time/<phase>_s``."""

    def __init__(self) -> None:
        self.row: Row = {}
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block."""
        start = time.perf_counter()
        yield
        self.row[f"time/{name}_s"] = time.perf_counter() - start

    def total(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._start


def step_seed(seed: int, step: int) -> int:
    """An independent 32-bit seed for each step of a run."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0])


def roll_out(parts: Parts, step: int) -> Rollouts:
    """Points 1 and 2: problems, responses, rewards."""
    config = parts.config
    sampling = SamplingParams(config.rollout.max_response_tokens, config.rollout.temperature, parts.stop_token_ids)
    problems = parts.stream.next_batch()
    prompts = [parts.tokenizer.encode(problem["prompt"]) for problem in problems]
    n = config.rollout.group_size
    slots: list[list[Response | None]] = [[None] * n for _ in problems]
    scores: list[list[Future[float] | None]] = [[None] * n for _ in problems]
    for response in parts.engine.generate(prompts, n, sampling, seed=step_seed(config.run.seed, step)):
        i, j = response.prompt_index, response.sample_index
        slots[i][j] = response
        text = parts.tokenizer.decode(response.token_ids)
        scores[i][j] = parts.rewards.submit(problems[i], text, response.truncated)
    landed = [[response for response in group if response is not None] for group in slots]
    if any(len(group) != n for group in landed):
        raise RuntimeError(f"the engine returned {sum(map(len, landed))} responses, expected {len(problems) * n}")
    rewards = [[score.result() for score in group if score is not None] for group in scores]
    return Rollouts(prompts, landed, np.asarray(rewards, np.float32))


def rollout_row(rollouts: Rollouts, policy_version: int) -> Row:
    """What the host sees of a batch, over all responses, before anything is dropped."""
    responses = rollouts.all()
    lengths = np.asarray([response.length for response in responses], np.float64)
    truncated = np.asarray([response.truncated for response in responses])
    staleness = np.asarray([policy_version - response.oldest_version for response in responses])
    return {
        "reward/mean": float(rollouts.rewards.mean()),
        "reward/std": float(rollouts.rewards.std()),
        "reward/groups_with_signal": float(groups_with_signal(rollouts.rewards).mean()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/truncated_fraction": float(truncated.mean()),
        "rollout/policy_version": int(policy_version - staleness.max()),
        "rollout/staleness": float(staleness.mean()),
    }


def training_sequences(rollouts: Rollouts, config: Config, policy_version: int) -> list[TrainSequence]:
    """Point 4: advantages, and which groups carry loss."""
    lengths = np.asarray([[response.length for response in group] for group in rollouts.responses])
    advantages = compute_advantages(
        rollouts.rewards,
        config.advantage,
        lengths=lengths,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    signal = groups_with_loss(advantages)
    return [
        TrainSequence(
            prompt,
            response.token_ids,
            response.logprobs,
            float(advantages[i, j]),
            bool(signal[i]),
            staleness_of(response, policy_version),
        )
        for i, (prompt, group) in enumerate(zip(rollouts.prompts, rollouts.responses, strict=True))
        for j, response in enumerate(group)
    ]


def staleness_of(response: Response, policy_version: int) -> np.ndarray:
    """Policy versions between each token's draw and the trainer, int32 [t]."""
    behind = np.zeros(response.length, np.int32)
    for span in response.versions:
        behind[span.start : span.end] = policy_version - span.version
    return behind


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def watched_value(metric: str, row: Row, last_row: Row) -> float:
    """The value for the surge tracker: this step's, else the last step's; not a number at step 1 and on gaps.

    Raises:
      ConfigError: after step 1, a metric that no row has.
    """
    if metric not in row and last_row and metric not in last_row:
        raise ConfigError(f"schedule.metric: {unknown_metric(metric, last_row)}")
    value = row.get(metric, last_row.get(metric))
    return float("nan") if value is None else float(value)


def sum_rise(row: Row, reference: dict[str, float], reference_steps: int) -> Row:
    """How much of the rise of ``mismatch/log_ppl_abs_diff_sum`` since the run's first steps is longer responses.

    Adds the row to the reference while that is not complete, and returns nothing then.
    """
    names = ("token_count", "sequence_count", "log_ppl_abs_diff_sum")
    tokens, sequences, summed = (row[f"mismatch/{name}"] for name in names)
    if reference.get("steps", 0) < reference_steps:
        values = {"steps": 1, "token_count": tokens, "sequence_count": sequences, "gap": summed * sequences}
        for name, value in values.items():
            reference[name] = reference.get(name, 0) + value
        return {}
    before = reference | {"log_ppl_abs_diff_sum": reference["gap"] / max(reference["sequence_count"], 1)}
    after = dict(zip(names, (tokens, sequences, summed), strict=True))
    return {f"mismatch/sum_{name}": value for name, value in split_sum_rise(before, after).items()}


def write_rollouts(parts: Parts, step: int, version: int, rollouts: Rollouts, updated: Updated, sequences: Any) -> None:
    """Token dumps and transcripts, when due."""
    config = parts.config.rollout
    dump, transcript = _is_due(config.dump_every, step), _is_due(config.transcript_every, step)
    if not dump and not transcript:
        return
    decode = parts.tokenizer.decode
    written = StepRollouts(
        step=step,
        policy_version=version,
        sequences=sequences,
        rewards=rollouts.rewards.ravel().tolist(),
        truncated=[response.truncated for response in rollouts.all()],
        trainer_logprobs=updated.trainer_logprobs(),
        texts=[(decode(s.prompt), decode(s.response)) for s in sequences],
    )
    if dump:
        write_tokens(parts.config, written)
    if transcript:
        write_transcript(parts.config, written)


def evaluate_at_start(parts: Parts, timers: Timers) -> Row:
    """The evaluation of the policy that the run starts from, under names of its own, when asked for."""
    if parts.evaluate is None or not parts.config.eval.at_start:
        return {}
    with timers.phase("eval_at_start"):
        row = {f"{key}_at_start": value for key, value in parts.evaluate().items()}
    parts.engine.pop_metrics()
    return row


def one_step(
    parts: Parts, state: TrainState, progress: Progress, last_row: Row
) -> tuple[TrainState, Row, dict[str, np.ndarray]]:
    """Points 1 to 8 of step ``progress.step + 1``; advances ``progress``. Returns state, row and histograms."""
    timers, config = Timers(), parts.config
    step, version = progress.step + 1, progress.policy_version
    at_start = evaluate_at_start(parts, timers) if step == 1 else {}
    with timers.phase("rollout"):
        rollouts = roll_out(parts, step)
    row: Row = {"step": step} | at_start | rollout_row(rollouts, version) | parts.rewards.pop_metrics()
    watched = watched_value(config.schedule.metric, row, last_row)
    rate = parts.controller.step(watched, row["response_length/truncated_fraction"])
    sequences = training_sequences(rollouts, config, version)
    noise = _is_due(config.diagnosis.grad_noise_every, step)
    updated = parts.update(state, sequences, rate, seed=step_seed(config.run.seed, step), noise=noise)
    state = updated.state
    with timers.phase("publish"):
        progress.policy_version += 1
        is_published = published(parts, state, progress.policy_version)
    progress.step = step
    norm = updated.row["optimizer/grad_norm"]
    ema = progress.grad_norm_ema
    if any(sequence.in_loss for sequence in sequences) and np.isfinite(norm):
        progress.grad_norm_ema = norm if ema is None else GRAD_NORM_EMA_DECAY * ema + (1 - GRAD_NORM_EMA_DECAY) * norm
    row |= without_empty_buckets(updated.row)
    row |= sum_rise(row, progress.reference, config.diagnosis.reference_steps)
    row |= parts.controller.metrics() | {"optimizer/grad_norm_ema": progress.grad_norm_ema}
    row |= parts.engine.pop_metrics()
    write_rollouts(parts, step, version, rollouts, updated, sequences)
    due = (config.eval.every > 0 and step == config.run.steps) or _is_due(config.eval.every, step)
    if parts.evaluate is not None and due and is_published:
        with timers.phase("eval"), contextlib.suppress(StoppedWaitingError):
            row |= parts.evaluate()
        # What the engine spent on it is in time/eval_s; the engine's own figures are of the rollouts.
        parts.engine.pop_metrics()
    response_tokens = sum(response.length for response in rollouts.all())
    row |= timers.row
    row["time/step_s"] = timers.total()
    row["perf/response_tokens_per_s"] = response_tokens / timers.row["time/rollout_s"]
    return state, row, updated.histograms


def published(parts: Parts, state: TrainState, version: int) -> bool:
    """Publishes; False when the run was asked to stop and no server is there to take it."""
    try:
        parts.engine.publish(state.params, version)
    except StoppedWaitingError:
        return False
    return True


def host_state(parts: Parts, progress: Progress) -> dict[str, Any]:
    """The JSON part of a checkpoint."""
    return {
        "step": progress.step,
        "policy_version": progress.policy_version,
        "grad_norm_ema": progress.grad_norm_ema,
        "mismatch_reference": progress.reference,
        "guard": parts.guard.state_dict(),
        "data": parts.stream.state_dict(),
        "schedule": parts.controller.state_dict(),
        "policy": policy_record(parts.policy),
    }


def policy_record(policy: PolicyConfig) -> dict[str, Any]:
    """The policy's shape as JSON has it."""
    return json.loads(json.dumps(dataclasses.asdict(policy)))


def load_host_state(parts: Parts, host: dict[str, Any]) -> Progress:
    """Puts the parts where the checkpoint was taken. Raises ValueError when the policy was another function then."""
    now = policy_record(parts.policy)
    if differing := [
        f"{key} ({host['policy'].get(key)} there, {now[key]} now)" for key in now if host["policy"].get(key) != now[key]
    ]:
        raise ValueError(f"the checkpoint is of another model than {parts.config.model.path}: {', '.join(differing)}")
    parts.stream.load_state_dict(host["data"])
    parts.controller.load_state_dict(host["schedule"])
    parts.guard.load_state_dict(host["guard"])
    return Progress(int(host["step"]), int(host["policy_version"]), host["grad_norm_ema"], host["mismatch_reference"])


def check_guard(guard: Guard, row: Row) -> list[str]:
    """Prints what the guard warns of and returns what it stops at. Raises ConfigError for an unknown metric."""
    try:
        warnings, stops = guard.check(row)
    except ValueError as error:
        raise ConfigError(error) from error
    for line in warnings:
        print(f"\nwarning: guard: {line}", file=sys.stderr)
    return stops


def train(
    parts: Parts,
    state: TrainState,
    progress: Progress,
    record: Record,
    should_stop: Callable[[], bool] = lambda: False,
    last_row: Row | None = None,
) -> TrainState:
    """Runs to the last step, or until ``should_stop`` or the guard says so after a step; then the step is saved.

    When the engine stops waiting for servers, the step it waits in is given up and the last one saved.

    Args:
      parts: what the run is made of.
      state: device state at ``progress``; donated.
      progress: where the run stands; advanced in place.
      record: takes each step's row and histograms, in order.
      should_stop: asked after each step.
      last_row: the row of step ``progress.step``, for a schedule that watches a metric of the step before.

    Returns:
      The device state after the last step done.
    """
    config = parts.config
    row = last_row or {}
    if not published(parts, state, progress.policy_version):
        return state
    parts.engine.pop_metrics()
    with StepProfiler(config.run.profile_steps, Path(config.run.dir) / "profile") as profiler:
        while progress.step < config.run.steps:
            drawn_before = parts.stream.state_dict()
            try:
                with profiler.step(progress.step + 1):
                    state, row, histograms = one_step(parts, state, progress, row)
            except StoppedWaitingError:
                parts.stream.load_state_dict(drawn_before)
                if progress.step and parts.checkpointer.latest_step() != progress.step:
                    parts.checkpointer.save(progress.step, state, host_state(parts, progress))
                break
            record(row, histograms)
            progress.stopped_by = check_guard(parts.guard, row)
            stopping = should_stop() or bool(progress.stopped_by)
            if stopping or progress.step == config.run.steps or _is_due(config.checkpoint.every, progress.step):
                parts.checkpointer.save(progress.step, state, host_state(parts, progress))
            if config.checkpoint.keep_best and (accuracy := mean_accuracy(row)) is not None:
                parts.checkpointer.save_best(progress.step, accuracy, state, host_state(parts, progress))
            if stopping:
                break
    return state
