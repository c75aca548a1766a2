"""The number formats in which servers hold weights, keys and values. They may round to 8 bits on purpose."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerForm:
    """The number formats in which servers hold weights and key-value cache. By default nothing is rounded.

    A server with other formats is refused. The weights are published in ``rollout.dtype``, and their bits are verified
    before the server rounds them.
    """

    weights: str = "none"
    """The quantization that the servers are started with, by vLLM's name, such as fp8_per_channel or
    int8_per_channel_weight_only. none: weights in ``rollout.dtype``."""
    kv_cache: str = "auto"
    """The dtype of the servers' cached keys and values, such as fp8_e4m3 or fp8_e5m2. auto: ``rollout.dtype``."""

    def __post_init__(self) -> None:
        for name in ("weights", "kv_cache"):
            if not re.fullmatch(r"[\w.-]+", getattr(self, name)):
                raise ValueError(f"{name} must be a name such as fp8_e4m3, got {getattr(self, name)!r}")

    @property
    def is_rounded(self) -> bool:
        """Whether weights or cache are rounded to another form than the rollout dtype."""
        return self != ServerForm()

    def __str__(self) -> str:
        return f"weights {self.weights}, key-value cache {self.kv_cache}"

    @property
    def label(self) -> str:
        """The name of the form in a comparison, such as "fp8_e5m2 cache"; empty if nothing is rounded."""
        plain = ServerForm()
        parts = [f"{self.weights} weights"] if self.weights != plain.weights else []
        parts += [f"{self.kv_cache} cache"] if self.kv_cache != plain.kv_cache else []
        return ", ".join(parts)
