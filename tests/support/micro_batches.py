"""Micro-batches whose rows are sequences, for tests of the loss."""

import numpy as np

from rljax.trainer.packing import PackedBatch


def micro_batch(tokens, mask, rollout_logprobs, advantages, **tops):
    """Returns a micro-batch [b, t]. The tokens in ``mask`` are sampled and in the loss.

    ``tops`` may have ``top_ids`` and ``top_logprobs`` [b, t, k], the sampler's likeliest tokens.
    """
    rows, places = np.indices(np.shape(tokens), np.int32)
    sides, none = np.broadcast_arrays(rollout_logprobs, advantages), np.zeros_like(rows)
    return PackedBatch(np.int32(tokens), none + 1, places, rows, mask, mask, *sides, none, None, None, **tops)
