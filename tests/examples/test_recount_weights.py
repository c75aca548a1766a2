"""Tests of examples/recount_weights.py, which shares no line with the package: sums, and words about workers."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from recount_weights import agrees, counted

from rljax.weights.sums import array_checksum, bits_of


def array(shape, dtype, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(dtype)


def sums_of(part):
    return list(dataclasses.astuple(array_checksum(part)))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("size", [1, 1000, 70_001])
def test_its_sums_are_the_packages(dtype, size):
    tensor = array(size, dtype)
    assert counted(bits_of(tensor)) == sums_of(tensor)


def test_workers_that_hold_parts_copies_or_something_else():
    keys = array((4, 8), np.float16)
    expected, (one, other) = counted(bits_of(keys).reshape(-1)), np.split(keys, 2)
    for parts in ((keys, keys), (one, other), (one, one, other, other)):
        assert agrees(expected, [sums_of(part) for part in parts])
    for parts in ((keys, keys[::-1]), (one, one), (one, other[:1])):
        assert not agrees(expected, [sums_of(part) for part in parts])
    assert not agrees(expected, [sums_of(keys), None])
