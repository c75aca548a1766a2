"""A lock on every route of a server but ``/health``: of vLLM's by ``--middleware rljax.weights.middleware.RequireKey``.

vLLM's own ``--api-key`` guards /v1 and /inference and leaves the weight-update endpoints open. vLLM adds what
``--middleware`` names last, so that it comes before everything else. Standard library only.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from rljax.weights.api_key import KEY_FILE, read_api_key

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_BODY = b'{"error": "this server wants a key: Authorization: Bearer KEY"}'


class RequireKey:
    """ASGI middleware: 401 without the key that the file named by ``$RLJAX_API_KEY_FILE`` holds."""

    def __init__(self, app: App) -> None:
        """Reads the key once. Raises ValueError where there is none, so that the server does not start."""
        self._app = app
        self._expected = _digest(b"Bearer " + read_api_key(Path(os.environ.get(KEY_FILE, ""))).encode())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request, or the start and end of the server."""
        kind = scope["type"]
        if kind == "lifespan" or (kind == "http" and scope["path"] == "/health") or self._allows(scope):
            await self._app(scope, receive, send)
        elif kind == "http":
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_BODY)).encode())]
            headers.append((b"www-authenticate", b"Bearer"))
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _BODY})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _allows(self, scope: Message) -> bool:
        """Whether the request brings the key; hashes are compared, so that the time says nothing of its length."""
        given = [value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(_digest(given[0]), self._expected)


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
