"""Fleets of servers (real or stand-ins) that are opened without a handshake, and single requests to a server."""

import contextlib

from rljax.rollout.servers.fleet import Fleet
from rljax.rollout.servers.requests import Ask, Group
from rljax.rollout.servers.vllm.client import GENERATE, VllmBackend
from rljax.rollout.servers.vllm.server import ROLLOUTS
from rljax.rollout.types import ClientLimits, RolloutConfig


def fleet_of(*urls, limits=None, backend=None, stop=None):
    config = RolloutConfig(urls=urls, limits=limits or ClientLimits())
    return Fleet(config, backend or VllmBackend(), stop=stop)


@contextlib.contextmanager
def opened(*urls, limits=None, route=ROLLOUTS, backend=None, version=None):
    """Opens the servers at ``urls`` for rollouts over ``route``, whose replies must name ``version``."""
    with contextlib.closing(fleet_of(*urls, limits=limits, backend=backend)) as fleet:
        for server in fleet.servers:
            server.route = route
            fleet.on_loop(server.open, version)
        yield fleet


def listed_asks(requests, group_size=1):
    """Returns requests as the fleet takes them. Every ``group_size`` successive ones have one prompt."""
    groups = [Group() for _ in range(0, len(requests), group_size)]
    return [
        Ask(divmod(number, group_size), f"response {number}", request, groups[number // group_size])
        for number, request in enumerate(requests)
    ]


def sampled(fleet, requests, vocab_size=None, metrics=None, group_size=1):
    """Returns the place and the completion of each request, in the order of their arrival."""
    return list(fleet.stream(lambda: listed_asks(requests, group_size), None, vocab_size, metrics))


def probes(fleet, requests, url=None):
    """Returns the completions of probes at the server ``url``, or at the only one."""
    return fleet.wait(fleet.server(url or fleet.urls[0]).sample(requests))


def call(url, method, path, *, kind=None, **content):
    """Sends one request of the control plane, and returns the reply's JSON object."""
    with opened(url, backend=kind, route=GENERATE) as fleet:
        return fleet.wait(fleet.servers[0].call(method, path, **content))


def quick(attempts=VllmBackend.attempts, wait_s=0.01):
    """Returns a kind of server with these attempts at a request, the first waits of which take ``wait_s``."""
    backend = VllmBackend()
    backend.attempts, backend.first_wait_s, backend.longest_wait_s = attempts, wait_s, 2 * wait_s
    return backend
