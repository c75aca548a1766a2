"""Published weights as a server's worker finds them: in directories that a trainer has shown, and in mirrors.

Loaded inside servers, where there is no jax: it needs the standard library and ``rollout.weights`` alone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rljax.weights.directory import PROTOCOL
from rljax.weights.kept_delta import KeptDelta, kept
from rljax.weights.pulling import Pulling
from rljax.weights.source import open_source

_PROBE_S = 10.0  # longest to wait for a source that does not answer


class WorkerWeights:
    """What one worker may load: versions in directories that trainers have shown, or in this machine's mirror.

    Attributes:
      pulling: from the source that the last trainer has shown; None: there is none.
    """

    def __init__(self) -> None:
        self._roots: frozenset[Path] = frozenset()
        self.pulling: Pulling | None = None

    def show(self, probe_path: str, probe_text: str, protocol: int, source: str = "") -> None:
        """Checks protocol and probe file, which proves that both sides see one directory or source.

        Args:
          probe_path: a file that the trainer wrote; with a ``source`` it is read there by its name.
          probe_text: what it must contain.
          protocol: that the trainer speaks.
          source: from where weights are pulled; "": they are read in the probe's directory.

        Raises:
          ValueError: the protocols differ, or this process does not see the trainer's file.
        """
        if protocol != PROTOCOL:
            raise ValueError(f"rljax protocol: the trainer speaks {protocol}, this server {PROTOCOL}")
        probe = Path(probe_path)
        if source:
            with contextlib.closing(open_source(source, _PROBE_S)) as there:
                text = there.read(probe.name).decode()
            if text != probe_text:
                raise ValueError(f"{source} is not where this trainer's weights are")
            if self.pulling is None or self.pulling.source != source:
                if self.pulling is not None:
                    self.pulling.close()
                self.pulling = Pulling(source, probe_text)
            return
        if not probe.is_file() or probe.read_text() != probe_text:
            raise ValueError(f"this server does not see the trainer's file {probe}: one shared directory is needed")
        self._roots |= {probe.resolve().parent}

    def begin_pull(self, name: str, *, keep_delta: bool = False) -> None:
        """Begins to bring this machine's mirror to the version ``name``; the worker goes on. Raises ValueError."""
        self._pulling().begin(name, keep_delta=keep_delta)

    def pulled(self, name: str) -> dict[str, Any] | None:
        """What that pull did (``weights.pull.Pulled``), or its ``error``; None while it goes on. Raises ValueError."""
        return self._pulling().done(name)

    @contextlib.contextmanager
    def version(self, path: str, tag: str) -> Iterator[tuple[Path, list[str]]]:
        """The directory of a version and its safetensors files, which do not change within the ``with``.

        Args:
          path: the version's directory; "": this machine's mirror, which was brought to the version before.
          tag: that its manifest must bear.

        Raises:
          ValueError: the directory bears another tag, names a file outside itself, or lies in no directory that a
            trainer has shown.
        """
        if not path:
            mirror = self._pulling().mirror
            with mirror.locked(shared=True):
                yield mirror.root, _files(mirror.root, tag)
            return
        directory = Path(path).resolve()
        if directory.parent not in self._roots:
            raise ValueError(f"{directory} lies in no directory that a trainer has shown at its handshake")
        yield directory, _files(directory, tag)

    def mirrored(self) -> tuple[str, KeptDelta | None]:
        """Digest of the version in this machine's mirror, and the delta to it, where that was kept.

        Called within ``with version("", tag)``, so that neither changes. Raises ValueError.
        """
        mirror = self._pulling().mirror
        state = mirror.state
        return ("", None) if state is None else (state.digest, kept(mirror.root, state.name))

    def _pulling(self) -> Pulling:
        if self.pulling is None:
            raise ValueError("no trainer has shown from where weights are pulled")
        return self.pulling


def _files(directory: Path, tag: str) -> list[str]:
    manifest = json.loads((directory / "manifest.json").read_text())
    if manifest["tag"] != tag:
        raise ValueError(f"{directory} holds {manifest['tag']}, the update is for {tag}")
    outside = [file for file in manifest["files"] if Path(file).name != file or file == ".."]
    if outside:
        raise ValueError(f"{directory} names files outside itself: {outside[:3]}")
    return list(manifest["files"])


def described_shape(text: Any, head_dim: int) -> dict[str, Any]:
    """The sizes of a model that the handshake compares, by the names of ``config.json``.

    Args:
      text: its configuration, as transformers reads it.
      head_dim: of its attention.
    """
    return {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": getattr(text, "intermediate_size", None),
        "num_hidden_layers": text.num_hidden_layers,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", text.num_attention_heads),
        "head_dim": head_dim,
        "num_experts": getattr(text, "num_experts", None),
        "num_experts_per_tok": getattr(text, "num_experts_per_tok", None),
        "moe_intermediate_size": getattr(text, "moe_intermediate_size", None),
        "tie_word_embeddings": bool(getattr(text, "tie_word_embeddings", False)),
    }
