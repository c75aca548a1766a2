"""Clients of one vLLM server (real or a stand-in) that ask a given endpoint for rollouts."""

import contextlib

from rljax.rollout.servers.client import ServerClient
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.servers.vllm.server import ROLLOUTS


@contextlib.contextmanager
def opened(url, limits=None, route=ROLLOUTS, backend=None):
    """Opens the server at ``url`` for rollouts over ``route``, without a handshake."""
    with contextlib.closing(ServerClient([url], backend or VllmBackend(), limits)) as client:
        client.open(url, None)
        client.set_route(url, route)
        yield client
