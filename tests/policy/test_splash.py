"""The TPU's kernel, interpreted on the CPU, has float64's values and gradients, and nothing leaks."""

import numpy as np
import pytest
from packed_rows import gradients, heads, reference, row

from rljax.policy.splash import splash_attention

pytestmark = pytest.mark.slow

SEGMENTS = np.stack([row(300, [100, 130, 1, 20]), row(300, [300])])


def interpreted(q, k, v, segments):
    return splash_attention(q, k, v, segments, block=128, interpret=True)


def test_values_and_gradients_are_those_of_float64():
    arrays = heads(SEGMENTS, head_dim=16)
    for x, expected in zip(gradients(interpreted, arrays, SEGMENTS), reference(*arrays, SEGMENTS), strict=True):
        np.testing.assert_allclose(x, expected, atol=1e-5, rtol=0)


def test_nothing_of_a_segment_reaches_another():
    arrays = heads(SEGMENTS, "bfloat16", head_dim=16)
    changed = (SEGMENTS == 2)[:, :, None, None]
    others = [np.where(changed, x * 3 + 1, x).astype(x.dtype) for x in arrays]
    before, after = (gradients(interpreted, x, SEGMENTS) for x in (arrays, others))
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x[SEGMENTS != 2], y[SEGMENTS != 2])
        assert not np.array_equal(x, y)


def test_blocks_that_share_no_segment_are_not_multiplied():
    # A product with not-a-number would not be a number, whatever its mask.
    segments = row(384, [128, 200])[None]
    q, k, v, d_out = heads(segments, head_dim=16)
    first = (segments == 1)[:, :, None, None]
    clean = gradients(interpreted, (q, k, v, d_out), segments)
    spoiled = [np.where(first, np.float32(np.nan), x) for x in (q, k, v)]
    for x, y in zip(gradients(interpreted, (*spoiled, d_out), segments), clean, strict=True):
        assert np.isnan(x[segments == 1]).any()
        np.testing.assert_array_equal(x[segments == 2], y[segments == 2])
