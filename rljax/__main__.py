"""The command ``rljax`` as ``python -m rljax``."""

import sys

from rljax.cli import cli

if __name__ == "__main__":
    sys.exit(cli())
