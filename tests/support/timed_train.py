"""``python timed_train.py SECONDS WORDS`` trains like ``python -m rljax.train WORDS``, with another heartbeat."""

import sys

from rljax import train
from rljax.distributed.processes import start_processes
from rljax.errors import run_cli

if __name__ == "__main__":
    start_processes.__kwdefaults__["heartbeat_s"] = float(sys.argv.pop(1))
    sys.exit(run_cli(train.main))
