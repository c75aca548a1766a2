"""The training loop.

Step t (1-based) is one rollout batch and at most one update:

1. take ``batch_size`` problems
2. roll out ``group_size`` responses each with the published policy; rewards are scored as responses land
3. observe the mean response length over all of them; the rate of this very update follows
4. advantages; groups whose rewards are all equal carry no loss, and with no group left the update is skipped
5. pack into rows
6. one compiled step: forward, mismatch, loss, backward, AdamW
7. publish the weights as policy version t
8. evaluate when due, then record one row
9. checkpoint when due

Everything random derives from (seed, step), so a resumed run repeats what an uninterrupted one would have done. The
loop knows neither which engine it talks to nor where its metrics go.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from rljax.algorithms.advantages import groups_with_signal, rloo
from rljax.config import Config
from rljax.config_loader import ConfigError
from rljax.data.prompts import PromptStream, Reward
from rljax.data.tokenizer import Tokenizer
from rljax.policy.config import PolicyConfig
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.types import Response, SamplingParams
from rljax.training.checkpoint import Checkpointer
from rljax.training.packing import PackedBatch, TrainSequence, max_micro_batches, pack, useful_fraction
from rljax.training.rate import RateController
from rljax.training.state import TrainState
from rljax.training.step import TrainStep

GRAD_NORM_EMA_DECAY = 0.9
Row = dict[str, Any]


@dataclass
class Parts:
    """What a run is made of; built by ``rljax.train``."""

    config: Config
    policy: PolicyConfig
    tx: optax.GradientTransformation
    engine: RolloutEngine
    stream: PromptStream
    tokenizer: Tokenizer
    reward: Reward
    evaluate: Callable[[], Row] | None
    step: TrainStep
    controller: RateController
    checkpointer: Checkpointer
    stop_token_ids: tuple[int, ...]


@dataclass
class Progress:
    """Where a run stands: what a checkpoint holds besides the device state and the parts' own states."""

    step: int = 0
    policy_version: int = 0
    grad_norm_ema: float | None = None


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
    rewards = np.zeros((len(problems), n), np.float32)
    for response in parts.engine.generate(prompts, n, sampling, seed=step_seed(config.run.seed, step)):
        i, j = response.prompt_index, response.sample_index
        slots[i][j] = response
        rewards[i, j] = parts.reward(problems[i], parts.tokenizer.decode(response.token_ids), response.truncated)
    landed = [[response for response in group if response is not None] for group in slots]
    if any(len(group) != n for group in landed):
        raise RuntimeError(f"the engine returned {sum(map(len, landed))} responses, expected {len(problems) * n}")
    return Rollouts(prompts, landed, rewards)


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


def training_sequences(rollouts: Rollouts) -> list[TrainSequence]:
    """Point 4: advantages, and which groups carry loss."""
    advantages = rloo(rollouts.rewards)
    signal = groups_with_signal(rollouts.rewards)
    return [
        TrainSequence(prompt, response.token_ids, response.logprobs, float(advantages[i, j]), bool(signal[i]))
        for i, (prompt, group) in enumerate(zip(rollouts.prompts, rollouts.responses, strict=True))
        for j, response in enumerate(group)
    ]


def batch_shape(config: Config) -> tuple[int, int, int]:
    """(micro-batches, rows, tokens) that hold any batch of the run."""
    tokens = config.packing.resolve_row_tokens(config.max_sequence_tokens)
    rows = config.packing.rows_per_micro_batch
    return max_micro_batches(config.num_sequences, config.max_sequence_tokens, tokens, rows), rows, tokens


def pack_batch(config: Config, sequences: Sequence[TrainSequence]) -> PackedBatch:
    """Point 5."""
    micro, rows, tokens = batch_shape(config)
    return pack(sequences, row_tokens=tokens, rows_per_micro_batch=rows, micro_batches=micro)


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def watched_value(metric: str, row: Row, last_row: Row) -> float:
    """The value for the surge tracker: this step's, else the last step's; not a number at step 1 and on gaps.

    Raises:
      ConfigError: after step 1, a metric that no row has.
    """
    if metric not in row and last_row and metric not in last_row:
        close = difflib.get_close_matches(metric, last_row, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"schedule.metric: no row has a metric {metric!r}{hint}")
    value = row.get(metric, last_row.get(metric))
    return float("nan") if value is None else float(value)


def one_step(parts: Parts, state: TrainState, progress: Progress, last_row: Row) -> tuple[TrainState, Row]:
    """Points 1 to 8 of step ``progress.step + 1``; advances ``progress``."""
    timers, config = Timers(), parts.config
    step = progress.step + 1
    with timers.phase("rollout"):
        rollouts = roll_out(parts, step)
    row: Row = {"step": step} | rollout_row(rollouts, progress.policy_version)
    metric = config.schedule.metric
    watched = watched_value(metric, row, last_row)
    rate = parts.controller.step(watched, row["response_length/truncated_fraction"])
    sequences = training_sequences(rollouts)
    with timers.phase("pack"):
        batch = pack_batch(config, sequences)
    with timers.phase("train"):
        has_loss = any(sequence.in_loss for sequence in sequences)
        state, metrics, _ = parts.step(state, batch, rate, has_loss)
        device_row = {name: value.item() for name, value in jax.device_get(metrics).items()}
    with timers.phase("publish"):
        progress.policy_version += 1
        parts.engine.publish(state.params, progress.policy_version)
    progress.step = step
    norm = device_row["optimizer/grad_norm"]
    ema = progress.grad_norm_ema
    if has_loss and np.isfinite(norm):
        progress.grad_norm_ema = norm if ema is None else GRAD_NORM_EMA_DECAY * ema + (1 - GRAD_NORM_EMA_DECAY) * norm
    row |= device_row | parts.controller.metrics() | {"optimizer/grad_norm_ema": progress.grad_norm_ema}
    row |= parts.engine.take_metrics()
    if parts.evaluate is not None and (step == config.run.steps or _is_due(config.eval.every, step)):
        with timers.phase("eval"):
            row |= parts.evaluate()
        # What the engine spent on it is in time/eval_s; the engine's own figures are of the rollouts.
        parts.engine.take_metrics()
    response_tokens = sum(response.length for response in rollouts.all())
    row |= timers.row
    row["time/step_s"] = timers.total()
    row["perf/response_tokens_per_s"] = response_tokens / timers.row["time/rollout_s"]
    row["perf/useful_token_fraction"] = useful_fraction(sequences, batch)
    return state, row


def host_state(parts: Parts, progress: Progress) -> dict[str, Any]:
    """The JSON part of a checkpoint."""
    return {
        "step": progress.step,
        "policy_version": progress.policy_version,
        "grad_norm_ema": progress.grad_norm_ema,
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
    return Progress(int(host["step"]), int(host["policy_version"]), host["grad_norm_ema"])


def train(
    parts: Parts,
    state: TrainState,
    progress: Progress,
    record: Callable[[Row], None],
    should_stop: Callable[[], bool] = lambda: False,
    last_row: Row | None = None,
) -> TrainState:
    """Runs to the last step, or until ``should_stop`` says so after a step; then the step is saved.

    Args:
      parts: what the run is made of.
      state: device state at ``progress``; donated.
      progress: where the run stands; advanced in place.
      record: takes each step's row, in order.
      should_stop: asked after each step.
      last_row: the row of step ``progress.step``, for a schedule that watches a metric of the step before.

    Returns:
      The device state after the last step done.
    """
    config = parts.config
    row = last_row or {}
    parts.engine.publish(state.params, progress.policy_version)
    parts.engine.take_metrics()
    while progress.step < config.run.steps:
        state, row = one_step(parts, state, progress, row)
        record(row)
        stopping = should_stop()
        if stopping or progress.step == config.run.steps or _is_due(config.checkpoint.every, progress.step):
            parts.checkpointer.save(progress.step, state, host_state(parts, progress))
        if stopping:
            break
    return state
