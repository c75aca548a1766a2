"""The program of the process that serves a run's weight files over HTTP, in byte ranges."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from rljax.distributed.answering import end_with_parent, tell_ready
from rljax.distributed.frames import Frames
from rljax.weights.access import read_api_key
from rljax.weights.http_limits import guarded_app, limited_server

_NAME = re.compile(r"(v\d+-\d+/)?[\w-]+\.(json|safetensors|txt)")


def serve(frames: Frames, root: Path, host: str, listening: int, key_file: Path | None) -> None:
    """Serves the files in ``root`` until the parent process ends. This is the program of a child process.

    ``listening`` is the descriptor of the socket, which is bound to ``host``. Every request must bring the key in
    ``key_file``, if there is one.
    """
    end_with_parent(frames)
    if key_file is not None:
        try:
            read_api_key(key_file)
        except ValueError as error:
            tell_ready(frames, str(error))
            return

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if not _NAME.fullmatch(name) or not (root / name).is_file():
            return PlainTextResponse("no such file\n", 404)
        return FileResponse(root / name, media_type="application/octet-stream")

    server = limited_server(guarded_app([Route("/{name:path}", file)], host, key_file), keep_alive_s=60)
    tell_ready(frames)
    server.run(sockets=[socket.socket(fileno=listening)])
