"""The sizes that the embedded engine decodes with: they fit into memory, and need few compiled programs."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from rljax.policy.config import PolicyConfig
from rljax.policy.families import FAMILIES, blocks_of
from rljax.policy.mixers import StateArray
from rljax.sharding import num_parts

_DEVICE_SHARE = 0.7  # the share of a device's free memory that the cache may take
_HOST_SHARE = 0.25  # the share of the host's memory for the caches of devices that do not report their free memory
_SCORE_BYTES = 2**30  # the most bytes of one layer's float32 attention scores on each device while prompts are computed


CacheSpec = tuple[tuple[StateArray, ...], ...]
"""The descriptions of the arrays of a cache, in the structure of ``policy.model.States``."""


def cache_spec(config: PolicyConfig, rows: int, places: int, dtype: Any, cache_dtype: Any) -> CacheSpec:
    """Returns the descriptions of the arrays of a cache, ``rows`` rows of ``places`` tokens (``Mixer.state_spec``)."""
    periods = FAMILIES[config.family].periods(config)
    specs = (block.attention.state_spec(rows, places, dtype, cache_dtype) for block in blocks_of(config))
    return tuple(tuple(StateArray((periods, *s.shape), s.dtype, ("layers", *s.axes)) for s in spec) for spec in specs)


def cache_row_bytes(config: PolicyConfig, mesh: Mesh, places: int, dtype: Any, cache_dtype: Any) -> float:
    """Returns the bytes that one row of the cache takes on each device of ``mesh``, on average.

    The mesh splits the rows of the cache, and its heads where their number divides evenly. ``places`` is the number of
    tokens of a row. The dtypes are as in ``Mixer.state_spec``.
    """
    total = 0
    for shape, kept_in, axes in itertools.chain.from_iterable(cache_spec(config, 1, places, dtype, cache_dtype)):
        ways = [num_parts(mesh.shape, axis) for axis in axes]
        sizes = (size // n if size % n == 0 else size for size, n in zip(shape, ways, strict=True))
        total += math.prod(sizes) * jnp.dtype(kept_in).itemsize
    return total / num_parts(mesh.shape, "rows")


class DecodeSizes(NamedTuple):
    """The sizes of a batch in which a new response takes the slot of a finished one."""

    slots: int  # the number of responses that are decoded at once
    # The number of responses to one prompt that start together. It divides the responses to a prompt. A prompt is
    # computed once for each unit: between units its cache would take the memory of a response.
    unit: int
    group: int  # the number of units that start together once the first batch is full


def batch_sizes(rows: int, n: int, budget: int, ways: int) -> DecodeSizes:
    """Returns the sizes of the batch that decodes ``rows`` responses, ``n`` to a prompt.

    Memory has room for the cache of ``budget`` responses, and the mesh splits rows into ``ways`` parts. The slots are a
    multiple of ``ways``, because otherwise every device has all slots. So they may exceed a very small budget.
    """
    whole = -(-rows // ways) * ways
    most = max(1, budget // 8)
    unit = max(divisor for divisor in range(1, n + 1) if n % divisor == 0 and divisor <= most)
    step = math.lcm(unit, ways)
    slots = max(1, budget // step) * step
    if whole <= max(budget, slots):
        return DecodeSizes(whole, n, whole // n)
    return DecodeSizes(slots, unit, max(1, slots // (8 * unit)))


def padded_count(count: int, step_prompts: int) -> int:
    """Returns the number of prompts that a request for ``count`` prompts is padded to.

    It is the next power of two, or ``step_prompts`` if that is smaller. A request for ``step_prompts`` or more is not
    padded.
    """
    return max(count, min(step_prompts, 1 << (count - 1).bit_length()))


def cache_room(free: int | None, devices: int) -> float:
    """Returns the memory of one device that the cache may take (bytes).

    ``free`` is the free memory of the device (bytes). None: the device, such as a CPU, does not report it. Then the
    host's memory is divided equally among its ``devices``.
    """
    if free is not None:
        return _DEVICE_SHARE * free
    return _HOST_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / devices


def free_cache_room(mesh: Mesh) -> float:
    """Returns the smallest ``cache_room`` of each process's first device (bytes). All processes return the same."""
    devices = mesh.local_devices
    stats = devices[0].memory_stats() or {}
    free = stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
    room = cache_room(free, len(devices))
    if jax.process_count() > 1:
        room = float(multihost_utils.process_allgather(np.float64(room)).min())
    return room


def padded_rows(count: int) -> int:
    """Returns the number of rows that ``count`` turns are padded to: 1, 2, 3, 4, 6, 8, 12, 16 and so on."""
    power = 1 << (count - 1).bit_length()
    return 3 * power // 4 if count <= 3 * power // 4 else power


def repeats(prompts: Sequence[np.ndarray]) -> int:
    """Returns the number of equal prompts in each run of neighbours, or the greatest common divisor if runs differ."""
    return math.gcd(*(len(list(equal)) for _, equal in itertools.groupby(prompts, lambda ids: ids.tobytes())))


def padded_width(longest: int, first: int, places: int) -> int:
    """Returns the width that prompts of later turns are padded to (tokens).

    The width is ``first``, doubled until the ``longest`` prompt fits. It stays below ``places``, the tokens of a row of
    the cache, to leave room for a response.
    """
    while first < longest:
        first *= 2
    return min(first, places - 1)


def prefill_rows(config: PolicyConfig, width: int, ways: int) -> int:
    """Returns the most prompts of ``width`` tokens whose attention scores, split ``ways`` ways, fit into memory."""
    return max(1, _SCORE_BYTES * ways // (4 * config.num_heads * width * width))
