"""Deltas are encoded and decoded bit for bit, and no damage to one, to a mirror or a version gets through a pull."""

import contextlib
import json
import os

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from weight_training import assert_holds

from rljax.weights.delta import Delta, decode, encode
from rljax.weights.format import parse_version, read_version, write_version
from rljax.weights.mirror import DamagedError
from rljax.weights.publish_config import PublishConfig
from rljax.weights.pull import pull
from rljax.weights.source import SourceError, open_source
from rljax.weights.store import WeightDirectory
from rljax.weights.sums import array_checksum, bits_of


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a bit": lambda mirror: flip(next(mirror.root.glob("*.safetensors"))),
    "a file": lambda mirror: next(mirror.root.glob("*.safetensors")).unlink(),
    # As if it was killed while it applied a delta.
    "no record": lambda mirror: (mirror.root / "version.json").unlink(),
    "record": lambda mirror: (mirror.root / "version.json").write_text('{"tag": 3'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_mirror_is_made_anew(training, mirror, damage):
    training.publish(mirror)
    DAMAGES[damage](mirror)
    done = training.publish(mirror)
    assert done.dense
    assert bool(done.repaired) == (damage in ("a bit", "a file"))
    assert_holds(mirror, training)


def test_a_delta_against_another_base_is_refused(training, mirror):
    """The record of the mirror says falsely which version the mirror holds."""
    training.publish(mirror)
    first = mirror.version
    training.publish(mirror)
    lie = msgspec.structs.replace(mirror.version, name=first.name, tag=first.tag, tensors=first.tensors)
    write_version(mirror.root, lie)
    training.files.drop_old()
    bits_of(training.tensors["embed"]).reshape(-1)[::5] ^= 1
    training.step()
    done = training.pull(mirror, training.versions[-1])
    assert "other than in" in done.repaired
    assert done.dense
    assert_holds(mirror, training)


@pytest.mark.parametrize("kind", ["dense", "delta"])
def test_a_damaged_file_is_not_taken(training, mirror, kind):
    version = training.step()
    if kind == "delta":
        training.pull(mirror)
        version = training.step()
    (file,) = version.path.glob(f"*-{kind}.safetensors")
    for damage, said in (
        (flip, "does not have the recorded checksum"),
        (lambda file: os.truncate(file, file.stat().st_size - 1), "cannot be read"),
        (os.remove, "cannot be read"),
    ):
        damage(file)
        with pytest.raises((DamagedError, SourceError), match=said):
            training.pull(mirror)


def test_a_tensor_that_is_not_what_the_trainer_says_is_named(tmp_path, mirror):
    """The files are sound, but were made of other weights than the checksums."""
    tensors = {"a": np.ones((4, 4), np.float32), "b": np.ones(3, np.float32)}
    sums = {name: array_checksum(array * (name == "a")) for name, array in tensors.items()}
    with contextlib.closing(WeightDirectory(PublishConfig("directory"), tmp_path)) as files:
        version = files.write(tensors.items(), 0, sums)
        with pytest.raises(DamagedError, match=r"1 tensor is other than in \S+: b"):
            pull(open_source(version.source), version.path.name, mirror)
    assert mirror.version is None


def test_a_file_without_a_header_is_damage(training, mirror):
    version = training.step()
    (file,) = version.path.glob("*-dense.safetensors")
    file.write_bytes(b"\x08" + bytes(7) + b"notjson!")
    with pytest.raises(DamagedError, match=f"{version.path.name} cannot be used: "):
        mirror.fill(read_version(version.path), {file.name: file})
    assert mirror.version is None


def test_a_version_file_that_cannot_be_used_is_refused(training):
    version = training.step()
    content = json.loads((version.path / "version.json").read_text())
    first, *others = content["dense"]
    regions = [first["region"] | change for change in ({"width": 47}, {"row": 1}, {"stride": 47})]
    for change, said in (
        ({"files": {"../x": {"bytes": 1, "xxh3": ""}}}, r"a file outside its directory: '\.\./x'"),
        ({"dense": []}, "neither a dense version nor a delta"),
        ({"tag": 3}, "Expected `str`, got `int`"),
        ({"name": "v00000009-9"}, "is of the version 'v00000009-9'"),
        *(
            ({"dense": [first | {"region": each}, *others]}, r"does not fit|are not the whole tensor")
            for each in regions
        ),
    ):
        with pytest.raises(ValueError, match=said):
            parse_version(json.dumps(content | change).encode(), version.path.name)


def test_a_write_that_breaks_off_is_not_the_base_of_the_next(training, mirror):
    """The writer took the tensors, but no version has them."""
    training.publish(mirror)

    def broken():
        for name, array in training.tensors.items():
            yield name, bits_of(bits_of(array) ^ 1).view(array.dtype)
        raise RuntimeError("a process was lost")

    with pytest.raises(RuntimeError, match="a process was lost"):
        training.files.write(broken(), 9, {})
    training.publish(mirror)
    assert_holds(mirror, training)


# ---- the changes between two versions of a tensor ----


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


def test_what_is_no_delta_of_the_part_is_refused():
    for bad, said in (
        (GOOD._replace(gap_type="", values=bytes(9)), "9 bytes are not those of all 5 elements"),
        (GOOD._replace(gap_type="float64"), "gaps of the type 'float64'"),
        (GOOD._replace(gaps=b"not zstd"), "compressed content cannot be read"),
        (GOOD._replace(values=GOOD.values[:-2]), "compressed content cannot be read"),
        (GOOD._replace(changed=3), "compressed content is not of 3 bytes"),
        (GOOD._replace(values=compressed(bytes(2**20))), "compressed content is not of 4 bytes"),
        (GOOD._replace(gaps=compressed(bytes([1, 3]))), "a place is 5, the part has 5 elements"),
        (GOOD._replace(gaps=compressed(bytes([250, 250]))), "a gap is longer than the part"),
    ):
        with pytest.raises(ValueError, match=said):
            decode(bad, 5, np.dtype(np.uint16))
