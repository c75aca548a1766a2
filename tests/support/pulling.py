"""Pulls a version into a mirror, as a server of another machine would. Prints what was done, as JSON.

python pulling.py SOURCE VERSION MIRROR
"""

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rljax.weights.mirror import DamagedError, Mirror
from rljax.weights.pull import pull
from rljax.weights.source import SourceError, open_source

if __name__ == "__main__":
    url, name, root = sys.argv[1:]
    try:
        with contextlib.closing(open_source(url)) as source:
            print(json.dumps(asdict(pull(source, name, Mirror(Path(root))))))
    except (DamagedError, SourceError) as error:
        sys.exit(f"error: {error}")
