"""A reward that short responses can earn, too: it is 1 if the number of letters is odd.

It waits ``TEST_REWARD_S`` seconds, so that steps can be so long that a test can end them.
"""

import os
import time


def reward(problem, response, truncated):
    time.sleep(float(os.environ.get("TEST_REWARD_S", "0")))
    return float(len(response) % 2)
