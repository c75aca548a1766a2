"""Prints the settings that a run would use.

rljax config [CONFIG.yaml] [--a.b value ...]            every setting, as YAML
rljax config --show KEY[,KEY...] [CONFIG.yaml] [...]    some values, one a line
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from rljax.errors import ConfigError
from rljax.run.config import Config
from rljax.run.config_file import config_to_yaml, dotted, resolve, suggest

PROG = "rljax config"
SHOW = "--show"


def main(argv: Sequence[str]) -> int:
    """Prints settings and returns the exit status."""
    words = list(argv)
    if words and words[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    keys: list[str] = []
    if words and words[0] == SHOW:
        if len(words) < 2:
            raise ConfigError(f"{SHOW} needs a key, as in: {PROG} {SHOW} rollout.dtype quickstart")
        keys, words = words[1].split(","), words[2:]
    file = words.pop(0) if words and not words[0].startswith("-") else None
    if file in dict(dotted(dataclasses.asdict(Config()))):
        raise ConfigError(f"{file} is a key: {PROG} {SHOW} {file} prints its value; rljax train --help all explains it")
    config = resolve(Config, file, words)
    print("\n".join(str(value_of(config, key)) for key in keys) if keys else config_to_yaml(config).rstrip("\n"))
    return 0


def value_of(config: Config, key: str) -> Any:
    """Returns the value of a dotted key, which may also be a property. Raises ConfigError for an unknown key."""
    try:
        return functools.reduce(getattr, key.split("."), config)
    except AttributeError as error:
        raise ConfigError(f"unknown key {key}; {suggest(key, dict(dotted(dataclasses.asdict(config))))}") from error
