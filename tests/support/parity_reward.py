"""A reward that short responses can earn, too: it is 1 if the number of letters is odd.

If the file named by RLJAX_TEST_REWARDS exists, each reward appends a character to it and takes a fifth of a second.
"""

import os
import time
from pathlib import Path

COUNTED = Path(os.environ.get("RLJAX_TEST_REWARDS", ""))


def reward(problem, response, truncated):
    if COUNTED.is_file():
        with COUNTED.open("a") as file:
            file.write(".")
        time.sleep(0.2)
    return float(len(response) % 2)
