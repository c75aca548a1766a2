"""A proxy before a server on 127.0.0.1; it can cut connections and refuse them."""

from __future__ import annotations

import contextlib
import socket
import threading


class CuttingProxy:
    """A proxy that listens on a free port from the start.

    Attributes:
      url: The URL of the proxy.
      open: Whether the proxy accepts connections.
      cut_after: The number of bytes of an answer after which its connection is cut; None if it is never cut.
      passed: The number of bytes that came from the server.
      cuts: The number of connections that were cut.
    """

    def __init__(self, url: str, cut_after: int | None = None) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._server = (host, int(port))
        self.open, self.cut_after, self.passed, self.cuts = True, cut_after, 0, 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = None
                if self.open:
                    with contextlib.suppress(ConnectionRefusedError):
                        server = socket.create_connection(self._server)
                if server is not None:
                    for source, target, limited in ((client, server, False), (server, client, True)):
                        threading.Thread(target=self._forward, args=(source, target, limited), daemon=True).start()
                else:
                    client.close()

    def _forward(self, source: socket.socket, target: socket.socket, limited: bool) -> None:
        count = 0
        with contextlib.suppress(OSError):
            while content := source.recv(16_384):
                target.sendall(content)
                count += len(content)
                if limited:
                    self.passed += len(content)
                    if not self.open or (self.cut_after is not None and count >= self.cut_after):
                        self.cuts += 1
                        break
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
