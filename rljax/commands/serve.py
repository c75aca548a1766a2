"""Serves a model for rljax: waits for the server's health, prints its URL, and ends it with this program.

    rljax serve vllm MODEL --dtype float16 --port 8000 -- --gpu-memory-utilization 0.8
    rljax serve sglang MODEL --dtype bfloat16 -- --mem-fraction-static 0.8

It runs in the server's own environment, beside vLLM or SGLang. There it needs only the standard library and rljax,
installed with ``pip install --no-deps rljax zstandard xxhash``.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from rljax.errors import ConfigError
from rljax.rollout.servers.foreground import serve

KINDS = ("vllm", "sglang")


def main(argv: Sequence[str]) -> int:
    """Serves until this program is interrupted or the server ends; returns the exit status."""
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__)
        print("rljax serve vllm --help lists the options.")
        return 0
    if not argv or argv[0] not in KINDS:
        raise ConfigError(f"expected a kind of server, vllm or sglang, got {argv[0] if argv else 'nothing'}")
    server = importlib.import_module(f"rljax.rollout.servers.{argv[0]}.server")
    return serve(server.ServerConfig, server.start, server.ServerConfig.kind, argv[1:])
