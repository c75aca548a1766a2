"""What a PNG shows, as far as a test can tell."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np


def coloured_share(path: Path) -> float:
    """Share of a picture's pixels that have a colour: curves do; axes, their words and empty panels are grey."""
    pixels = plt.imread(path)[..., :3]
    return float(np.mean(pixels.max(-1) - pixels.min(-1) > 0.2))
