"""The toy's problems for runs in one process, counted and fingerprinted once: this takes as long as a tiny run."""

import copy
import dataclasses
import functools
from pathlib import Path

from rljax.data.prompts import TOYS
from rljax.run.build import load_problems
from rljax.run.config import Config, RunConfig


def load_once(config, tokenizer):
    """Returns what ``load_problems`` returns; the stream is a new copy at its first batch. Files are read each time."""
    return _load(config, _Equal(id(tokenizer), tokenizer))


def load_for_path(config, tokenizer):
    """Returns the same as ``load_once``. Tokenizers of equal files at ``model.path`` are equal."""
    files = [path for path in Path(config.model.path).iterdir() if path.suffix in {".json", ".jinja"}]
    return _load(config, _Equal(tuple((path.name, path.read_bytes()) for path in sorted(files)), tokenizer))


@dataclasses.dataclass(frozen=True)
class _Equal:
    key: object
    tokenizer: object = dataclasses.field(compare=False)


def _load(config, tokenizer):
    if not {config.data.task, *config.eval.datasets} <= TOYS.keys():
        return load_problems(config, tokenizer.tokenizer)
    loaded = _loaded(config.data, config.eval, config.run.seed, tokenizer)
    return dataclasses.replace(loaded, stream=copy.copy(loaded.stream))


@functools.cache
def _loaded(data, evaluation, seed, tokenizer):
    return load_problems(Config(run=RunConfig(seed=seed), data=data, eval=evaluation), tokenizer.tokenizer)
