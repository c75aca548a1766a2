"""Engines that give log-probabilities to the sequences of a dump: ``jax:DTYPE``, ``hf:DTYPE``, ``dump:FILE#COLUMN``."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np

from rljax.compare.dump import ColumnSource, TokenDump
from rljax.compare.importers import read_tokens
from rljax.policy.config import read_config
from rljax.policy.hf import load_params
from rljax.policy.score import make_scorer

DTYPES = ("float32", "bfloat16", "float16")

_NONE = np.full(1, np.nan, np.float32)  # position 0 carries no log-probability

Score = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
"""Token ids of some sequences, int32 [t] each -> log-probabilities, float32 [t] each, NaN at position 0."""


def score_column(
    spec: str,
    dump: TokenDump,
    model: str | os.PathLike[str] | None = None,
    *,
    temperature: float = 1.0,
    batch_size: int = 8,
    progress: Callable[[int], object] = lambda count: None,
) -> tuple[list[np.ndarray], ColumnSource]:
    """A column of log-probabilities for the sequences of a dump.

    Args:
      spec: ``jax:DTYPE`` (this library's forward), ``hf:DTYPE`` (transformers on torch) or ``dump:FILE#COLUMN`` (from
        any file ``read_tokens`` reads; sequences go by their ids).
      dump: the sequences.
      model: Hugging Face directory; for the first two.
      temperature: of the distribution scored by the first two; positive.
      batch_size: sequences a forward.
      progress: called after each batch with the number of sequences in it.

    Returns:
      Float32 [t] for each sequence of ``dump`` (nats, NaN where there is none), and where they come from.

    Raises:
      ValueError: an unknown spec; a token id outside the vocabulary; sequences that are missing from FILE, or have
        other tokens there.
      OSError: a file is missing.
    """
    kind, argument = split_spec(spec)
    if kind == "dump":
        vectors, source = _read_column(argument, dump)
        progress(len(vectors))
        return vectors, source
    if model is None:
        raise ValueError(f"scorer {spec!r} needs a model directory")
    if not 0.0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    score = (_jax_scorer if kind == "jax" else _hf_scorer)(Path(model), argument, temperature, dump)
    vectors = []
    for start in range(0, len(dump.token_ids), batch_size):
        batch = dump.token_ids[start : start + batch_size]
        vectors += score(batch)
        progress(len(batch))
    engine = f"jax {jax.__version__}" if kind == "jax" else f"transformers {version('transformers')}"
    return vectors, ColumnSource(engine, argument, weights_hash(model), temperature)


def split_spec(spec: str) -> tuple[str, str]:
    """``("jax", "float32")`` of ``jax:float32``.

    Raises:
      ValueError: it is none of the forms ``score_column`` takes.
    """
    kind, _, argument = spec.partition(":")
    if (kind in ("jax", "hf") and argument in DTYPES) or (kind == "dump" and "#" in argument):
        return kind, argument
    known = f"jax:DTYPE, hf:DTYPE (DTYPE: {', '.join(DTYPES)}) or dump:FILE#COLUMN"
    raise ValueError(f"unknown scorer {spec!r}, expected {known}")


def weights_hash(directory: str | os.PathLike[str]) -> str:
    """``sha256:...`` over names, dtypes, shapes and bytes of the safetensors in a directory, however they are sharded.

    Raises:
      ValueError: there is no safetensors file.
    """
    tensors = sorted(
        (entry for path in Path(directory).glob("*.safetensors") for entry in _tensors(path)),
        key=lambda entry: entry[0],
    )
    if not tensors:
        raise ValueError(f"no *.safetensors in {os.fspath(directory)}")
    digest = hashlib.sha256()
    for name, kind, path, start, size in tensors:
        digest.update(f"{name} {kind}\n".encode())
        with path.open("rb") as file:
            file.seek(start)
            while size and (chunk := file.read(min(size, 1 << 24))):
                digest.update(chunk)
                size -= len(chunk)
    return f"sha256:{digest.hexdigest()}"


def _tensors(path: Path) -> Iterator[tuple[str, str, Path, int, int]]:
    """Name, dtype and shape, file, first byte and number of bytes of each tensor (the safetensors header is JSON)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            yield name, f"{entry['dtype']} {entry['shape']}", path, 8 + length + first, last - first


def _read_column(argument: str, dump: TokenDump) -> tuple[list[np.ndarray], ColumnSource]:
    file, _, column = argument.rpartition("#")
    other = read_tokens(file)
    if column not in other.logprobs:
        raise ValueError(f"{file} has no column {column!r}, but {sorted(other.logprobs)}")
    place = {name: i for i, name in enumerate(other.sequence_ids)}
    vectors = []
    for name, ids in zip(dump.sequence_ids, dump.token_ids, strict=True):
        if name not in place:
            raise ValueError(f"{file} has no sequence {name!r}")
        theirs = other.token_ids[place[name]]
        if not np.array_equal(theirs, ids):
            raise ValueError(f"{file}: sequence {name!r} {_first_difference(ids, theirs)}: tokenised differently")
        vectors.append(other.logprobs[column][place[name]])
    return vectors, other.sources[column]


def _first_difference(ids: np.ndarray, theirs: np.ndarray) -> str:
    shared = min(len(ids), len(theirs))
    unequal = np.flatnonzero(ids[:shared] != theirs[:shared])
    if len(unequal):
        return f"has token {theirs[unequal[0]]} at {unequal[0]}, expected {ids[unequal[0]]}"
    return f"has {len(theirs)} tokens, expected {len(ids)}"


def _check_vocabulary(dump: TokenDump, vocab_size: int) -> None:
    for name, ids in zip(dump.sequence_ids, dump.token_ids, strict=True):
        if ids.max() >= vocab_size:
            raise ValueError(
                f"sequence {name!r} has token {ids.max()}, but the model knows {vocab_size}: for another model?"
            )


def _jax_scorer(model: Path, dtype: str, temperature: float, dump: TokenDump) -> Score:
    config = read_config(model)
    _check_vocabulary(dump, config.vocab_size)
    params = load_params(model, config)
    score = make_scorer(config, dtype, temperature=temperature)

    def run(batch: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.concatenate([_NONE, vector[1:]]) for vector in score(params, batch)]

    return run


def _hf_scorer(directory: Path, dtype: str, temperature: float, dump: TokenDump) -> Score:
    try:  # here, because the other scorers do without torch
        import torch
        import transformers
    except ImportError as error:
        raise ValueError(f"an hf: scorer needs torch and transformers: {error}") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval().to(device)
    _check_vocabulary(dump, model.config.vocab_size)

    @torch.inference_mode()
    def run(batch: Sequence[np.ndarray]) -> list[np.ndarray]:
        shape = (len(batch), max(map(len, batch)))
        tokens, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        for i, ids in enumerate(batch):
            tokens[i, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
            mask[i, : len(ids)] = 1
        tokens = tokens.to(device)
        logits = model(input_ids=tokens, attention_mask=mask.to(device)).logits[:, :-1].float() / temperature
        found = torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, 1:, None])[..., 0].cpu().numpy()
        return [np.concatenate([_NONE, row[: len(ids) - 1]]) for row, ids in zip(found, batch, strict=True)]

    return run
