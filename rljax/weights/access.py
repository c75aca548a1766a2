"""The addresses to which our HTTP servers may bind, and the key that they ask for.

The key comes from a file that only its owner can read, never from a command line. This module imports only the
standard library, because the processes of vLLM and SGLang load it, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import stat
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

KEY_FILE = "RLJAX_API_KEY_FILE"
"""The environment variable that names the key file if no setting does."""

_OWN_KEY = "~/.rljax.key"

Message = MutableMapping[str, Any]
App = Callable[[Message, Any, Any], Awaitable[None]]

_UNAUTHORIZED = b'{"error": "this server wants a key: Authorization: Bearer KEY"}'
_WEB_PAGE = b'{"error": "requests of web pages (Origin) are refused"}'
_OTHER_HOST = b'{"error": "the Host of a request must be a loopback address or localhost, because there is no key"}'


def private_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Returns ``host``, an IP address or "localhost", as an address to which a server of weights may bind.

    Raises ValueError if ``host`` is neither, or if machines outside a private network may reach the address.
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ValueError(f"host must be an IP address of this machine, got {host!r}") from None
    address = getattr(address, "ipv4_mapped", None) or address
    private = address.is_private and not (address.is_unspecified or address.is_reserved)
    if not (address.is_loopback or private):
        raise ValueError(f"host must be a loopback or private address, got {host}: weights must not be public")
    return address


def own_address(host: str, leader: str) -> str:
    """Returns an address of this machine that all machines which reach ``host`` can reach. Nothing is sent to find it.

    ``host`` is a loopback or private address of the machine of process 0, which this machine reaches as ``leader``. On
    process 0's machine the result is ``host`` itself. On another machine it is the address of the interface through
    which ``host`` is reached.

    Raises ValueError if ``host`` is a loopback address of another machine, or if there is no route to ``host``.
    """
    is_loopback = private_address(host).is_loopback
    own, other = _route_to(leader if is_loopback else host)
    if own == other:
        return host
    if is_loopback:
        raise ValueError(
            f"publish.host = {host} is reached only on the machine of process 0, and this process runs on another "
            f"({own}): give a private address of process 0's machine, with a key"
        )
    return own


def _route_to(host: str) -> tuple[str, str]:
    """Returns the two addresses of a packet from this machine to ``host``; they are equal where ``host`` is here."""
    try:
        (family, kind, _, _, place), *_ = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0]), str(place[0])
    except OSError as error:
        raise ValueError(f"this machine has no route to {host}: {error}") from error


def http_url(host: str, port: int) -> str:
    """Returns the URL of an IP address or name and a port. IPv6 addresses get brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """Returns a socket that listens at an IP address, and its URL. Port 0 means a free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=128)
    return listening, http_url(*listening.getsockname()[:2])


def find_key_file(path: str | os.PathLike[str] | None) -> Path | None:
    """Returns ``path``, or else the file that ``$RLJAX_API_KEY_FILE`` names. Without either it returns None: no key."""
    named = path or os.environ.get(KEY_FILE)
    return Path(named).absolute() if named else None


def find_client_key_file(path: str | os.PathLike[str] | None) -> Path | None:
    """Returns the key file of a client: :func:`find_key_file`, or else ``~/.rljax.key`` if it exists, or else None."""
    own = Path(os.path.expanduser(_OWN_KEY))
    return find_key_file(path) or (own if own.exists() else None)


def make_own_key_file() -> Path:
    """Returns the user's own key file, ``~/.rljax.key``, and makes it if there is none. Raises OSError."""
    own = Path(os.path.expanduser(_OWN_KEY))
    if not own.exists():
        partial = own.with_name(f"{own.name}.{os.getpid()}")
        with open(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):  # another program was faster
            os.link(partial, own)
        partial.unlink()
    return own


def read_api_key(path: Path) -> str:
    """Returns the key in ``path``: its text without white space at either end.

    Raises ValueError if the file cannot be read, if others than its owner may read it, or if it holds no key. The
    message never quotes the file.
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


def serving_key(host: str, path: str | os.PathLike[str] | None, remedy: str) -> Path | None:
    """Returns the key file of a server that binds to ``host``: the result of :func:`find_key_file`, perhaps None.

    Raises ValueError if a server may not bind to ``host``, if the key cannot be used, or if other machines reach
    ``host`` and there is no key. ``remedy`` ends the message about a missing key.
    """
    address, key_file = private_address(host), find_key_file(path)
    if key_file is not None:
        read_api_key(key_file)
    elif not address.is_loopback:
        raise ValueError(f"host {host} is not loopback: others reach it, so {remedy}")
    return key_file


class RequireKey:
    """ASGI middleware that answers 401 to each request without the key, except to ``/health``.

    The key is in ``key_file``, or in the file that ``$RLJAX_API_KEY_FILE`` names. vLLM loads this class with
    ``--middleware rljax.weights.access.RequireKey``. vLLM adds this middleware last, so it sees each request before
    everything else. vLLM's own ``--api-key`` guards only /v1 and /inference, not the weight-update endpoints.
    """

    def __init__(self, app: App, key_file: Path | None = None) -> None:
        """Reads the key once. Raises ValueError if there is none, so that the server does not start."""
        self._app = app
        path = key_file or Path(os.environ.get(KEY_FILE, ""))
        self._expected = _digest(b"Bearer " + read_api_key(path).encode())

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        """Handles one request, or the start and end of the server."""
        kind = scope["type"]
        if kind == "lifespan" or (kind == "http" and scope["path"] == "/health") or self._allows(scope):
            await self._app(scope, receive, send)
        elif kind == "http":
            await _refuse(send, 401, _UNAUTHORIZED, [(b"www-authenticate", b"Bearer")])
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _allows(self, scope: Message) -> bool:
        """Returns whether the request has the key. Hashes are compared, so that the time reveals nothing of the key."""
        values = _values(scope, b"authorization")
        return len(values) == 1 and hmac.compare_digest(_digest(values[0]), self._expected)


class RefuseWebPages:
    """ASGI middleware that answers 403 to the requests that web pages make. It does not guard websockets.

    A browser sends such a request with the header ``Origin``. If the DNS name of the page points to this machine, there
    is no ``Origin``, but ``Host`` has that name.
    """

    def __init__(self, app: App, host: str | None) -> None:
        """Sets the address that the server is bound to, which ``Host`` may name. None: ``Host`` is not checked."""
        self._app, self._host = app, host

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        """Handles one request, or the start and end of the server."""
        if scope["type"] == "http" and _values(scope, b"origin"):
            await _refuse(send, 403, _WEB_PAGE)
        elif scope["type"] == "http" and self._host is not None and not self._names_us(_values(scope, b"host")):
            await _refuse(send, 403, _OTHER_HOST)
        else:
            await self._app(scope, receive, send)

    def _names_us(self, hosts: list[bytes]) -> bool:
        try:
            name = urlsplit(f"//{hosts[0].decode('ascii')}").hostname if len(hosts) == 1 else None
            return name in ("localhost", self._host) or ipaddress.ip_address(name or "").is_loopback
        except ValueError:
            return False


async def _refuse(send: Any, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    own = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body})


def _values(scope: Message, wanted: bytes) -> list[bytes]:
    return [value for name, value in scope.get("headers", ()) if name.lower() == wanted]


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
