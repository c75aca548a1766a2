"""The files in ``rollouts/`` of a run: token dumps for the comparison tools, and transcripts to read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rljax.data.tokenizer import Tokenizer
from rljax.distributed.files import write_whole
from rljax.record.token_dumps import ColumnSource, make_dump, write_dump
from rljax.rollout.kinds import can
from rljax.run.config import Config
from rljax.run.sampling import Rollouts
from rljax.tokens import COLUMNS, TOPS, common_columns
from rljax.trainer.packing import TrainSequence
from rljax.trainer.update import TrainerValues

ROLLOUT, TRAINER = "rollout", "trainer"  # names of a dump's columns: the engine's, and the trainer's before the update


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

    ``write_tokens`` describes the other arguments. Here ``trainer`` is a function that fetches the trainer's numbers
    from the devices. It is called only if a file is written. The tokenizer writes the texts of the transcript.
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
    config: Config, step: int, policy_version: int, sequences: Sequence[TrainSequence], trainer: TrainerValues
) -> None:
    """Writes the token dump ``rollouts/step_<step>.parquet`` with the columns ``rollout`` and ``trainer``.

    The header has under ``sampling`` the temperature and the length limit, and these settings where they are on:
    ``rollout.inject``, an 8-bit cache of the engine, and the cuts of the sampling. Weights that a setting
    changes have a name of their own. Weights of an older version, or of several versions, have no name.

    Each response token has an advantage, unless ``advantage.estimator`` is optimal_token. It has the policy version
    that sampled it, and whether it is in the loss (1 or 0). It has the entropy of the trainer's distribution (nats) if
    ``trainer`` has it. The likeliest tokens are in the dump if the sequences have them; the trainer's are the sampler's
    tokens, sorted by the trainer's log-probabilities. If the sampling is cut, both columns are normalised over the
    tokens of the cut. Tokens that an environment wrote have no log-probability, and their ``turn`` is 0.
    ``policy_version`` and ``trainer`` belong to the policy before the update of this step.
    """
    sources, settings = _sources(config, policy_version, any(s["staleness"].any() for s in sequences))
    names = common_columns(sequences)
    dumped = [name for name in names if COLUMNS[name].dump]
    columns = {COLUMNS[name].dump: [_of_sampler(s, name) for s in sequences] for name in dumped}
    columns[f"logprobs/{TRAINER}"] = list(map(_where_sampled, sequences, trainer.logprobs))
    if trainer.tops is not None:
        tops = list(map(_in_order, sequences, trainer.tops))
        columns |= {f"{name}/{TRAINER}": [pair[name] for pair in tops] for name in TOPS}
    if config.advantage.estimator != "optimal_token":  # only the update knows the tokens' advantages
        columns["values/advantage"] = [_of_response(s, np.full(len(s.response), s.advantage)) for s in sequences]
    columns["values/version"] = [_of_response(s, policy_version - s["staleness"]) for s in sequences]
    columns["values/in_loss"] = [_of_response(s, np.full(len(s.response), s.in_loss)) for s in sequences]
    if "turn" in names:
        columns["values/turn"] = [_of_response(s, s.turns) for s in sequences]
    if trainer.entropy:
        columns["values/entropy"] = list(map(_where_sampled, sequences, trainer.entropy))
    dump = make_dump(
        [f"step{step}/{i}" for i in range(len(sequences))],
        [s.ids for s in sequences],
        [np.concatenate([np.zeros(s.prompt_length, np.bool_), s.sampled]) for s in sequences],
        {},
        sources,
        settings,
        columns,
    )
    write_dump(_path(config, step, "parquet"), dump)


def _sources(config: Config, version: int, stale: bool) -> tuple[dict[str, ColumnSource], dict[str, Any]]:
    """Returns the source of each column of a dump, and the settings for its header under ``sampling``."""
    rollout, trainer = config.rollout, f"jax {jax.__version__}"
    # The name stands for a hash: equal names mean equal weights.
    weights = f"{config.run.dir} version {version}"
    injected = rollout.inject.given
    changes = [f"{name} {injected[name]}" for name in ("weight_noise", "quantize", "dtype") if name in injected]
    eight_bits = {"kv_cache_dtype": rollout.kv_cache_dtype} if rollout.kv_cache_dtype != "auto" else {}
    sampler = f"{trainer} decode" if can(rollout.engine, "decodes") else rollout.engine
    sampled = "" if stale else ", ".join([weights, *changes])  # weights of several versions have no one name
    temperature, form, cut = rollout.temperature, rollout.engine_form.label, rollout.is_cut
    cuts = {name: getattr(rollout, name) for name in ("top_k", "top_p", "min_p")} if cut else {}
    columns = {
        ROLLOUT: ColumnSource(sampler, rollout.dtype, sampled, temperature, form=form, cut=cut),
        TRAINER: ColumnSource(trainer, config.precision.compute_dtype, weights, temperature, cut=cut),
    }
    settings = {"temperature": temperature, "max_response_tokens": rollout.max_response_tokens} | eight_bits | cuts
    return columns, settings | ({"inject": injected} if injected else {})


def _in_order(sequence: TrainSequence, logprobs: np.ndarray) -> Mapping[str, np.ndarray]:
    """Returns the likeliest tokens and ``logprobs``, [r, k] each, sorted with the largest of ``logprobs`` first."""
    order = np.argsort(-logprobs, axis=1, kind="stable")
    pair = zip(TOPS, (sequence["top_ids"], logprobs), strict=True)
    return sequence.add({name: np.take_along_axis(array, order, axis=1) for name, array in pair}).columns


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


def _of_response(sequence: TrainSequence, values: np.ndarray) -> np.ndarray:
    """Returns the values [r] of a response as values of all tokens, float [t], with NaN at the prompt's."""
    return np.concatenate([np.full(sequence.prompt_length, np.nan, np.float32), values])


def _where_sampled(sequence: TrainSequence, values: np.ndarray) -> np.ndarray:
    """Returns the values [r] of a response as values of all tokens, with NaN at tokens that no policy sampled."""
    return _of_response(sequence, np.where(sequence.sampled, values, np.nan))


def _of_sampler(sequence: TrainSequence, name: str) -> np.ndarray:
    """Returns an array of the sampler as a column of a dump. Missing entries of its lists are filled."""
    return sequence.columns[name] if COLUMNS[name].axes else _where_sampled(sequence, sequence[name])


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _path(config: Config, step: int, suffix: str) -> Path:
    return Path(config.run.dir) / "rollouts" / f"step_{step:06d}.{suffix}"
