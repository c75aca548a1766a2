"""A server in the foreground: its options, and serving until this program is interrupted or its caller ends."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, get_args

from rljax.errors import ServerFailedError
from rljax.rollout.servers.process import Dtype, ServerConfig, ServerProcess

log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=ServerConfig)


def parse(kind: str, argv: Sequence[str]) -> dict[str, Any]:
    """The options that were given, and the defaults of those that are no field of ``ServerConfig``."""
    parser = argparse.ArgumentParser(
        prog=f"{kind.lower()}_server",
        description="Serve a model for rljax, on loopback unless told otherwise.",
        epilog=f"further {kind} arguments come last, after --",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("model", help="model directory, or a hub name")
    parser.add_argument("--python", help=f"interpreter of {kind}'s environment")
    parser.add_argument("--dtype", choices=get_args(Dtype))
    parser.add_argument("--head-dtype", choices=("model", "float32"), help="in which the LM head computes")
    parser.add_argument("--host", help="address to bind: of loopback (default), or a private one with a key")
    parser.add_argument(
        "--api-key-file",
        type=Path,
        help="file with the key that every route asks for (default: $RLJAX_API_KEY_FILE; needed beyond loopback)",
    )
    parser.add_argument("--port", type=int, help="0 takes a free one")
    parser.add_argument("--max-model-len", type=int, help="prompt plus response, in tokens")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--log", dest="log_path", type=Path, help="file for the server's output")
    parser.add_argument("--url-file", type=Path, default=None, help="write the URL here once the server is healthy")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for health")
    parser.add_argument(
        "--follow-parent", action="store_true", default=False, help="end with the caller, not at Ctrl-C"
    )
    end = argv.index("--") if "--" in argv else len(argv)
    return vars(parser.parse_args(argv[:end])) | {"extra_args": tuple(argv[end + 1 :])}


def serve(
    make: Callable[..., Config], start: Callable[[Config, float], ServerProcess], kind: str, argv: Sequence[str]
) -> int:
    """Serves until interrupted, terminated, or the server ends; prints the URL on standard output.

    Args:
      make: the configuration of the kind, from the options.
      start: starts a server of it; it may take so many seconds.
      kind: of the server, for messages.
      argv: the options.

    Returns:
      The exit status.
    """
    logging.basicConfig(level=logging.INFO, format=f"{kind.lower()}_server: %(message)s")
    options = parse(kind, argv)
    url_file, timeout_s, follow_parent = (options.pop(name) for name in ("url_file", "timeout", "follow_parent"))
    parent = os.getppid()

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, leave)
    if follow_parent:
        # Ctrl-C reaches the whole terminal group; the caller may want the server until it has saved.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        config = make(**options)
    except ValueError as error:
        log.error("%s", error)
        return 2
    try:
        with start(config, timeout_s) as server:
            log.info("healthy, %s, log %s", config.dtype, server.log_path)
            if url_file is not None:
                url_file.write_text(server.url + "\n")
            print(server.url, flush=True)
            while server.alive():
                if follow_parent and os.getppid() != parent:
                    log.info("the calling process has ended; stopping")
                    return 0
                time.sleep(0.5)
            log.error("the server ended; the end of %s:\n%s", server.log_path, server.log_tail())
            return 1
    except ServerFailedError as error:
        log.error("%s", error)
        return 1
