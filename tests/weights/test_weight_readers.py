"""Tests of who may read the weights of a run: their modes under every umask, and another user who tries."""

import contextlib
import grp
import os
import stat
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rljax.weights.publish_config import PublishConfig
from rljax.weights.store import WeightDirectory
from rljax.weights.sums import array_checksum
from rljax.weights.writer import PartWriter, whole_parts

OWN_GROUP = grp.getgrgid(os.getgid()).gr_name
MODES = {"owner": (0o700, 0o600), f"group:{OWN_GROUP}": (0o750, 0o640), "all": (0o755, 0o644)}


def publish(parent, store, readable_by):
    """Writes the probe and two versions, of which the second is a delta unless the store is shared."""
    writer = None if store == "shared" else PartWriter(whole_parts)
    files = WeightDirectory(PublishConfig(store=store, readable_by=readable_by), parent, writer=writer)
    files.probe()
    weights = np.arange(4096, dtype=np.float32)
    for version in range(2):
        files.write([("w", weights)], version, {"w": array_checksum(weights)})
        weights = weights.copy()
        weights[7] += 1
    return files


@pytest.mark.parametrize("umask", [0o000, 0o077])
@pytest.mark.parametrize("store", ["shared", "http"])
@pytest.mark.parametrize("readable_by", MODES)
def test_exactly_the_named_users_may_read(tmp_path, readable_by, store, umask):
    before = os.umask(umask)
    try:
        with contextlib.closing(publish(tmp_path, store, readable_by)) as files:
            found = {path: stat.S_IMODE(path.stat().st_mode) for path in (files.root, *files.root.rglob("*"))}
            for path, mode in found.items():
                assert mode == MODES[readable_by][not path.is_dir()], path
            names = " ".join(path.name for path in found)
            assert ("delta" in names) == (store != "shared")
            assert len(found) >= 8
    finally:
        os.umask(before)


def test_nobody_else_writes_into_an_unfinished_version(tmp_path):
    modes, weights = [], np.ones(4, np.float32)

    def tensors(root):
        modes.extend(stat.S_IMODE(path.stat().st_mode) for path in root.glob("v*"))
        yield "w", weights

    before = os.umask(0)
    try:
        with contextlib.closing(WeightDirectory(PublishConfig(readable_by="all"), tmp_path)) as files:
            files.write(tensors(files.root), 0, {"w": array_checksum(weights)})
    finally:
        os.umask(before)
    assert modes == [0o700]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize(("readable_by", "may_read"), [("owner", False), ("group:nogroup", True), ("all", True)])
def test_another_user(readable_by, may_read):
    """A process of the user nobody, whose only group is nogroup, reads the newest version, or cannot."""
    if "nogroup" not in {group.gr_name for group in grp.getgrall()}:
        pytest.skip("this machine has no group nogroup")
    as_nobody = {"user": 65534, "group": 65534, "extra_groups": []}
    with contextlib.closing(publish(Path("/dev/shm"), "shared", readable_by)) as files:
        for path in files.root.glob("v*/*"):
            done = subprocess.run(["cat", str(path)], **as_nobody, capture_output=True)
            assert (done.returncode == 0) == may_read, done.stderr
            assert done.stdout == (path.read_bytes() if may_read else b"")


def test_another_value_is_refused(tmp_path):
    for value in ("", "group", "group:", "everybody", "owner:me", "all:x", "Owner"):
        with pytest.raises(ValueError, match="readable_by must be owner, group:NAME or all, got"):
            PublishConfig(readable_by=value)
    with pytest.raises(ValueError, match=r"publish.readable_by: this machine has no group 'no-such-group'"):
        publish(tmp_path, "shared", "group:no-such-group")
    assert list(tmp_path.iterdir()) == []
