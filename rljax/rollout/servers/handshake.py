"""The handshake, which compares a server's settings with the trainer's: the part that all kinds of servers share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import numpy as np

from rljax.errors import HandshakeError, ServerRefusedError
from rljax.policy.rotary import BESIDE_SCALING, read_rope
from rljax.rollout.kinds import can, platform_differences
from rljax.rollout.servers.requests import Remote, ServerInfo
from rljax.rollout.servers.verify import probe_lengths, probe_tokens, sharpening
from rljax.rollout.types import RolloutConfig, ServerForm

# The names of ``ServerForm.kv_cache``, by the servers' names, if these differ.
_CACHES = {"fp8": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


@dataclass(frozen=True)
class Expectation:
    """The settings of the trainer that a server must fit."""

    config: RolloutConfig  # the settings of the run's rollouts
    hf_config: Mapping[str, Any]  # the policy's config.json
    max_tokens: int  # the longest prompt plus response that the run will ask for (tokens)
    head_dtype: str | None = None  # the dtype in which the server's LM head must compute, or None for any
    version_bytes: int = 0  # the size of one version of the weights (bytes); a mirror must have room for two

    @property
    def needs_routes(self) -> bool:
        """Whether the server must report the experts of each token."""
        return self.config.router_replay == "r3"

    @property
    def routes(self) -> tuple[int, int, int] | None:
        """The sizes (layers, experts of a token, experts) of the routes that the server must report, or None."""
        if not self.needs_routes:
            return None
        sizes = self.hf_config
        return sizes["num_hidden_layers"], sizes["num_experts_per_tok"], sizes["num_experts"]


@contextmanager
def refusals(url: str, meaning: str) -> Iterator[None]:
    """Turns a server's refusal in a ``with`` block into a HandshakeError that tells its ``meaning``."""
    try:
        yield
    except ServerRefusedError as error:
        text = str(error) if error.status == HTTPStatus.UNAUTHORIZED else f"{url}: {meaning} ({error})"
        raise HandshakeError(text) from error


async def ask_if_there(server: Remote, method: str, path: str, **content: Any) -> dict[str, Any]:
    """Returns the reply of an endpoint that a server may lack, or {} if the server refuses the request."""
    try:
        return await server.call(method, path, **content)
    except ServerRefusedError:
        return {}


def server_info(url: str, described: Mapping[str, Any], kind: str) -> ServerInfo:
    """Returns the facts in ``described``, the plugin's answer or {}. The server's version is under its key ``kind``."""
    return ServerInfo(
        url=url,
        version=str(described.get(kind, "")),
        platform=str(described.get("platform", "")),
        dtype=str(described.get("dtype", "")),
        vocab_size=described.get("shape", {}).get("vocab_size"),
        max_model_len=described.get("max_model_len"),
        block_size=described.get("block_size"),
        head_dtype=str(described.get("head_dtype", "")),
        form=described_form(described),
        is_broken=bool(described.get("is_broken")),
    )


def described_form(described: Mapping[str, Any]) -> ServerForm:
    """Returns the number formats of weights and cache in the plugin's answer. A format not named is the default."""
    cache = str(described.get("kv_cache_dtype") or "auto")
    plain = "auto" if cache == described.get("dtype") else cache
    return ServerForm(str(described.get("quantization") or "none"), _CACHES.get(cache, plain))


def form_differences(described: Mapping[str, Any], expected: Expectation) -> list[str]:
    """Returns a line with the remedy for each number format that does not fit, and if bits depend on the batch."""
    lines, form = [], described_form(described)
    for key, what, option in (("weights", "weights", "--quantization"), ("kv_cache", "cache", "--kv-cache-dtype")):
        theirs, wanted = getattr(form, key), getattr(expected.config.server_form, key)
        if theirs != wanted:
            plain = getattr(ServerForm(), key)
            other = f"without {option}" if wanted == plain else f"with {option} {wanted}"
            lines.append(
                f"the server's form of the {what} is {theirs}, expected {wanted}: set rollout.server_form.{key} = "
                f"{theirs}, or start the server {other}"
            )
    is_possible = can(expected.config.engine, "is_invariant", described.get("platform", ""))
    if expected.config.batch_invariant and is_possible and not described.get("batch_invariant"):
        lines.append("its bits depend on the batch (rollout.batch_invariant): start it with --batch-invariant")
    return lines


def state_differences(described: Mapping[str, Any], expected: Expectation) -> list[str]:
    """Returns a line for each fault of linear attention: the dtype of its state, and settings that fail on a CPU."""
    theirs, wanted = described.get("state_dtype"), expected.hf_config.get("mamba_ssm_dtype", "float32")
    if theirs is None:
        return []
    lines = []
    if theirs != wanted:
        remedy = f"start the server with --mamba-ssm-cache-dtype {wanted}"
        lines.append(f"the state of linear attention is {theirs}, expected {wanted} (mamba_ssm_dtype): {remedy}")
    if described.get("platform") == "cpu":
        if described["dtype"] == "float32":
            lines.append("on a CPU vLLM's linear attention ends the engine in float32: set rollout.dtype = bfloat16")
        if described.get("state_cache", "none") != "none":
            remedy = "start the server with --no-enable-prefix-caching --no-enable-chunked-prefill"
            lines.append(f"on a CPU a seeded prompt that is computed in parts ends vLLM's engine: {remedy}")
    return lines


def common_differences(described: Mapping[str, Any], expected: Expectation, head_option: str) -> list[str]:
    """Returns one line for each dtype, number format, size and length of a server that does not fit ``expected``.

    ``described`` is the answer of rljax's plugin. ``head_option`` names the server's own option for a float32 LM head.
    """
    dtype, config, platform = described["dtype"], expected.config, described.get("platform", "")
    lines = platform_differences(config, platform)
    if dtype != config.dtype:
        lines.append(f"the dtype is {dtype}, expected {config.dtype} (rollout.dtype)")
    head = described.get("head_dtype", dtype)
    both_plain = (head, expected.head_dtype) == (dtype, config.dtype)  # the line above says it
    if expected.head_dtype not in (None, head) and not both_plain:
        option = "with" if expected.head_dtype == "float32" else "without"
        remedy = f"start {option} --head-dtype float32, which is {head_option}"
        if not can(config.engine, "widens_head", platform):
            remedy = f"a {platform.upper()} has no other head; set precision.lm_head_dtype = compute"
        lines.append(
            f"the LM head computes in {head}, expected {expected.head_dtype} (precision.lm_head_dtype): {remedy}"
        )
    lines += form_differences(described, expected)
    lines += state_differences(described, expected)
    for key, theirs in described["shape"].items():
        wanted = expected.hf_config.get(key)
        if None not in (wanted, theirs) and not _equal(key, theirs, wanted, expected.hf_config):
            lines.append(f"{key} is {theirs}, expected {wanted} (another model)")
    longest, length = longest_asked(described, expected), described["max_model_len"]
    if length < longest:
        why = "prompt plus response" if longest == expected.max_tokens else "the verification's probes"
        lines.append(f"max_model_len is {length}, expected at least {longest} for {why}")
    return lines


def longest_asked(described: Mapping[str, Any], expected: Expectation) -> int:
    """Returns the length of the longest sequence that the run or the verification's probes ask for (tokens)."""
    config = expected.config
    # A server that rounds scores each response as a part of a prompt, and generates one more token then.
    rounded = config.server_form.is_rounded
    length = probe_lengths(described["block_size"], rounded=rounded)[1]
    return max(expected.max_tokens, length + probe_tokens(config.verify, rounded=rounded) + rounded)


def check_room(info: ServerInfo, block_size: int, expected: Expectation) -> None:
    """Raises HandshakeError if ``max_model_len`` is too small for probes with cache blocks of ``block_size`` tokens."""
    needed = longest_asked({"block_size": block_size}, expected)
    if (info.max_model_len or needed) < needed:
        said = f"max_model_len is {info.max_model_len}, and another server's cache blocks of {block_size}"
        raise HandshakeError(f"{info.url}: {said} tokens need probes of {needed}: start it with a larger one")


def _equal(key: str, theirs: Any, wanted: Any, hf_config: Mapping[str, Any]) -> bool:
    """Returns whether two values of a ``config.json`` mean the same, whose rotary settings may have default values."""
    if theirs == wanted or key != "rope_parameters":
        return bool(theirs == wanted)
    if any(theirs.get(name) != wanted.get(name) for name in BESIDE_SCALING):
        return False
    longest = hf_config.get("max_position_embeddings", 1)
    try:
        return read_rope(theirs, longest) == read_rope(wanted, longest)
    except ValueError:
        return False


async def check_logprobs(server: Remote, info: ServerInfo, hint: str) -> None:
    """Checks that log-probabilities belong to the distribution that the server samples from.

    At half the temperature the gaps between them must be twice as large. If they are not, it raises HandshakeError with
    ``hint`` as the remedy. It also raises HandshakeError if gaps are not finite, or log-probabilities are all equal.
    """
    assert info.vocab_size is not None
    ratio = await sharpening(server, info.vocab_size, 0.5)
    if np.isnan(ratio):
        said = "log-probabilities are not finite, or all equal: the server's weights are broken; restart it"
        raise HandshakeError(f"{info.url}: {said}")
    if not 1.8 < ratio < 2.2:
        raise HandshakeError(
            f"{info.url}: log-probabilities are not of the distribution sampled from (at temperature 0.5 their gaps "
            f"are {ratio:.2f} times those at 1, expected 2): {hint}"
        )
