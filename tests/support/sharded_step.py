"""A batch and an optimizer for one training step on several meshes."""

import functools

import numpy as np
import optax
from records import train_sequence

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.policy.config import PolicyConfig
from rljax.schedule import inject_learning_rate
from rljax.trainer.packing import max_micro_batches, pack

CONFIG = PolicyConfig(32, 32, 64, 2, 4, 2, 8, tie_word_embeddings=True, initializer_range=0.2)
ROW, ROWS, COUNT, LONGEST = 64, 8, 48, 30


# Normalised weights beside a KL penalty need sums over all rows before, within and after the micro-batches.
LOSS = LossConfig(kl="k3", kl_coefficient=0.1)
CORRECTION = CorrectionConfig(level="token", threshold=1.2, normalize=True)


def sequences(seed=0):
    rng = np.random.default_rng(seed)
    result = []
    for i in range(COUNT):
        p, r = int(rng.integers(2, 9)), int(rng.integers(1, 22))
        rollout, old, reference = (rng.normal(-3.0, 0.5, r).astype(np.float32) for _ in range(3))
        result.append(
            train_sequence(
                rng.integers(0, 32, p).astype(np.int32),
                rng.integers(0, 32, r).astype(np.int32),
                rollout,
                float(rng.normal()),
                i % 5 != 0,
                old_logprobs=old,
                reference_logprobs=reference,
            )
        )
    return result


def shape():
    return max_micro_batches(COUNT, LONGEST, ROW, ROWS), ROWS, ROW


def batch(seed=0):
    m, b, t = shape()
    return pack(sequences(seed), row_tokens=t, rows_per_micro_batch=b, micro_batches=m)


@functools.cache
def gradient_keeper():
    """Returns an optimizer whose state is the gradient itself."""
    return inject_learning_rate(lambda rate: optax.trace(decay=0.0), 1.0)
