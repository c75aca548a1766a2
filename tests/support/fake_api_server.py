"""A Kubernetes API server that knows a few objects and allows what a Role's rules allow."""

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit


class FakeApiServer:
    """A server that answers ``get`` and ``list`` over HTTPS on a free port of 127.0.0.1.

    Args:
      objects: The objects of the only namespace, by (API group, resource).
      allowed: The list of [API group, resource, verb] that the token permits.
      token: The bearer token that a caller must send.
      certificate: The PEM file with a key and a certificate for 127.0.0.1.
    """

    def __init__(
        self, objects: dict[tuple[str, str], list[Any]], allowed: list[list[str]], token: str, certificate: Path
    ):
        self.objects, self.allowed, self.token = objects, allowed, token
        self.asked: set[tuple[str, str, str]] = set()  # (API group, resource, verb)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, target: str, authorization: str | None) -> tuple[int, Any]:
        """Returns (status, body) for a path with its query.

        A path is, for example, /apis/batch/v1/namespaces/NAMESPACE/jobs/NAME.
        """
        scheme, _, token = (authorization or "").partition(" ")
        if (scheme.lower(), token) != ("bearer", self.token):
            return 401, _status("Unauthorized")
        parts = urlsplit(target)
        words = parts.path.strip("/").split("/")
        group, rest = ("", words[4:]) if words[0] == "api" else (words[1], words[5:])
        resource, name = rest[0], rest[1] if len(rest) > 1 else None
        verb = "get" if name else "list"
        self.asked.add((group, resource, verb))
        if [group, resource, verb] not in self.allowed:
            return 403, _status("Forbidden")
        found = self.objects.get((group, resource), [])
        for selector in parse_qs(parts.query).get("fieldSelector", []):
            path, _, wanted = selector.partition("=")
            found = [one for one in found if _field(one, path) == wanted]
        if name is None:
            return 200, {"apiVersion": "v1", "kind": "List", "metadata": {}, "items": found}
        named = [one for one in found if one["metadata"]["name"] == name]
        return (200, named[0]) if named else (404, _status("NotFound"))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = server.answer(self.path, self.headers["Authorization"])
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words: object) -> None:
                pass

        return Handler


def _status(reason: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": reason}


def _field(one: Any, path: str) -> Any:
    for key in path.split("."):
        one = one[key]
    return one
