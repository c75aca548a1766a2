"""What trainer and SGLang server must agree on before the first rollout, asked rather than believed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rljax.errors import HandshakeError, ReplyError, ServerRefusedError
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
from rljax.rollout.servers.sglang.workers import ask_workers
from rljax.rollout.servers.wire import ServerInfo
from rljax.weights.directory import WeightDirectory

log = logging.getLogger(__name__)


def shake_hands(client: ServerClient, url: str, expected: Expectation, files: WeightDirectory) -> ServerInfo:
    """Checks one healthy server, shows it the run's weights, and returns its description of itself.

    Raises:
      HandshakeError: something differs.
      ServerGoneError: it stopped answering.
      ReplyError: it answers with what cannot be read.
    """
    try:
        client.call(url, "GET", "/ready")
    except ServerRefusedError as error:
        if error.status == 503:
            log.info("%s was left paused; it goes on", url)
            client.call(url, "POST", "/continue_generation", json={})
    plugin = "rljax's plugin is not in this server: install rljax beside SGLang (launch/install_sglang.sh)"
    described = _of_workers(client, url, plugin, "rljax_describe")[0]
    try:
        check_protocol(url, described)
        differing = _differences(described, expected)
    except (LookupError, TypeError, AttributeError) as error:
        raise ReplyError(f"{url}: /weights_checker answered without {error}: {str(described)[:300]}") from error
    if differing:
        raise HandshakeError("\n".join(f"{url}: {line}" for line in differing))
    ask(client, url, "GET", "/model_info", "it does not say which weights it holds")
    client.find_route(url)
    info = server_info(url, described, "sglang")
    probe, unread = weights_probe(files)
    _of_workers(client, url, unread, "rljax_show", probe)
    return info


def _of_workers(client: ServerClient, url: str, refusal: str, method: str, *arguments: Any) -> list[Any]:
    try:
        return ask_workers(client, url, method, *arguments)
    except ServerRefusedError as error:
        raise HandshakeError(str(error) if error.status == 401 else f"{url}: {refusal} ({error})") from error


def _differences(described: Mapping[str, Any], expected: Expectation) -> list[str]:
    """One line for each thing that differs."""
    lines = dtype_differences(described, expected, "SGLang's --enable-fp32-lm-head")
    if described["kv_cache_dtype"] != described["dtype"]:
        cache, dtype = described["kv_cache_dtype"], described["dtype"]
        lines.append(f"the key-value cache is {cache} and the model {dtype}: start it with --dtype {expected.dtype}")
    if not described["has_prefix_cache"]:
        lines.append("it has no prefix cache (--disable-radix-cache), so that stale keys and values could not show")
    if expected.needs_routes or described["shape"]["num_experts"]:
        lines.append("mixtures of experts are not supported with rollout.engine = sglang")
    lines += shape_differences(described, expected)
    lines += length_differences(described, expected)
    if described["preferred_sampling"]:
        lines.append(f"default sampling is not plain: {described['preferred_sampling']} (--preferred-sampling-params)")
    return lines
