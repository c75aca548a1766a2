"""Response lengths that surge, and the learning rates that the schedule must give for them."""

import numpy as np

from rljax.schedule import LengthTriggeredLR, SurgeConfig, SurgeTracker

# The tracker calls the surge at step 26, so the period is round(1.8 * 26) = 47.
LENGTHS = [1000.0] * 20 + [4000.0] * 80
RATES = np.float32([max(1e-6 * 0.5 ** (step // 47), 1e-7) for step in range(1, 101)])


def early_controller(init_value):
    """Returns a ``LengthTriggeredLR`` whose tracker can call a surge after 10 steps."""
    return LengthTriggeredLR(init_value, tracker=SurgeTracker(SurgeConfig(window=40, warmup=10)))
