"""The users who may read a run's weights on the disk: their owner, a group that is named, or everybody."""

from __future__ import annotations

import grp
import os
from pathlib import Path

_MORE = {"owner": 0, "group": 0o050, "all": 0o055}  # the bits of a directory's mode besides the owner's


def check_readers(readable_by: str) -> None:
    """Raises ValueError unless ``readable_by`` is owner, all, or group:NAME."""
    kind, _, name = readable_by.partition(":")
    if kind not in _MORE or (kind == "group") != bool(name):
        raise ValueError(f"readable_by must be owner, group:NAME or all, got {readable_by!r}")


def let_read(path: Path, readable_by: str) -> None:
    """Lets exactly these users read a file, or a directory with all that it holds, whatever the umask is.

    ``readable_by`` has the form that :func:`check_readers` takes. Raises ValueError if this machine has no such group,
    and OSError if the owner is not in it.
    """
    kind, _, name = readable_by.partition(":")
    try:
        group = grp.getgrnam(name).gr_gid if kind == "group" else -1
    except KeyError:
        raise ValueError(f"publish.readable_by: this machine has no group {name!r}") from None
    for each in (*path.rglob("*"), path):
        if kind == "group":
            os.chown(each, -1, group)
        each.chmod((0o700 | _MORE[kind]) & (0o777 if each.is_dir() else 0o666))
