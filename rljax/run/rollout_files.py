"""What a run leaves in ``rollouts/`` on request: token dumps for the comparison tools, and transcripts to read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rljax.compare.dump import ColumnSource, dump_of_responses, write_dump
from rljax.data.tokenizer import Tokenizer
from rljax.run.config import Config
from rljax.run.sampling import Rollouts
from rljax.trainer.packing import TrainSequence

ROLLOUT, TRAINER = "rollout", "trainer"
"""Names of a dump's columns: the engine's log-probabilities, and the trainer's before the update."""


@dataclasses.dataclass(frozen=True)
class StepRollouts:
    """The responses of a step, flat: [n] each.

    Attributes:
      step: 1-based.
      policy_version: of the trainer before this step's update.
      sequences: prompt, response, what the engine said of it.
      rewards: of each response.
      truncated: whether the length limit ended it.
      trainer_logprobs: float32 [r] of each.
      texts: (prompt, response) of each, decoded.
    """

    step: int
    policy_version: int
    sequences: Sequence[TrainSequence]
    rewards: Sequence[float]
    truncated: Sequence[bool]
    trainer_logprobs: Sequence[np.ndarray]
    texts: Sequence[tuple[str, str]]


def write_rollouts(
    config: Config,
    step: int,
    policy_version: int,
    rollouts: Rollouts,
    sequences: Sequence[TrainSequence],
    trainer_logprobs: Callable[[], list[np.ndarray]],
    tokenizer: Tokenizer,
) -> None:
    """Token dumps and transcripts, when ``rollout.dump_every`` and ``rollout.transcript_every`` say so.

    ``trainer_logprobs`` is called, which fetches them from the devices, only when something is written.
    """
    writers = [
        write
        for every, write in (
            (config.rollout.dump_every, write_tokens),
            (config.rollout.transcript_every, write_transcript),
        )
        if every > 0 and step % every == 0
    ]
    if not writers:
        return
    written = StepRollouts(
        step=step,
        policy_version=policy_version,
        sequences=sequences,
        rewards=rollouts.rewards.ravel().tolist(),
        truncated=[response.truncated for response in rollouts.all()],
        trainer_logprobs=trainer_logprobs(),
        texts=[(tokenizer.decode(s.prompt), tokenizer.decode(s.response)) for s in sequences],
    )
    for write in writers:
        write(config, written)


def write_tokens(config: Config, rollouts: StepRollouts) -> Path:
    """Writes ``rollouts/step_<step>.parquet`` (see ``compare.dump``) with the columns ``rollout`` and ``trainer``."""
    stale = any(s.staleness is not None and s.staleness.any() for s in rollouts.sequences)
    # A name in place of a hash: equal names are equal weights.
    weights = f"{config.run.dir} version {rollouts.policy_version}"
    temperature = config.rollout.temperature
    engine = {"jax": f"jax {jax.__version__} decode"}.get(config.rollout.engine, config.rollout.engine)
    dump = dump_of_responses(
        [f"step{rollouts.step}/{i}" for i in range(len(rollouts.sequences))],
        [s.prompt for s in rollouts.sequences],
        [s.response for s in rollouts.sequences],
        {ROLLOUT: [s.rollout_logprobs for s in rollouts.sequences], TRAINER: rollouts.trainer_logprobs},
        {
            ROLLOUT: ColumnSource(engine, config.rollout.dtype, "" if stale else weights, temperature),
            TRAINER: ColumnSource(f"jax {jax.__version__}", config.precision.compute_dtype, weights, temperature),
        },
        {"temperature": temperature, "max_response_tokens": config.rollout.max_response_tokens},
    )
    return write_dump(_path(config, rollouts.step, "parquet"), dump)


def write_transcript(config: Config, rollouts: StepRollouts) -> Path:
    """Writes ``rollouts/step_<step>.jsonl``: one response per line, with reward and log-ratios."""
    path = _path(config, rollouts.step, "jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(_line(rollouts, i), ensure_ascii=False) + "\n" for i in range(len(rollouts.sequences))]
    partial = path.with_suffix(".jsonl.part")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(path)
    return path


def _line(rollouts: StepRollouts, i: int) -> dict[str, Any]:
    sequence = rollouts.sequences[i]
    prompt, response = rollouts.texts[i]
    gap = np.asarray(rollouts.trainer_logprobs[i], np.float64) - sequence.rollout_logprobs
    worst = int(np.argmax(np.abs(gap))) if len(gap) else 0
    return {
        "step": rollouts.step,
        "prompt": prompt,
        "response": response,
        "reward": float(rollouts.rewards[i]),
        "advantage": float(sequence.advantage),
        "response_length": len(sequence.response),
        "truncated": bool(rollouts.truncated[i]),
        "logprob_abs_diff_mean": _number(np.abs(gap).mean()),
        "log_ratio_sum": _number(gap.sum()),
        "worst_position": worst,
        "worst_log_ratio": _number(gap[worst]),
    }


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _path(config: Config, step: int, suffix: str) -> Path:
    return Path(config.run.dir) / "rollouts" / f"step_{step:06d}.{suffix}"
