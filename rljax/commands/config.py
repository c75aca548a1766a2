"""Prints resolved settings of a run, one a line: what ``rljax.train`` would use.

rljax config rollout.dtype,max_engine_tokens configs/quickstart.yaml --rollout.dtype float32
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from rljax.errors import ConfigError
from rljax.run.config import Config
from rljax.run.config_file import load_config


def main(argv: Sequence[str]) -> int:
    """Prints the settings; returns the exit status."""
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if not argv or argv[0].startswith("-"):
        raise ConfigError("usage: rljax config KEY[,KEY...] [CONFIG.yaml] [--a.b value ...]")
    config = load_config(Config, argv[1:], prog="rljax config KEY", description=__doc__ or "")
    for key in argv[0].split(","):
        try:
            print(functools.reduce(getattr, key.split("."), config))
        except AttributeError as error:
            raise ConfigError(f"there is no setting {key}") from error
    return 0
