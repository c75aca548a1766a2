"""A local S3 server (moto's) in its own process, on a free port of 127.0.0.1."""

import contextlib
import subprocess
import sys
import urllib.request

import pytest
from waiting import free_port, until

BUCKET = "runs"
START_S = 60


class S3Server:
    """A server with one empty bucket. ``stop`` ends it, and may be called twice."""

    def __init__(self):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until(self._has_bucket, START_S, may_come=lambda: self._process.poll() is None, every_s=0.1)
        except AssertionError:
            self.stop()
            raise

    def _has_bucket(self):
        with contextlib.suppress(OSError):  # as URLError is
            request = urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT")
            with urllib.request.urlopen(request, timeout=5):
                return True

    @property
    def settings(self):
        keys = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_DEFAULT_REGION": "us-east-1"}
        return keys | {"AWS_ENDPOINT_URL": self.url}

    def stop(self):
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(timeout=30)


@pytest.fixture
def s3(monkeypatch):
    server = S3Server()
    for name, value in server.settings.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()
