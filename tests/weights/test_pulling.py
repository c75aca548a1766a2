"""Pulls that a server's workers start: what they did may be asked as often as it is wanted."""

import contextlib
import time

import numpy as np
import pytest

from rljax.weights.store import WeightDirectory
from rljax.weights.sums import array_checksum
from rljax.weights.worker import MIRROR_DIR, Pulls

TENSOR = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def files(tmp_path):
    with contextlib.closing(WeightDirectory(tmp_path / "weights")) as made:
        yield made


@pytest.fixture
def pulling(tmp_path, files, monkeypatch):
    (tmp_path / "mirrors").mkdir()
    monkeypatch.setenv(MIRROR_DIR, str(tmp_path / "mirrors"))
    with contextlib.closing(Pulls(files.source, files.run_tag)) as made:
        yield made


def ended(pulling, name):
    until = time.monotonic() + 60
    while (done := pulling.result(name)) is None:
        assert time.monotonic() < until
        time.sleep(0.02)
    return done


def test_what_a_pull_did_is_said_until_the_next_one(files, pulling):
    """A worker that is done is asked again while another of its server is not."""
    names = []
    for number in range(2):
        tensor = TENSOR + number
        version = files.write([("w", tensor)], number, {"w": array_checksum(tensor)})
        names.append(version.path.name)
        pulling.begin(names[-1])
        first = ended(pulling, names[-1])
        assert (first["error"], first["tag"]) == ("", version.tag)
        assert pulling.result(names[-1]) == first
    assert pulling.result(names[0])["error"] == f"{names[0]} is not being pulled"
    pulling.begin(names[1])
    assert ended(pulling, names[1])["bytes"] == 0


def test_a_pull_that_fails_says_why_and_may_be_begun_again(files, pulling):
    version = files.write([("w", TENSOR)], 0, {"w": array_checksum(TENSOR)})
    (version.path / "version.json").rename(version.path / "elsewhere.json")
    pulling.begin(version.path.name)
    failed = ended(pulling, version.path.name)
    assert "version.json cannot be read" in failed["error"]
    assert pulling.result(version.path.name) == failed
    (version.path / "elsewhere.json").rename(version.path / "version.json")
    pulling.begin(version.path.name)
    assert ended(pulling, version.path.name)["error"] == ""


def test_the_last_user_takes_the_mirror_with_it(files, pulling):
    root = pulling.mirror.root
    assert root.is_dir()
    pulling.close()
    assert not root.exists()
