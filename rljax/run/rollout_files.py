"""The files in ``rollouts/`` of a run: token dumps for the comparison tools, and transcripts to read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from rljax.data.tokenizer import Tokenizer
from rljax.distributed.files import write_whole
from rljax.run.config import Config
from rljax.run.sampling import Rollouts
from rljax.tokens import common_columns
from rljax.trainer.packing import TrainSequence
from rljax.trainer.update import TrainerValues

if TYPE_CHECKING:
    from rljax.record.token_dumps import ColumnSource

ROLLOUT, TRAINER = "rollout", "trainer"  # a dump's columns: the engine, and the trainer before the update


def write_rollouts(
    config: Config,
    step: int,
    policy_version: int,
    rollouts: Rollouts,
    sequences: Sequence[TrainSequence],
    trainer: Callable[[], TrainerValues],
    tokenizer: Tokenizer,
) -> None:
    """Writes a token dump and a transcript, at the steps of ``rollout.dump_every`` and ``rollout.transcript_every``.

    ``write_tokens`` describes the other arguments. ``trainer`` is here a function that fetches the numbers from the
    devices. It is called only if a file is written. The tokenizer writes the texts of the transcript.
    """
    wanted = config.rollout
    is_dump, is_transcript = (every > 0 and step % every == 0 for every in (wanted.dump_every, wanted.transcript_every))
    if not is_dump and not is_transcript:
        return
    values = trainer()
    if is_dump:
        write_tokens(config, step, policy_version, sequences, values)
    if is_transcript:
        _write_transcript(_path(config, step, "jsonl"), step, rollouts, sequences, values.logprobs, tokenizer)


def write_tokens(
    config: Config,
    step: int,
    policy_version: int,
    sequences: Sequence[TrainSequence],
    trainer: TrainerValues,
) -> None:
    """Writes the token dump ``rollouts/step_<step>.parquet`` with the columns ``rollout`` and ``trainer``.

    The header has under ``sampling`` the temperature and the length limit, and these settings where they are on:
    ``rollout.inject``, an 8-bit form of the engine's weights or cache, and the cuts of the sampling. Weights that a
    setting changes have a name of their own. Weights of an older version, or of several versions, have no name.

    Each response token has an advantage, the policy version that sampled it, and whether it is in the loss (1 or 0). It
    has the entropy of the trainer's distribution (nats) if ``trainer`` has it. The likeliest tokens are in the dump if
    the sequences have them; the trainer's are the sampler's tokens, sorted by the trainer's log-probabilities. If the
    sampling is cut, both columns are normalised over the tokens of the cut. Tokens that an environment wrote have no
    log-probability, and their ``turn`` is 0. ``policy_version`` and ``trainer`` are those before the update of this
    step.
    """
    from rljax.record.token_dumps import dump_of_responses, write_dump  # pyarrow, for few runs

    columns, settings = _sources(config, policy_version, any(s["staleness"].any() for s in sequences))
    names = common_columns(sequences)
    tops = [(s["top_ids"], s["top_logprobs"]) for s in sequences] if "top_ids" in names else []
    turns = [s.turns for s in sequences] if "turn" in names else []
    entropies = trainer.entropy and [_where_sampled(s, own) for s, own in zip(sequences, trainer.entropy, strict=True)]
    dump = dump_of_responses(
        [f"step{step}/{i}" for i in range(len(sequences))],
        [s.prompt for s in sequences],
        [s.response for s in sequences],
        {
            ROLLOUT: [_where_sampled(s, s["rollout_logprobs"]) for s in sequences],
            TRAINER: [_where_sampled(s, own) for s, own in zip(sequences, trainer.logprobs, strict=True)],
        },
        columns,
        settings,
        tops,
        {
            "advantage": [np.broadcast_to(s.advantage, len(s.response)) for s in sequences],
            "version": [policy_version - s["staleness"] for s in sequences],
            "in_loss": [np.full(len(s.response), float(s.in_loss)) for s in sequences],
            **({"turn": turns} if turns else {}),
            **({"entropy": entropies} if entropies else {}),
        },
        [s.sampled for s in sequences],
        {} if trainer.tops is None else {TRAINER: [*map(_in_order, (ids for ids, _ in tops), trainer.tops)]},
    )
    write_dump(_path(config, step, "parquet"), dump)


def _sources(config: Config, version: int, stale: bool) -> tuple[dict[str, ColumnSource], dict[str, Any]]:
    """Returns the source of each column of a dump, and the settings for its header under ``sampling``."""
    from rljax.record.token_dumps import ColumnSource

    rollout, trainer = config.rollout, f"jax {jax.__version__}"
    # The name stands for a hash: equal names mean equal weights.
    weights = f"{config.run.dir} version {version}"
    injected = rollout.inject.given
    changes = [f"{name} {injected[name]}" for name in ("weight_noise", "quantize", "dtype") if name in injected]
    forms = {name: getattr(rollout, name) for name in ("weight_quantization", "kv_cache_dtype")}
    eight_bits = {name: kind for name, kind in forms.items() if kind not in ("none", "auto")}
    changes += [f"{name} {kind}" for name, kind in eight_bits.items() if name == "weight_quantization"]
    sampler = f"{trainer} decode" if rollout.engine == "jax" else rollout.engine
    sampled = "" if stale else ", ".join([weights, *changes])  # weights of several versions have no one name
    temperature, form, cut = rollout.temperature, rollout.engine_form.label, rollout.is_cut
    cuts = {name: getattr(rollout, name) for name in ("top_k", "top_p", "min_p")} if cut else {}
    columns = {
        ROLLOUT: ColumnSource(sampler, rollout.dtype, sampled, temperature, form=form, cut=cut),
        TRAINER: ColumnSource(trainer, config.precision.compute_dtype, weights, temperature, cut=cut),
    }
    settings = {"temperature": temperature, "max_response_tokens": rollout.max_response_tokens} | eight_bits | cuts
    return columns, settings | ({"inject": injected} if injected else {})


def _in_order(ids: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorts the ids and log-probabilities [r, k] of each place, the likeliest token first."""
    order = np.argsort(-logprobs, axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(logprobs, order, axis=1)


def _write_transcript(
    path: Path,
    step: int,
    rollouts: Rollouts,
    sequences: Sequence[TrainSequence],
    trainer_logprobs: Sequence[np.ndarray],
    tokenizer: Tokenizer,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pairs = zip(rollouts.all(), rollouts.rewards.ravel(), strict=True)
    rows = [(row, reward) for response, reward in pairs for row in response.trained_rows]
    lines = []
    for sequence, (response, reward), logprobs in zip(sequences, rows, trainer_logprobs, strict=True):
        gap = np.asarray(logprobs, np.float64) - sequence["rollout_logprobs"]  # 0 at an environment's tokens
        worst = int(np.argmax(np.abs(gap))) if len(gap) else 0
        line = {
            "step": step,
            "prompt": tokenizer.decode(sequence.prompt),
            "response": tokenizer.decode(sequence.response),
            "reward": _number(reward),
            "advantage": float(sequence.advantage),
            "response_length": int(sequence.sampled.sum()),
            "truncated": bool(response.truncated),
            "logprob_abs_diff_mean": _number(np.abs(gap[sequence.sampled]).mean()),
            "log_ratio_sum": _number(gap.sum()),
            "worst_position": worst,
            "worst_log_ratio": _number(gap[worst]),
        }
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    write_whole(path, "".join(lines))


def _where_sampled(sequence: TrainSequence, values: np.ndarray) -> np.ndarray:
    """Returns the values [r] of a response, with NaN at the tokens that an environment wrote."""
    return np.where(sequence.sampled, values, np.nan)


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _path(config: Config, step: int, suffix: str) -> Path:
    return Path(config.run.dir) / "rollouts" / f"step_{step:06d}.{suffix}"
