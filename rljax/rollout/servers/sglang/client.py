"""The trainer's side of SGLang: requests to ``/generate``, the handshake, and the steps that bring new weights."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from operator import itemgetter
from typing import Any, get_args

import msgspec
import numpy as np

from rljax.errors import ReplyError, ServerRefusedError
from rljax.rollout.servers.handshake import Expectation, ask_if_there, common_differences, server_info
from rljax.rollout.servers.kind import UPDATE_S, Backend
from rljax.rollout.servers.process import Dtype
from rljax.rollout.servers.replies import Span, as_floats, as_spans, check_own_prompt, make_completion, make_tops
from rljax.rollout.servers.requests import Completion, Remote, Request, ServerInfo
from rljax.rollout.servers.sglang.server import ANSWER
from rljax.rollout.types import InFlight, SamplingParams
from rljax.weights.store import WeightVersion

log = logging.getLogger(__name__)

GENERATE = "/generate"
# SGLang's modes of a pause by ``RolloutConfig.update``. retract: keys and values of held responses are computed again.
_PAUSES = {"keep": "retract", "abort": "abort"}
_UNFLUSHED = "the cache was not flushed"  # what SGLang says after it has loaded weights while a request was under way
_UNFLUSHED_S = (0.05, 0.2, 1.0)  # how long to wait before the update is tried again (seconds)


# The fields of a reply that are read. The decoder skips other fields and makes no Python object of them.
class _Finish(msgspec.Struct):
    type: str


_Scored = tuple[float, int, Any]  # (log-probability, token id, text, which is null)


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None
    output_token_logprobs: list[_Scored]
    output_top_logprobs: list[list[_Scored] | None] | None = None
    input_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    input_top_logprobs: list[list[_Scored] | None] | None = None
    weight_versions: list[Span] | None = None
    prompt_tokens: int | None = None  # the number of the prompt's tokens
    cached_tokens: int | None = None  # how many of them the server took from its cache


class _SglangReply(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


_DECODER = msgspec.json.Decoder(_SglangReply)


class SglangBackend(Backend):
    """SGLang as one kind of server."""

    name = "SGLang"
    route = GENERATE
    logprobs_hint = "SGLang reports them of other logits than it samples from"
    without_plugin = "rljax's plugin is not in this server: install rljax in SGLang's environment"
    version_route = "/model_info"

    def body(self, route: str, request: Request, model: str, platform: str = "") -> dict[str, Any]:
        """Returns a body with all settings that shape the distribution, so that no default of the server can change it.

        ``ignore_eos`` would also switch the stop tokens of the request off. So it is set only if there are none. The
        plugin removes the model's own end-of-sequence tokens.
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
            "logprob_start_len": -1 if request.prompt_logprobs is None else 0,
            "top_logprobs_num": max(request.sampling.reported, request.prompt_logprobs or 0),
            "stream": False,
        }

    def read(self, route: str, reply: bytes, request: Request) -> Completion:
        """Reads a reply of ``/generate``, as :meth:`Backend.read` says."""
        read = _DECODER.decode(reply)
        meta = read.meta_info
        check_own_prompt(route, meta.prompt_tokens in (None, 0, len(request.prompt)))
        prompt: tuple[Mapping[int, float], ...] = ()
        if request.prompt_logprobs is not None:
            scored = meta.input_token_logprobs or ()
            likely = (meta.input_top_logprobs or ()) if request.prompt_logprobs else ()
            prompt = tuple(
                {} if value is None else {other: v for v, other, _ in top or ()} | {token: value}
                for (value, token, _), top in itertools.zip_longest(scored, likely[: len(scored)])
            )
        arrays = {"rollout_logprobs": as_floats(map(itemgetter(0), meta.output_token_logprobs))}
        if request.sampling.reported:
            lists = list(filter(None, meta.output_top_logprobs or ()))
            logprobs, ids = (map(itemgetter(i), itertools.chain.from_iterable(lists)) for i in (0, 1))
            arrays |= make_tops(map(len, lists), ids, logprobs, request.sampling.reported, len(request.prompt))
        return make_completion(
            route,
            request,
            np.array(read.output_ids, np.int32),
            arrays,
            are_others=list(map(itemgetter(1), meta.output_token_logprobs)) != read.output_ids,
            finish_reason=_finish_reason(read, request.sampling),
            spans=as_spans(meta.weight_versions),
            cached=meta.cached_tokens,
            prompt_logprobs=prompt,
        )

    async def ask_plugin(self, server: Remote, method: str, *arguments: Any) -> list[Any]:
        """Asks the workers through ``/weights_checker``."""
        body = {"action": method, "selector": "target", "skip_tensor_list": [json.dumps(each) for each in arguments]}
        reply = await server.call("POST", "/weights_checker", json=body)
        try:
            return [json.loads(rank["checksums"][ANSWER]) for rank in reply["ranks"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ReplyError(f"{server.url}/weights_checker answered without {error}: {str(reply)[:300]}") from error

    async def describe(self, server: Remote) -> ServerInfo:
        """Returns the description of any SGLang server. Without rljax's plugin it lacks dtypes, sizes and version."""
        try:
            model = await server.call("GET", self.version_route)
            root, version = str(model["model_path"]), str(model["weight_version"])
        except (KeyError, ServerRefusedError) as error:
            raise ValueError(f"{server.url} does not name its model at /model_info: {error}") from error
        if await _is_paused(server):
            said = "end the run that publishes weights to it, or POST /continue_generation {}"
            raise ValueError(f"{server.url} is paused: {said}")
        try:
            info = server_info(server.url, (await self.ask_plugin(server, "rljax_describe"))[0], "sglang")
        except ServerRefusedError:
            info = ServerInfo(server.url)
        await self.find_route(server)
        name = str(model.get("served_model_name") or root)
        return dataclasses.replace(info, model=name, root=root, has_first_weights=version == "default")

    async def resume(self, server: Remote) -> None:
        """Resumes the server if it is paused."""
        if await _is_paused(server):
            log.info("%s was left paused; it goes on", server.url)
            await server.call("POST", "/continue_generation", json={})

    def differences(self, described: Mapping[str, Any], expected: Expectation) -> list[str]:
        """Returns the lines of :func:`common_differences`, and lines about SGLang's own settings."""
        cache, dtype = described["kv_cache_dtype"], described["dtype"]
        is_plain = cache in get_args(Dtype)  # whether the cache has a plain dtype, which needs no name
        known = dict(described) | ({"kv_cache_dtype": dtype} if is_plain else {})
        lines = common_differences(known, expected, "SGLang's --enable-fp32-lm-head")
        if is_plain and cache != dtype:
            lines.append(
                f"the key-value cache is {cache} and the model {dtype}: start it with --dtype {expected.config.dtype}"
            )
        if not described["has_prefix_cache"]:
            lines.append("it has no prefix cache (--disable-radix-cache), so that stale keys and values could not show")
        if expected.needs_routes or described["shape"]["num_experts"]:
            lines.append("mixtures of experts are not supported with rollout.engine = sglang")
        if described["preferred_sampling"]:
            said = described["preferred_sampling"]
            lines.append(f"default sampling is not plain: {said} (--preferred-sampling-params)")
        return lines

    async def show(self, server: Remote, probe: Mapping[str, Any]) -> None:
        """Tells the plugin where the run's weights will be, by its method ``rljax_show`` (:meth:`Backend.show`)."""
        await self.ask_plugin(server, "rljax_show", probe)

    async def push(self, server: Remote, version: WeightVersion, in_flight: InFlight = "wait") -> None:
        """Waits for the responses under way or pauses them, makes the server load the version and flushes its cache."""
        path = "" if version.source else str(version.path)
        update = {"model_path": path, "weight_version": version.tag, "load_format": "safetensors", "flush_cache": True}
        try:
            if in_flight != "wait":
                await server.call("POST", "/pause_generation", timeout_s=UPDATE_S, json={"mode": _PAUSES[in_flight]})
            answer = await _update(server, update)
            if answer.get("success") is not True:
                raise RuntimeError(f"{server.url} did not load {version.tag}: {str(answer)[:300]}")
            await server.call("POST", "/continue_generation", json={})  # another client may have paused it, too
        except (RuntimeError, ServerRefusedError):
            # The server may hold half of the weights, which must not sample.
            await ask_if_there(server, "POST", "/pause_generation", json={"mode": "retract"})
            raise


def _finish_reason(reply: _SglangReply, sampling: SamplingParams) -> str:
    """Returns the reason why a response ended.

    SGLang decodes one more token before it gives a response up. It says "abort" also if this token completes it.
    """
    tokens, finish = reply.output_ids, reply.meta_info.finish_reason
    if finish is not None and finish.type == "abort":
        if tokens and tokens[-1] in sampling.stop_token_ids:
            return "stop"
        if len(tokens) == sampling.max_response_tokens:
            return "length"
    return "None" if finish is None else finish.type


async def _update(server: Remote, update: Mapping[str, Any]) -> Any:
    """Makes the server load a version. A server that could not flush its cache is paused, and loads the version again.

    SGLang sends the last token of a response before its scheduler has ended the request. Until then it cannot flush.
    """
    for seconds in _UNFLUSHED_S:
        try:
            return await server.call("POST", "/update_weights_from_disk", timeout_s=UPDATE_S, json=update)
        except ServerRefusedError as error:
            if _UNFLUSHED not in str(error):
                raise
        await server.call("POST", "/pause_generation", timeout_s=UPDATE_S, json={"mode": "retract"})
        await asyncio.sleep(seconds)
    return await server.call("POST", "/update_weights_from_disk", timeout_s=UPDATE_S, json=update)


async def _is_paused(server: Remote) -> bool:
    try:
        await server.call("GET", "/ready")
    except ServerRefusedError as error:
        return error.status == HTTPStatus.SERVICE_UNAVAILABLE
    return False
