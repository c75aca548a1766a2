"""The checksum of a numpy array."""

import numpy as np

from rljax.checksum import Checksum, checksum, mixed


def numpy_checksum(array: np.ndarray) -> Checksum:
    bits = np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}").astype(np.uint32).view(np.int32)
    return checksum(array.size, *(int(values.sum(dtype=np.int64)) for values in mixed(bits)))
