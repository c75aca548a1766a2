"""No damage to a mirror, a file or a version may get through a pull."""

import contextlib
import json
import os

import msgspec
import numpy as np
import pytest
from weight_training import assert_holds

from rljax.weights.format import parse_version, write_version
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
@pytest.mark.parametrize("what", ["a bit", "the end", "all"])
def test_a_damaged_file_is_not_taken(training, mirror, what, kind):
    version = training.step()
    if kind == "delta":
        training.pull(mirror)
        version = training.step()
    (file,) = version.path.glob(f"*-{kind}.safetensors")
    {"a bit": flip, "the end": lambda file: os.truncate(file, file.stat().st_size - 1), "all": os.remove}[what](file)
    said = "does not have the recorded checksum" if what == "a bit" else "cannot be read"
    with pytest.raises((DamagedError, SourceError), match=said):
        training.pull(mirror)
    training.files.drop_old()


def test_a_tensor_that_is_not_what_the_trainer_says_is_named(tmp_path, mirror):
    """The files are sound, but were made of other weights than the checksums."""
    tensors = {"a": np.ones((4, 4), np.float32), "b": np.ones(3, np.float32)}
    sums = {name: array_checksum(array * (name == "a")) for name, array in tensors.items()}
    with contextlib.closing(WeightDirectory(PublishConfig("directory"), tmp_path)) as files:
        version = files.write(tensors.items(), 0, sums)
        with pytest.raises(DamagedError, match=r"1 tensor is other than in \S+: b"):
            pull(open_source(version.source), version.path.name, mirror)
    assert mirror.version is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"files": {"../x": {"bytes": 1, "xxh3": ""}}}, r"a file outside its directory: '\.\./x'"),
        ({"dense": []}, "neither a dense version nor a delta"),
        ({"tag": 3}, "Expected `str`, got `int`"),
        ({"name": "v00000009-9"}, "is of the version 'v00000009-9'"),
    ],
)
def test_a_version_file_that_cannot_be_used_is_refused(training, change, said):
    version = training.step()
    content = json.loads((version.path / "version.json").read_text())
    with pytest.raises(ValueError, match=said):
        parse_version(json.dumps(content | change).encode(), version.path.name)
    for region in ({"width": 47}, {"row": 1}, {"stride": 47}):
        first, *others = content["dense"]
        pieces = [first | {"region": first["region"] | region}, *others]
        with pytest.raises(ValueError, match=r"does not fit|are not the whole tensor"):
            parse_version(json.dumps(content | {"dense": pieces}).encode(), version.path.name)


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
