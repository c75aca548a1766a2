"""Pulls of one server process: a program of their own, so that the server goes on without a delay."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from rljax.distributed.ownership import claim, provably_dead
from rljax.weights.directory import memory
from rljax.weights.mirror import Mirror

MIRROR_DIR = "RLJAX_MIRROR_DIR"  # environment variable: where mirrors are, instead of in memory
_PREFIX = "rljax-mirror-"
_USERS = "users"


class Pulling:
    """Of the versions of one source into this machine's mirror of it.

    Attributes:
      source: where versions are pulled from.
      mirror: that all server processes of this machine share.
    """

    def __init__(self, source: str, run_tag: str) -> None:
        """Joins the mirror's users; mirrors whose users are all dead are removed. Raises OSError."""
        parent = Path(os.environ.get(MIRROR_DIR) or memory())
        _remove_abandoned(parent)
        self.source = source
        self.mirror = Mirror(parent / f"{_PREFIX}{hashlib.sha256(run_tag.encode()).hexdigest()[:16]}")
        users = self.mirror.root / _USERS
        users.mkdir(exist_ok=True)
        self._user = claim(users / f"{os.getpid()}.json")
        self._name = ""
        self._running: subprocess.Popen[str] | None = None
        self._done: dict[str, Any] = {}  # of the pull of that name, once it has ended

    def begin(self, name: str, *, keep_delta: bool = False) -> None:
        """Starts to pull the version ``name`` (``pull.pull``); one that goes on already is left to."""
        if self._name != name or self._running is None:
            self._stop()
            words = [sys.executable, "-m", "rljax.weights.pull", self.source, name, str(self.mirror.root)]
            words += ["--keep-delta"] * keep_delta
            self._running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self._name, self._done = name, {}

    def done(self, name: str) -> dict[str, Any] | None:
        """What the pull of ``name`` did (``pull.Pulled``) and its ``error`` ("": none); None while it goes on.

        It may be asked again: of several workers some are done before the others.
        """
        if self._name != name:
            return {"error": f"{name} is not being pulled", "seconds": 0.0}
        if self._running is not None:
            if self._running.poll() is None:
                return None
            printed, said = self._running.communicate()
            status, self._running = self._running.returncode, None
            failed = {"error": said.strip()[-500:] or f"the pull ended with status {status}", "seconds": 0.0}
            self._done = failed if status else {**json.loads(printed), "error": ""}
        return self._done

    def close(self) -> None:
        """Ends a pull that goes on, and leaves the mirror; the last one removes it. May be called twice."""
        self._stop()
        self._user.release()
        with contextlib.suppress(FileNotFoundError):  # another that left removed it
            if not any((self.mirror.root / _USERS).iterdir()):
                self.mirror.remove()

    def _stop(self) -> None:
        if self._running is not None:
            self._running.kill()
            self._running.communicate()
            self._running = None


def _remove_abandoned(parent: Path) -> None:
    """Removes mirrors of whose users each is provably dead."""
    for root in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            users = list((root / _USERS).iterdir())
            if users and all(provably_dead(user) for user in users):
                shutil.rmtree(root, ignore_errors=True)
