"""What the handshake with any kind of server asks and compares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rljax.errors import HandshakeError, ServerRefusedError
from rljax.rollout.servers.backend import Expectation
from rljax.rollout.servers.client import ServerClient
from rljax.rollout.servers.verify import probe_length, sharpening
from rljax.rollout.servers.wire import ServerInfo
from rljax.weights.directory import PROTOCOL, WeightDirectory


def ask(client: ServerClient, url: str, method: str, path: str, refusal: str, json: Any = None) -> dict[str, Any]:
    """The reply; a refusal is a HandshakeError that begins with what it means.

    Raises:
      HandshakeError: the server refuses.
      ServerGoneError: it does not answer.
    """
    try:
        return client.call(url, method, path, json=json)
    except ServerRefusedError as error:
        raise HandshakeError(str(error) if error.status == 401 else f"{url}: {refusal} ({error})") from error


def optional(client: ServerClient, url: str, method: str, path: str, **content: Any) -> dict[str, Any]:
    """The reply of an endpoint that a server may lack; empty when it does."""
    try:
        return client.call(url, method, path, **content)
    except ServerRefusedError:
        return {}


def server_info(url: str, described: Mapping[str, Any], kind: str) -> ServerInfo:
    """What the plugin of this kind of server says, as far as there is one."""
    return ServerInfo(
        url=url,
        version=str(described.get(kind, "")),
        dtype=str(described.get("dtype", "")),
        vocab_size=described.get("shape", {}).get("vocab_size"),
        max_model_len=described.get("max_model_len"),
        block_size=described.get("block_size"),
    )


def check_protocol(url: str, described: Mapping[str, Any]) -> None:
    """Raises HandshakeError where plugin and trainer are of versions that do not fit."""
    if described.get("protocol") != PROTOCOL:
        raise HandshakeError(f"{url}: the plugin speaks protocol {described.get('protocol')}, the trainer {PROTOCOL}")


def weights_probe(files: WeightDirectory) -> tuple[dict[str, Any], str]:
    """What shows a plugin where the run's weights will be, and what a refusal of it means."""
    path, text = files.probe()
    unread = f"the server cannot read the weight directory {files.root}; set transfer_dir to one that both see"
    if files.source:
        unread = f"the server's machine cannot read weights from {files.source}"
    return {"probe_path": str(path), "probe_text": text, "protocol": PROTOCOL, "source": files.source}, unread


def dtype_differences(described: Mapping[str, Any], expected: Expectation, head_option: str) -> list[str]:
    """One line for each dtype that differs, and for quantized weights; ``head_option``: the server's for its head."""
    lines = []
    if described["dtype"] != expected.dtype:
        lines.append(f"the dtype is {described['dtype']}, expected {expected.dtype} (rollout.dtype)")
    head = described.get("head_dtype", described["dtype"])
    both_plain = (head, expected.head_dtype) == (described["dtype"], expected.dtype)  # what differs was said above
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
    """One line for each size in which the models differ."""
    sizes = ((key, theirs, expected.hf_config.get(key)) for key, theirs in described["shape"].items())
    return [
        f"{key} is {theirs}, expected {wanted} (another model)"
        for key, theirs, wanted in sizes
        if None not in (wanted, theirs) and theirs != wanted
    ]


def length_differences(described: Mapping[str, Any], expected: Expectation) -> list[str]:
    """A line where the server has no room for the run's longest sequence, or for a probe of the verification."""
    probe = probe_length(described["block_size"]) + expected.verify.tokens
    longest = max(expected.max_tokens, probe)
    if described["max_model_len"] >= longest:
        return []
    why = "prompt plus response" if longest == expected.max_tokens else "the verification's probes"
    return [f"max_model_len is {described['max_model_len']}, expected at least {longest} for {why}"]


def check_logprobs(client: ServerClient, info: ServerInfo, hint: str) -> None:
    """Log-probabilities are those of the distribution sampled from: halving the temperature doubles their gaps.

    Args:
      client: to ask with.
      info: of the server; its vocabulary is known.
      hint: what to do about others.

    Raises:
      HandshakeError: they are not, or they are not finite.
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
