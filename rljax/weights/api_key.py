"""The key that servers ask for: read from a file that nobody but its owner can read, never from a command line.

Standard library only: vLLM's processes read it, too.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

KEY_FILE = "RLJAX_API_KEY_FILE"  # environment variable that names the file where no setting does


def find_key_file(path: str | os.PathLike[str] | None) -> Path | None:
    """``path``, else what ``$RLJAX_API_KEY_FILE`` names; None: no key is used."""
    named = path or os.environ.get(KEY_FILE)
    return Path(named).absolute() if named else None


def read_api_key(path: Path) -> str:
    """The key in ``path``: its text without white space at either end.

    Raises:
      ValueError: there is no such file, others than its owner may read it, or it holds no key; never quotes the file.
    """
    try:
        mode = path.stat().st_mode
        key = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ValueError(f"the key file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ValueError(f"the key file {path} holds more than plain ASCII") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ValueError(f"others may read the key file {path}: chmod 600 it")
    if len(key) < 16 or not key.isprintable() or " " in key:
        raise ValueError(f"the key file {path} must hold one word of at least 16 characters (openssl rand -hex 32)")
    return key
