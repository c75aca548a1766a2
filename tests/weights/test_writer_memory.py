"""A writer of deltas needs memory for one version of the weights and a few tensors of the next one."""

import tracemalloc

import numpy as np

from rljax.weights.writer import PartWriter, whole_parts

COUNT, SIZE = 128, 2**15


def version(step):
    """Yields tensors of which one element in 64 changes with each step; nothing else keeps them."""
    for number in range(COUNT):
        tensor = np.full(SIZE, number, np.float32)
        tensor[::64] += step
        yield f"{number}", tensor


def test_the_next_version_replaces_the_last_one_by_tensors():
    writer = PartWriter(whole_parts)
    tracemalloc.start()
    try:
        writer.collect(version(0))
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        summary = writer.collect(version(1))
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert summary.changed == COUNT * SIZE // 64
    assert held < 1.1 * COUNT * SIZE * 4
    assert after < 1.2 * held
    assert peak < 1.5 * held
