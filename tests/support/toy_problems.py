"""The toy's problems for runs in one process.

They are counted and fingerprinted once, because this takes as long as a tiny run.
"""

import copy
import dataclasses
import functools

from rljax.run.build import load_problems
from rljax.run.config import Config, RunConfig


def load_once(config, tokenizer):
    """Returns what ``load_problems`` returns; the stream is a new copy at its first batch.

    A file is read each time.
    """
    if config.data.path:
        return load_problems(config, tokenizer)
    loaded = _loaded(config.data, config.eval, config.run.seed, tokenizer)
    return dataclasses.replace(loaded, stream=copy.copy(loaded.stream))


@functools.cache
def _loaded(data, evaluation, seed, tokenizer):
    return load_problems(Config(run=RunConfig(seed=seed), data=data, eval=evaluation), tokenizer)
