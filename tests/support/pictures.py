"""Measures what a PNG shows, as far as a test can tell."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np


def coloured_share(path: Path) -> float:
    """Returns the share of a picture's pixels that have a colour.

    Curves have a colour; axes, their words and empty panels are grey.
    """
    pixels = plt.imread(path)[..., :3]
    return float(np.mean(pixels.max(-1) - pixels.min(-1) > 0.2))
