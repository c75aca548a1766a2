"""A factor of the learning rate from the effective sample size of a batch (VCPO, arXiv 2602.17616).

The share of the sample size is (sum w)^2 / (n sum w^2) over the importance weights w of the n sequences of a batch. The
rate is multiplied by sqrt(min(1, share / base)). Here the share of the batch before decides, so that a step has one
rate, which is known before its update. The paper uses the share of the same batch.
"""

import math
from typing import Any

import numpy as np

from rljax.schedule.arguments import as_float, as_share


def effective_sample_share(log_weights: Any) -> float:
    """Returns the effective sample size of a batch as a share of its sequences, in (0, 1].

    Args:
      log_weights: The sum over each sequence of trainer minus rollout log-probability (nats), [n] and finite. It is not
        truncated: the result is computed in log space, where nothing overflows.

    Raises:
      ValueError: There is no sequence, or a number is not finite.
    """
    values = np.asarray(log_weights, np.float64).reshape(-1)
    if not values.size or not np.isfinite(values).all():
        raise ValueError(f"log_weights must be finite numbers, one for each sequence, got {values!r:.100}.")
    weights = np.exp(values - values.max())
    return float(weights.sum() ** 2 / (weights.size * (weights**2).sum()))


def sample_size_factor(share: Any, base: float = 1.0) -> float:
    """Returns the factor sqrt(min(1, share / base)) of the learning rate.

    Args:
      share: The effective sample size of the batch before, in [0, 1]: a number, or a scalar of numpy, jax or torch.
        None: there is no batch before, and the factor is 1. NaN: the weights could not be computed, and the factor is
        0.
      base: The share from which on the factor is 1, in (0, 1]. The paper has 1, and 0.55 for several turns.

    Raises:
      ValueError: An argument is out of range.
    """
    check_base(base)
    if share is None:
        return 1.0
    known = as_share("share", share)
    return 0.0 if math.isnan(known) else math.sqrt(min(1.0, max(known, 0.0) / base))


def check_base(base: float) -> None:
    """Raises ValueError if ``base`` is not in (0, 1]."""
    if not 0.0 < as_float("base", base) <= 1.0:
        raise ValueError(f"base must be in (0, 1], got base = {base}.")
