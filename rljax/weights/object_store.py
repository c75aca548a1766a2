"""Versions in an object store: each of them in a folder of the run's, its ``version.json`` written last."""

from __future__ import annotations

from pathlib import Path

from rljax.weights.object_stores import open_store
from rljax.weights.version import VERSION_FILE


class StoreServed:
    """See ``versions.Served``. The URL is any that fsspec knows."""

    def __init__(self, root: Path, *, url: str) -> None:
        """``root``'s name is the run's folder under ``url``. Raises RuntimeError where nothing knows such URLs."""
        self.source = f"{url.rstrip('/')}/{root.name}"
        try:
            self._fs, self._folder = open_store(self.source)
        except Exception as error:
            raise RuntimeError(f"weights cannot be served from {url}: {error}") from error

    def add(self, directory: Path) -> None:
        """See ``versions.Served``: uploads a file, or the files of a version."""
        if directory.is_file():
            self._upload(directory, directory.name)
            return
        for path in sorted(directory.iterdir(), key=lambda path: path.name == VERSION_FILE):
            self._upload(path, f"{directory.name}/{path.name}")

    def remove(self, name: str) -> None:
        """See ``versions.Served``."""
        self._delete(f"{self._folder}/{name}")

    def close(self) -> None:
        """See ``versions.Served``: the run's folder is removed."""
        self._delete(self._folder)

    def _upload(self, path: Path, name: str) -> None:
        try:
            self._fs.put_file(str(path), f"{self._folder}/{name}")
        except Exception as error:
            raise OSError(f"{self.source}/{name} cannot be written: {error}") from error

    def _delete(self, path: str) -> None:
        if self._fs.exists(path):
            self._fs.rm(path, recursive=True)
