"""The changes between two versions of a tensor are encoded and decoded bit for bit; invalid deltas are refused."""

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rljax.weights.delta import Delta, decode, encode


@given(st.data(), st.sampled_from([np.uint16, np.uint32]), st.integers(0, 300))
def test_a_delta_gives_the_new_bits_and_applied_twice_too(data, dtype, size):
    old = data.draw(arrays.arrays(dtype, size))
    new = np.where(data.draw(arrays.arrays(np.bool_, size)), old, data.draw(arrays.arrays(dtype, size)))
    delta = encode(old, new)
    places, values = decode(delta, size, np.dtype(dtype))
    assert delta.changed == int((old != new).sum())
    assert len(places) == (delta.changed if delta.gap_type else size)
    found = old.copy()
    for _ in range(2):
        found[places] = values
        np.testing.assert_array_equal(found, new)


@pytest.mark.parametrize(("gap", "kind"), [(255, "uint8"), (256, "uint16"), (65_535, "uint16"), (65_536, "uint32")])
def test_gaps_are_in_the_narrowest_integers(gap, kind):
    """Elements 0 and gap + 1 change: no element is before the first, and ``gap`` elements are before the second."""
    old = np.zeros(max(gap + 2, 8), np.uint16)
    new = old.copy()
    new[[0, gap + 1]] = 7
    delta = encode(old, new)
    assert (delta.changed, delta.gap_type) == (2, kind)
    assert decode(delta, old.size, np.dtype(np.uint16))[0].tolist() == [0, gap + 1]


def test_the_layout_by_hand():
    """For the values 0x1234 and 0x5678, the low bytes come first. More than a quarter is told as it is."""
    new = np.array([0, 0x1234, 0, 0, 0x5678, 0, 0, 0], np.uint16)
    delta = encode(np.zeros(8, np.uint16), new)
    unpacked = [zstandard.ZstdDecompressor().decompress(content) for content in (delta.gaps, delta.values)]
    assert unpacked == [bytes([1, 2]), bytes([0x34, 0x78, 0x12, 0x56])]
    for size, kind in ((4, "uint8"), (3, "")):
        delta = encode(np.zeros(size, np.uint16), new[:size])
        assert (delta.changed, delta.gap_type) == (1, kind)
    assert (delta.gaps, delta.values) == (b"", bytes([0, 0, 0x34, 0x12, 0, 0]))


def compressed(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


GOOD = Delta(2, "uint8", compressed(bytes([1, 2])), compressed(bytes(4)))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (GOOD._replace(gap_type="", values=bytes(9)), "9 bytes are not those of all 5 elements"),
        (GOOD._replace(gap_type="float64"), "gaps of the type 'float64'"),
        (GOOD._replace(gaps=b"not zstd"), "compressed content cannot be read"),
        (GOOD._replace(values=GOOD.values[:-2]), "compressed content cannot be read"),
        (GOOD._replace(changed=3), "compressed content is not of 3 bytes"),
        (GOOD._replace(values=compressed(bytes(2**20))), "compressed content is not of 4 bytes"),
        (GOOD._replace(gaps=compressed(bytes([1, 3]))), "a place is 5, the part has 5 elements"),
        (GOOD._replace(gaps=compressed(bytes([250, 250]))), "a gap is longer than the part"),
    ],
)
def test_what_is_no_delta_of_the_part_is_refused(bad, said):
    with pytest.raises(ValueError, match=said):
        decode(bad, 5, np.dtype(np.uint16))
