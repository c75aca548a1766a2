"""What trainer and server must agree on before the first rollout, asked rather than believed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rljax.errors import HandshakeError, ReplyError
from rljax.rollout.servers.backend import Expectation
from rljax.rollout.servers.client import ServerClient
from rljax.rollout.servers.handshake import (
    ask,
    check_protocol,
    dtype_differences,
    length_differences,
    server_info,
    shape_differences,
    weights_probe,
)
from rljax.rollout.servers.verify import TOP
from rljax.rollout.servers.vllm.server import BACKEND
from rljax.rollout.servers.wire import ServerInfo
from rljax.weights.directory import WeightDirectory

log = logging.getLogger(__name__)


def shake_hands(client: ServerClient, url: str, expected: Expectation, files: WeightDirectory) -> ServerInfo:
    """Checks one healthy server, readies its weight transfer, and returns its description of itself.

    Raises:
      HandshakeError: something differs.
      ServerGoneError: it stopped answering.
      ReplyError: it answers with what cannot be read.
    """
    development = "no weight-update endpoints: start the server with VLLM_SERVER_DEV_MODE=1 (launch/vllm_server.sh)"
    if ask(client, url, "GET", "/is_paused", development).get("is_paused"):
        if ask(client, url, "GET", "/is_sleeping", development).get("is_sleeping"):
            client.call(url, "POST", "/wake_up")
        log.info("%s was left paused; resuming it", url)
        client.call(url, "POST", "/resume")
    plugin = (
        "rljax's plugin is not in this server: install rljax beside vLLM and start it with "
        "--worker-extension-cls rljax.rollout.servers.vllm.plugin.WorkerExtension"
    )
    reply = ask(client, url, "POST", "/collective_rpc", plugin, {"method": "rljax_describe"})
    try:
        described = reply["results"][0]
        check_protocol(url, described)
        differing = _differences(described, expected)
    except (LookupError, TypeError, AttributeError) as error:
        raise ReplyError(f"{url}: /collective_rpc answered without {error}: {str(reply)[:300]}") from error
    if differing:
        raise HandshakeError("\n".join(f"{url}: {line}" for line in differing))
    unnamed = "it does not say which weights it holds: no /weight_info (launch/install_vllm.sh has a vLLM with it)"
    ask(client, url, "GET", "/weight_info", unnamed)
    client.find_route(url)
    info = server_info(url, described, "vllm")
    probe, unread = weights_probe(files)
    ask(client, url, "POST", "/init_weight_transfer_engine", unread, {"init_info": probe})
    return info


def _differences(described: Mapping[str, Any], expected: Expectation) -> list[str]:
    """One line for each thing that differs."""
    lines = []
    if described["backend"] != BACKEND:
        lines.append(
            f"the weight-transfer backend is {described['backend']!r}, expected {BACKEND!r} (--weight-transfer-config)"
        )
    lines += dtype_differences(described, expected, 'vLLM\'s --hf-overrides \'{"head_dtype": "float32"}\'')
    if expected.needs_routes and not described.get("returns_routes", False):
        lines.append(
            "it does not report the experts of its tokens (rollout.router_replay = r3): start it with "
            "--enable-return-routed-experts and VLLM_USE_V2_MODEL_RUNNER=1, which vLLM's build for a CPU does not have"
        )
    lines += shape_differences(described, expected)
    sizes = described.get("head_sizes")
    if sizes and described["shape"]["head_dim"] not in sizes:
        lines.append(
            f"head_dim is {described['shape']['head_dim']}; vLLM's attention on the server's device takes {sizes}"
        )
    lines += length_differences(described, expected)
    if described["max_logprobs"] < TOP:
        lines.append(f"max_logprobs is {described['max_logprobs']}, expected at least {TOP}")
    if described["default_sampling"]:
        lines.append(
            f"default sampling is not plain: {described['default_sampling']}; start with --generation-config vllm"
        )
    return lines
