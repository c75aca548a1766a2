"""The address at which the trainer receives trajectories."""

from __future__ import annotations

from urllib.parse import urlsplit

from rljax.weights.access import private_address


def is_address(trajectories: str) -> bool:
    """Returns whether the value of ``rollout.trajectories`` is an address. Otherwise it is a directory."""
    return "://" in trajectories


def parse_address(url: str) -> tuple[str, int]:
    """Returns the host and the port of ``http://HOST:PORT``.

    Raises ValueError if ``url`` has another form, or machines outside a private network may reach the host.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"rollout.trajectories: {url!r} is not an address: {error}") from error
    if parts.scheme != "http" or not host or port is None or parts.path.strip("/") or parts.query or parts.username:
        raise ValueError(
            f"rollout.trajectories must be a directory or http://HOST:PORT (PORT 0: a free one), got {url}"
        )
    private_address(host)
    return host, port
