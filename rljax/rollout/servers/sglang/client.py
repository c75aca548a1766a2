"""The trainer's side of SGLang: ``/generate``, the handshake, and new weights in the order that it wants."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np

from rljax.errors import HandshakeError, ReplyError, ServerRefusedError
from rljax.rollout.servers import handshake
from rljax.rollout.servers.backend import (
    AskWorkers,
    Expectation,
    WorkerChecksums,
    names_version,
    pull_version,
    read_checksums,
)
from rljax.rollout.servers.client import ServerClient
from rljax.rollout.servers.wire import Completion, Request, ServerInfo
from rljax.rollout.types import InFlight
from rljax.weights.store import WeightDirectory, WeightVersion

log = logging.getLogger(__name__)

GENERATE = "/generate"
_UPDATE_S = 600.0  # The longest that one step of an update may take (seconds).
_PAUSES = {"keep": "retract", "abort": "abort"}  # retract: keys and values of what goes on are computed again
_ANSWER = "rljax"  # The key of the plugin's answer in a reply of /weights_checker.


# The fields that are read of a reply. The decoder skips other fields and makes no Python object of them.
class _Finish(msgspec.Struct):
    type: str


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


_Scored = tuple[float, int, Any]  # log-probability, token id, text (null)


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None
    output_token_logprobs: list[_Scored]
    output_top_logprobs: list[list[_Scored] | None] | None = None
    input_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    input_top_logprobs: list[list[_Scored] | None] | None = None
    weight_versions: list[_Span] | None = None


class _Reply(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


_DECODER = msgspec.json.Decoder(_Reply)
_NONE = float(np.finfo(np.float32).min)  # Stands for the logarithm of a probability that is 0 in float32.


class SglangBackend:
    """SGLang as one kind of server (``Backend``)."""

    name = "SGLang"
    routes: Sequence[str] = (GENERATE,)
    model = "policy"
    start_command = "rljax serve sglang MODEL --port P"
    logprobs_hint = "SGLang reports them of other logits than it samples from"

    def body(self, route: str, request: Request, model: str) -> dict[str, Any]:
        """Returns a body with all that shapes the distribution, so that no default of the server can change it.

        ``ignore_eos`` would also let the stop tokens of the request pass. The plugin has taken the model's own away.
        """
        stops = list(request.sampling.stop_token_ids)
        sampling: dict[str, Any] = {
            "max_new_tokens": request.sampling.max_response_tokens,
            "temperature": request.sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": not stops,
            "stop_token_ids": stops or None,
            "no_stop_trim": True,
        }
        if request.seed is not None:
            sampling["sampling_seed"] = request.seed
        return {
            "input_ids": request.prompt.tolist(),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": 0 if request.prompt_logprobs else -1,
            "top_logprobs_num": request.top_logprobs,
            "stream": False,
        }

    def completion(self, route: str, reply: bytes, request: Request) -> Completion:
        """Reads a reply of ``/generate``.

        Raises:
          ReplyError: A field is missing or of another type, or tokens and log-probabilities do not match.
        """
        try:
            read = _DECODER.decode(reply)
            meta = read.meta_info
            tops: tuple[Mapping[int, float], ...] = ()
            if request.top_logprobs:
                tops = tuple(_known(top or ()) for top in meta.output_top_logprobs or ())
            prompt: tuple[Mapping[int, float], ...] = ()
            if request.prompt_logprobs:
                scored = meta.input_token_logprobs or ()
                likely = (meta.input_top_logprobs or ()) if request.top_logprobs else ()
                prompt = tuple(
                    {} if value is None else {other: v for v, other, _ in top or ()} | {token: value}
                    for (value, token, _), top in itertools.zip_longest(scored, likely[: len(scored)])
                )
            with np.errstate(over="ignore"):  # infinity is refused by check_completion
                values = map(itemgetter(0), meta.output_token_logprobs)
                logprobs = np.fromiter(values, np.float64).astype(np.float32)
            completion = Completion(
                token_ids=np.array(read.output_ids, np.int32),
                logprobs=logprobs,
                finish_reason="None" if meta.finish_reason is None else meta.finish_reason.type,
                spans=tuple((span.version, span.start, span.end) for span in meta.weight_versions or ()) or None,
                top_logprobs=tops,
                prompt_logprobs=prompt,
            )
        except (ValueError, ArithmeticError, RecursionError) as error:
            said = f"{type(error).__name__} {error}"
            shown = " ".join(reply[:300].decode(errors="replace").split())
            raise ReplyError(f"{route} answered with no completion, {said}: {shown}") from error
        are_others = list(map(itemgetter(1), meta.output_token_logprobs)) != read.output_ids
        if are_others and completion.finish_reason != "abort":
            count = len(meta.output_token_logprobs)
            raise ReplyError(f"{route} gave {len(read.output_ids)} tokens and log-probabilities of {count} others")
        return completion

    def describe(self, client: ServerClient, url: str) -> ServerInfo:
        """Returns the description of any SGLang server; one without rljax's plugin does not tell its vocabulary."""
        try:
            model = client.call(url, "GET", "/model_info")
            root, version = str(model["model_path"]), str(model["weight_version"])
        except (KeyError, ServerRefusedError) as error:
            raise ValueError(f"{url} does not name its model at /model_info: {error}") from error
        try:
            client.call(url, "GET", "/ready")
        except ServerRefusedError as error:
            if error.status == 503:
                said = "end the run that publishes weights to it, or POST /continue_generation {}"
                raise ValueError(f"{url} is paused: {said}") from error
        try:
            info = handshake.server_info(url, ask_plugin(client, url, "rljax_describe")[0], "sglang")
        except ServerRefusedError:
            plain = handshake.ask_if_there(client, url, "GET", "/server_info")
            dtype = plain.get("dtype", "auto")
            info = ServerInfo(
                url,
                dtype="" if dtype == "auto" else str(dtype),
                version=str(plain.get("version", "")),
                max_model_len=plain.get("max_req_input_len"),
            )
        handshake.find_route(client, url, self.routes)
        name = str(model.get("served_model_name") or root)
        return dataclasses.replace(info, model=name, root=root, has_first_weights=version == "default")

    def handshake(self, client: ServerClient, url: str, expected: Expectation, files: WeightDirectory) -> ServerInfo:
        """Lets a paused server go on, compares it with the trainer, and shows it where weights come from."""
        try:
            client.call(url, "GET", "/ready")
        except ServerRefusedError as error:
            if error.status == 503:
                log.info("%s was left paused; it goes on", url)
                client.call(url, "POST", "/continue_generation", json={})
        plugin = "rljax's plugin is not in this server: install rljax in SGLang's environment"
        described = _ask_or_refuse(client, url, plugin, "rljax_describe")[0]
        try:
            handshake.check_protocol(url, described)
            differing = differences(described, expected)
        except (LookupError, TypeError, AttributeError) as error:
            raise ReplyError(f"{url}: /weights_checker answered without {error}: {str(described)[:300]}") from error
        if differing:
            raise HandshakeError("\n".join(f"{url}: {line}" for line in differing))
        handshake.ask(client, url, "GET", "/model_info", "it does not say which weights it holds")
        handshake.find_route(client, url, self.routes)
        info = handshake.server_info(url, described, "sglang")
        probe, unread = handshake.weights_probe(files)
        _ask_or_refuse(client, url, unread, "rljax_show", probe)
        return info

    def prepare(self, client: ServerClient, url: str, version: WeightVersion) -> Mapping[str, Any]:
        """Has the workers pull the version into their machine's mirror."""
        return pull_version(_ask(client, url), url, version, _UPDATE_S)

    def push(self, client: ServerClient, url: str, version: WeightVersion, in_flight: InFlight = "wait") -> None:
        """Waits for what the server samples, or stops it, has it load the version, and flushes its cache."""
        path = "" if version.source else str(version.path)
        update = {"model_path": path, "weight_version": version.tag, "load_format": "safetensors", "flush_cache": True}
        try:
            if in_flight != "wait":
                client.call(url, "POST", "/pause_generation", timeout_s=_UPDATE_S, json={"mode": _PAUSES[in_flight]})
            answer = client.call(url, "POST", "/update_weights_from_disk", timeout_s=_UPDATE_S, json=update)
            if answer.get("success") is not True:
                raise RuntimeError(f"{url} did not load {version.tag}: {str(answer)[:300]}")
            client.call(url, "POST", "/continue_generation", json={})  # somebody else may have paused it, too
        except (RuntimeError, ServerRefusedError):
            # It may hold half of the weights, and nobody shall sample from them.
            handshake.ask_if_there(client, url, "POST", "/pause_generation", json={"mode": "retract"})
            raise

    def sleep(self, client: ServerClient, url: str) -> None:
        """Raises RuntimeError: settings that need it (``rollout.colocated``) are refused before."""
        raise RuntimeError(f"{url}: rollout.colocated works with vLLM servers")

    def wake(self, client: ServerClient, url: str) -> None:
        """Raises RuntimeError as :meth:`sleep`."""
        self.sleep(client, url)

    def serves(self, client: ServerClient, url: str, version: WeightVersion) -> bool:
        """Returns whether ``/model_info`` names the version."""
        return names_version(client, url, "/model_info", version)

    def loaded(self, client: ServerClient, url: str, version: WeightVersion) -> Sequence[WorkerChecksums]:
        """Asks the workers' plugin for the checksums of what they hold."""
        return read_checksums(_ask(client, url), url, version)


def _ask(client: ServerClient, url: str) -> AskWorkers:
    return functools.partial(ask_plugin, client, url)


def ask_plugin(client: ServerClient, url: str, method: str, *arguments: Any) -> list[Any]:
    """Asks rljax's plugin in each of the server's workers, by way of ``/weights_checker``.

    Args:
      client: The client of the server.
      url: The server.
      method: The name of a method of the plugin's Worker.
      *arguments: The arguments of the method, which are plain JSON.

    Returns:
      The answer of each worker.

    Raises:
      ServerRefusedError: There is no plugin, or the method failed. The message holds the reason.
      ServerGoneError: The server does not answer.
      ReplyError: The answer cannot be read.
    """
    body = {"action": method, "selector": "target", "skip_tensor_list": [json.dumps(each) for each in arguments]}
    reply = client.call(url, "POST", "/weights_checker", json=body)
    try:
        return [json.loads(rank["checksums"][_ANSWER]) for rank in reply["ranks"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ReplyError(f"{url} answered without {error}: {str(reply)[:300]}") from error


def _ask_or_refuse(client: ServerClient, url: str, refusal: str, method: str, *arguments: Any) -> list[Any]:
    """Asks as :func:`ask_plugin`; a refusal is a HandshakeError, and means ``refusal``."""
    try:
        return ask_plugin(client, url, method, *arguments)
    except ServerRefusedError as error:
        raise handshake.refused(url, refusal, error) from error


def differences(described: Mapping[str, Any], expected: Expectation) -> list[str]:
    """Returns one line for each thing that differs between a server and the trainer.

    Args:
      described: The answer of rljax's plugin in the server.
      expected: The trainer's side.
    """
    lines = handshake.dtype_differences(described, expected, "SGLang's --enable-fp32-lm-head")
    if described["kv_cache_dtype"] != described["dtype"]:
        cache, dtype = described["kv_cache_dtype"], described["dtype"]
        lines.append(f"the key-value cache is {cache} and the model {dtype}: start it with --dtype {expected.dtype}")
    if not described["has_prefix_cache"]:
        lines.append("it has no prefix cache (--disable-radix-cache), so that stale keys and values could not show")
    if expected.needs_routes or described["shape"]["num_experts"]:
        lines.append("mixtures of experts are not supported with rollout.engine = sglang")
    lines += handshake.shape_differences(described, expected)
    lines += handshake.length_differences(described, expected)
    if described["preferred_sampling"]:
        lines.append(f"default sampling is not plain: {described['preferred_sampling']} (--preferred-sampling-params)")
    return lines


def _known(top: Sequence[_Scored]) -> dict[int, float]:
    """Returns the likeliest tokens without those whose probability is 0 in float32."""
    return {token: value for value, token, _ in top if value > _NONE}
