"""An argument parser whose mistakes print in one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

from rljax.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that raises a mistake as ConfigError, which ``run_cli`` prints in one line."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError with the message of argparse."""
        raise ConfigError(message)
