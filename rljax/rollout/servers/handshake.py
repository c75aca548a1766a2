"""The questions and comparisons that the handshake with every kind of server shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import numpy as np

from rljax.errors import HandshakeError, ServerRefusedError
from rljax.rollout.servers.backend import Expectation
from rljax.rollout.servers.client import ServerClient
from rljax.rollout.servers.verify import probe_length, sharpening
from rljax.rollout.servers.wire import ServerInfo
from rljax.weights.format import PROTOCOL
from rljax.weights.store import WeightDirectory


def ask(client: ServerClient, url: str, method: str, path: str, refusal: str, json: Any = None) -> dict[str, Any]:
    """Returns the reply of a server.

    Args:
      client: The client of the server.
      url: The server.
      method: The HTTP method.
      path: The path of the endpoint.
      refusal: The meaning of a refusal, for the message.
      json: The body of the request.

    Raises:
      HandshakeError: The server refuses.
      ServerGoneError: The server does not answer.
    """
    try:
        return client.call(url, method, path, json=json)
    except ServerRefusedError as error:
        raise refused(url, refusal, error) from error


def refused(url: str, refusal: str, error: ServerRefusedError) -> HandshakeError:
    """Returns the error of a handshake in which the server refused something, which meant ``refusal``."""
    return HandshakeError(str(error) if error.status == HTTPStatus.UNAUTHORIZED else f"{url}: {refusal} ({error})")


def ask_if_there(client: ServerClient, url: str, method: str, path: str, **content: Any) -> dict[str, Any]:
    """Returns the reply of an endpoint that a server may lack, and {} where it does."""
    try:
        return client.call(url, method, path, **content)
    except ServerRefusedError:
        return {}


def find_route(client: ServerClient, url: str, routes: Sequence[str]) -> None:
    """Sets the path that samples at ``url`` to the first of ``routes`` that the server has. Nothing is sampled.

    Raises:
      HandshakeError: The server has none of the paths.
      ServerGoneError: The server does not answer.
      ServerRefusedError: The server refuses a path for another reason than that it is not there.
    """
    for route in routes:
        client.set_route(url, route)
        try:
            client.call(url, "GET", route)
            return
        except ServerRefusedError as error:
            if error.status == HTTPStatus.METHOD_NOT_ALLOWED:  # it is there, and takes POST alone
                return
            if error.status != HTTPStatus.NOT_FOUND:
                raise
    raise HandshakeError(f"{url}: not there: {', '.join(routes)}")


def server_info(url: str, described: Mapping[str, Any], kind: str) -> ServerInfo:
    """Returns the server's description from the answer of rljax's plugin, which is {} where there is no plugin."""
    return ServerInfo(
        url=url,
        version=str(described.get(kind, "")),
        dtype=str(described.get("dtype", "")),
        vocab_size=described.get("shape", {}).get("vocab_size"),
        max_model_len=described.get("max_model_len"),
        block_size=described.get("block_size"),
    )


def check_protocol(url: str, described: Mapping[str, Any]) -> None:
    """Raises HandshakeError where plugin and trainer are of versions that do not fit together."""
    if described.get("protocol") != PROTOCOL:
        raise HandshakeError(
            f"{url}: the plugin speaks protocol {described.get('protocol')}, the trainer {PROTOCOL}: install the same "
            "rljax beside both"
        )


def weights_probe(files: WeightDirectory) -> tuple[dict[str, Any], str]:
    """Returns what shows a plugin where the run's weights will be, and what a refusal of it means."""
    path, text = files.probe()
    unread = f"the server cannot read the weight directory {files.root}; set transfer_dir to one that both see"
    if files.source:
        unread = f"the server's machine cannot read weights from {files.source}"
    return {"probe_path": str(path), "probe_text": text, "protocol": PROTOCOL, "source": files.source}, unread


def dtype_differences(described: Mapping[str, Any], expected: Expectation, head_option: str) -> list[str]:
    """Returns one line for each dtype that differs, and one for quantized weights.

    Args:
      described: The answer of the plugin.
      expected: The trainer's side.
      head_option: The server's own option for the dtype of its LM head.
    """
    lines = []
    if described["dtype"] != expected.dtype:
        lines.append(f"the dtype is {described['dtype']}, expected {expected.dtype} (rollout.dtype)")
    head = described.get("head_dtype", described["dtype"])
    both_plain = (head, expected.head_dtype) == (described["dtype"], expected.dtype)  # the line above says it
    if expected.head_dtype not in (None, head) and not both_plain:
        option = "with" if expected.head_dtype == "float32" else "without"
        lines.append(
            f"the LM head computes in {head}, expected {expected.head_dtype} (precision.lm_head_dtype): start {option} "
            f"--head-dtype float32, which is {head_option}"
        )
    if described["quantization"] is not None:
        lines.append(f"the weights are quantized ({described['quantization']}), expected none")
    return lines


def shape_differences(described: Mapping[str, Any], expected: Expectation) -> list[str]:
    """Returns one line for each size in which the models differ."""
    sizes = ((key, theirs, expected.hf_config.get(key)) for key, theirs in described["shape"].items())
    return [
        f"{key} is {theirs}, expected {wanted} (another model)"
        for key, theirs, wanted in sizes
        if None not in (wanted, theirs) and theirs != wanted
    ]


def length_differences(described: Mapping[str, Any], expected: Expectation) -> list[str]:
    """Returns a line where the server has no room for the run's longest sequence, or for a probe."""
    probe = probe_length(described["block_size"]) + expected.verify.tokens
    longest = max(expected.max_tokens, probe)
    if described["max_model_len"] >= longest:
        return []
    why = "prompt plus response" if longest == expected.max_tokens else "the verification's probes"
    return [f"max_model_len is {described['max_model_len']}, expected at least {longest} for {why}"]


def check_logprobs(client: ServerClient, info: ServerInfo, hint: str) -> None:
    """Checks that log-probabilities are of the distribution sampled from: half the temperature doubles their gaps.

    Args:
      client: The client of the server.
      info: The description of the server, whose vocabulary is known.
      hint: The remedy for other log-probabilities.

    Raises:
      HandshakeError: They are of another distribution, or not finite.
    """
    assert info.vocab_size is not None
    ratio = sharpening(client, info.url, info.vocab_size, 0.5)
    if np.isnan(ratio):
        raise HandshakeError(
            f"{info.url}: log-probabilities are not finite, or all equal: the server's weights are broken; restart it"
        )
    if not 1.8 < ratio < 2.2:
        raise HandshakeError(
            f"{info.url}: log-probabilities are not of the distribution sampled from (at temperature 0.5 their gaps "
            f"are {ratio:.2f} times those at 1, expected 2): {hint}"
        )
