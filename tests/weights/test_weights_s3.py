"""Versions of the weights are in a real S3 server on this machine (tools/test_store.sh), and the program pulls them."""

import contextlib
import json
import shutil
import subprocess
import sys

import pytest
from toy_runs import ROOT
from weight_training import Training, assert_holds

from rljax.weights.mirror import Mirror
from rljax.weights.publish_config import PublishConfig

URL = "s3://runs/team/weights"
pytestmark = [pytest.mark.store, pytest.mark.timeout(300)]
pytest_plugins = ["s3_server"]


@pytest.fixture
def training(s3, tmp_path):
    made = Training(tmp_path / "trainer", anchor_every=3, publish=PublishConfig(URL))
    with contextlib.closing(made.files):
        yield made


def bucket():
    import fsspec

    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)


def pulled(training, root):
    """Pulls the newest version from the bucket with the program; returns the exit status and the result or error."""
    version = training.versions[-1]
    shutil.rmtree(version.path, ignore_errors=True)
    words = [sys.executable, "tests/support/pulling.py", version.source, version.path.name, str(root)]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    return ended.returncode, ended.stderr if ended.returncode else json.loads(ended.stdout)


def test_a_late_joiner_gets_the_anchor_and_the_deltas_since(training, tmp_path):
    for steps, deltas in ((3, 2), (4, 0), (6, 2)):
        while len(training.versions) < steps:
            training.step()
            training.files.drop_old()
        mirror = Mirror(tmp_path / f"mirror_{steps}")
        status, done = pulled(training, mirror.root)
        assert status == 0, done
        assert (done["dense"], done["deltas"], done["repaired"]) == (True, deltas, "")
        assert_holds(mirror, training)
        assert done["tag"] == training.versions[-1].tag
        kept = {name.rpartition("/")[2] for name in bucket().ls(training.files.source, detail=False)}
        assert kept == {version.path.name for version in training.versions[-1 - deltas :]}
    training.files.close()
    assert bucket().find(URL) == []


def test_a_server_that_is_gone_is_named_in_one_line(training, s3, tmp_path, monkeypatch):
    training.step()
    version = training.versions[-1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    status, said = pulled(training, tmp_path / "mirror")
    assert status == 1
    name = f"{version.source.removeprefix('s3://')}/{version.path.name}/version.json"
    assert said.startswith(f"error: {name} cannot be read: ")
    assert len(said.splitlines()) == 1
