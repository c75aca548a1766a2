"""An HTTP server of a run's weight files, in byte ranges, for the machines of the servers that sample.

    python -m rljax.weights.server DIRECTORY --host 10.0.0.7 --port 8090

It prints its URL once it listens, and ends when its standard input does. Requests must bring the key of the file that
``$RLJAX_API_KEY_FILE`` names. Without such a file the address must be a loopback address.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from rljax.errors import caller_errors, run_cli
from rljax.weights.access import KEY_FILE, RefuseWebPages, RequireKey, listen, serving_key
from rljax.weights.http_limits import limited_server

_NAME = re.compile(r"(v\d+-\d+/)?[\w-]+\.(json|safetensors|txt)")


def _make_app(root: Path, host: str) -> Starlette:

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if not _NAME.fullmatch(name) or not (root / name).is_file():
            return PlainTextResponse("no such file\n", 404)
        return FileResponse(root / name, media_type="application/octet-stream")

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    has_key = bool(os.environ.get(KEY_FILE))
    guards = [Middleware(RefuseWebPages, host=None if has_key else host)]
    guards += [Middleware(RequireKey)] if has_key else []
    return Starlette(routes=[Route("/health", health), Route("/{name:path}", file)], middleware=guards)


def main(argv: Sequence[str]) -> int:
    """Runs the program."""
    parser = argparse.ArgumentParser(prog="python -m rljax.weights.server", description=__doc__)
    parser.add_argument("directory", type=Path, help="the directory with the run's weight files")
    host_help = "the address to bind to: a loopback address, or a private address if there is a key"
    parser.add_argument("--host", default="127.0.0.1", help=host_help)
    parser.add_argument("--port", type=int, default=0, help="the port to bind to; 0 takes a free port")
    wanted = parser.parse_args(argv)
    with caller_errors():
        serving_key(wanted.host, None, f"{KEY_FILE} must name a key file")
        app = _make_app(wanted.directory, wanted.host)
        listening, url = listen(wanted.host, wanted.port)
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    print(url, flush=True)
    limited_server(app, keep_alive_s=60).run(sockets=[listening])
    return 0


def _end_with_the_caller() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(run_cli(main))
