"""Measures what a PNG shows, as far as a test can tell."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np


def coloured_share(path: Path) -> float:
    """Returns the share of pixels with a colour. Curves have one; axes, their words and empty panels are grey."""
    pixels = plt.imread(path)[..., :3]
    return float(np.mean(pixels.max(-1) - pixels.min(-1) > 0.2))
