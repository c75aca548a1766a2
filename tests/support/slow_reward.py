"""The reward of ``parity_reward``, after a wait of ``TEST_REWARD_S`` seconds.

The wait makes steps so long that a test can end them.
"""

import os
import time

import parity_reward


def reward(problem, response, truncated):
    time.sleep(float(os.environ.get("TEST_REWARD_S", "0")))
    return parity_reward.reward(problem, response, truncated)
