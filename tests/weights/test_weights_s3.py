"""The program that pulls from a real S3 server (tools/test_store.sh); ``test_store_parts.py`` has its pulls."""

import contextlib
import subprocess
import sys

import numpy as np
import pytest
from toy_runs import ROOT

from rljax.weights.publish_config import PublishConfig
from rljax.weights.store import WeightDirectory
from rljax.weights.sums import array_checksum

URL = "s3://runs/team/weights"
pytestmark = [pytest.mark.store, pytest.mark.timeout(300)]
pytest_plugins = ["s3_server"]


def test_a_server_that_is_gone_is_named_in_one_line(s3, tmp_path, monkeypatch):
    files, array = WeightDirectory(PublishConfig(URL), tmp_path / "trainer"), np.ones(4, np.float32)
    with contextlib.closing(files), monkeypatch.context() as away:
        version = files.write([("w", array)], 0, {"w": array_checksum(array)})
        away.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        words = ["tests/support/pulling.py", version.source, version.path.name, str(tmp_path / "mirror")]
        ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ended.returncode == 1
    name = f"{version.source.removeprefix('s3://')}/{version.path.name}/version.json"
    assert ended.stderr.startswith(f"error: {name} cannot be read: ")
    assert len(ended.stderr.splitlines()) == 1
