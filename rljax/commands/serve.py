"""Serves a model for rljax: waits for the server's health, prints its URL, and ends it with this program.

    rljax serve vllm MODEL --dtype float16 --port 8000 -- --gpu-memory-utilization 0.8
    rljax serve sglang MODEL --dtype bfloat16 -- --mem-fraction-static 0.8

It runs in the server's own environment, beside vLLM or SGLang. There it needs only the standard library and rljax,
installed with ``pip install --no-deps . zstandard xxhash numba`` in a checkout. Elsewhere it starts the server with
that environment's interpreter, in ``$RLJAX_VLLM_VENV`` or else in ``.venv-vllm`` of the checkout.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from rljax.errors import ConfigError, ServerFailedError
from rljax.rollout.kinds import engines_that, named_engines
from rljax.rollout.servers.process import Dtype, environment_python
from rljax.weights.access import find_key_file, make_own_key_file, private_address

log = logging.getLogger(__name__)

_LOOK_S = 0.5  # The time between two looks at the server or at the calling process (seconds).


def main(argv: Sequence[str]) -> int:
    """Serves until this program is interrupted or the server ends; returns the exit status."""
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__)
        print("rljax serve vllm --help lists the options.")
        return 0
    if not argv or argv[0] not in engines_that("serves"):
        raise ConfigError(f"expected a kind of server, {named_engines('serves')}, got {argv[0] if argv else 'nothing'}")
    server = importlib.import_module(f"rljax.rollout.servers.{argv[0]}.server")
    return serve(server, argv[1:])


def parse(kind: str, argv: Sequence[str]) -> dict[str, Any]:
    """Returns the options of the command line by name: those that are given, and this program's own with defaults."""
    parser = argparse.ArgumentParser(
        prog=f"rljax serve {kind.lower()}",
        description="Serves a model for rljax, on loopback unless --host says otherwise.",
        epilog=f"Further {kind} arguments come last, after --.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("model", help="The model directory, or a hub name.")
    python_help = f"The interpreter of {kind}'s environment (default: this one, or that of .venv-{kind.lower()})."
    parser.add_argument("--python", help=python_help)
    parser.add_argument("--dtype", choices=get_args(Dtype), help="The dtype that the trainer publishes.")
    head_help = "The dtype in which the LM head computes; model is --dtype."
    parser.add_argument("--head-dtype", choices=("model", "float32"), help=head_help)
    parser.add_argument("--host", help="The address to bind: of loopback (default), or a private one with a key.")
    key_help = "The file with the key that every route asks for; needed beyond loopback. Default: $RLJAX_API_KEY_FILE, "
    key_help += "or on loopback ~/.rljax.key, which is made and which rljax's other programs find."
    parser.add_argument("--api-key-file", type=Path, help=key_help)
    parser.add_argument("--port", type=int, help="The port; 0 takes a free one.")
    parser.add_argument("--max-model-len", type=int, help="The longest prompt plus response, in tokens.")
    parser.add_argument("--max-num-seqs", type=int, help="The most sequences that are decoded at once.")
    top_help = "The most log-probabilities that a request may ask for at each position (vLLM alone; 20, on a TPU 9)."
    parser.add_argument("--max-logprobs", type=int, help=top_help)
    invariant_help = "Whether the bits of a token do not depend on the batch around it (slower)."
    parser.add_argument("--batch-invariant", action="store_true", help=invariant_help)
    parser.add_argument("--log", dest="log_path", type=Path, help="The file for the server's output.")
    url_help = "The file that the URL is written to once the server is healthy."
    parser.add_argument("--url-file", type=Path, default=None, help=url_help)
    parser.add_argument("--timeout", type=float, default=600.0, help="The longest wait for health, in seconds.")
    end_help = "Whether the server ends with the calling process, and not at Ctrl-C."
    parser.add_argument("--follow-parent", action="store_true", default=False, help=end_help)
    end = argv.index("--") if "--" in argv else len(argv)
    return vars(parser.parse_args(argv[:end])) | {"extra_args": tuple(argv[end + 1 :])}


def serve(server: Any, argv: Sequence[str]) -> int:
    """Serves until this program is interrupted or terminated, or the server ends. Returns the exit status.

    It prints the URL of the server once the server is healthy. ``server`` is the module that starts this kind.
    """
    kind = server.CONFIG.kind
    logging.basicConfig(level=logging.INFO, format=f"{kind.lower()}_server: %(message)s")
    options = parse(kind, argv)
    url_file, timeout_s, follow_parent = (options.pop(name) for name in ("url_file", "timeout", "follow_parent"))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, lambda signum, frame: sys.exit(128 + signum))
    if follow_parent:
        # Ctrl-C reaches the whole terminal group; the caller may want the server until it has saved.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
    try:
        config = server.CONFIG(**_with_own_key(options))
        if not (options.get("python") or importlib.util.find_spec(kind.lower()) or shutil.which(kind.lower())):
            config = dataclasses.replace(config, python=str(environment_python(kind)))
        if url_file is not None:
            url_file.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError, ValueError) as error:
        log.error("%s", error)
        return 2
    try:
        with server.start(config, timeout_s) as process:
            log.info("healthy, %s, log %s", config.dtype, process.log_path)
            if url_file is not None:
                url_file.write_text(process.url + "\n")
            print(process.url, flush=True)
            while process.alive():
                time.sleep(_LOOK_S)
            log.error("the server ended; the end of %s:\n%s", process.log_path, process.log_tail())
            return 1
    except ServerFailedError as error:
        log.error("%s", error)
        return 1


def _end_after(parent: int) -> None:
    """Ends this program, as SIGTERM does, once the calling process ``parent`` has ended."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    log.info("the calling process has ended; stopping")
    os.kill(os.getpid(), signal.SIGTERM)


def _with_own_key(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options with the user's own key for a server on loopback, if no key is named."""
    if find_key_file(options.get("api_key_file")) or not private_address(options.get("host", "127.0.0.1")).is_loopback:
        return options
    try:
        return options | {"api_key_file": make_own_key_file()}
    except OSError as error:
        log.warning("the server asks for no key, so every user of this machine reaches it: %s", error)
        return options
