"""The turns of a dump's tokens: from its values, or else from the holes of its masks."""

from __future__ import annotations

import numpy as np

from rljax.mismatch.turns import turns_of_mask
from rljax.record.token_dumps import TokenDump


def turns_of(dump: TokenDump) -> list[np.ndarray]:
    """Returns the number of the turn that sampled each token, int64 [t] for each sequence.

    The number is 0 at tokens outside the mask. If the dump has no values ``turn``, each contiguous stretch of sampled
    tokens is a turn. The list is empty if no response has several turns.
    """
    if "turn" in dump.values:
        pairs = zip(dump.values["turn"], dump.response_mask, strict=True)
        turns = [np.where(mask & (values > 0), values, 0).astype(np.int64) for values, mask in pairs]
    else:
        turns = [turns_of_mask(mask) for mask in dump.response_mask]
    return turns if any(each.max(initial=0) > 1 for each in turns) else []
