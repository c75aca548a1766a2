"""The trainer's side of vLLM: requests to its endpoints, the handshake, and the steps that bring new weights.

``/rljax/rollouts`` is the endpoint of rljax's plugin, which replies with arrays. ``/inference/v1/generate`` is vLLM's
own, for servers without the first. Both report which weight version sampled which tokens.
"""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Callable, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from rljax.errors import HandshakeError, ReplyError, ServerRefusedError
from rljax.policy.rotary import read_rope
from rljax.rollout.kinds import can
from rljax.rollout.servers.handshake import (
    Expectation,
    ask_if_there,
    common_differences,
    longest_asked,
    refusals,
    server_info,
)
from rljax.rollout.servers.kind import UPDATE_S, Backend
from rljax.rollout.servers.process import TOP
from rljax.rollout.servers.replies import Span, as_floats, as_spans, check_own_prompt, make_completion, make_tops
from rljax.rollout.servers.requests import Completion, Remote, Request, ServerInfo
from rljax.rollout.servers.vllm.server import BACKEND, FORCED_TOKENS, ROLLOUTS, prompt_hash
from rljax.rollout.types import InFlight
from rljax.weights.store import WeightVersion

log = logging.getLogger(__name__)

GENERATE = "/inference/v1/generate"


# The fields of a reply that are read. The decoder skips other fields and makes no Python object of them. ``gc`` is off
# for numbers that come by the thousand, which would start the garbage collector. None of them can be part of a cycle.
class _Scored(msgspec.Struct, gc=False):
    logprob: float


class _Sampled(_Scored, gc=False):
    token_id: int


class _SampledAmongTops(_Sampled):
    top_logprobs: list[_Sampled] = []


class _Content(msgspec.Struct):
    content: list[_SampledAmongTops]


class _Choice(msgspec.Struct, kw_only=True):
    token_ids: list[int]
    finish_reason: str | None
    logprobs: _Content | None
    index: int = 0
    weight_versions: list[Span] | None = None
    routed_experts: bytes | None = None  # a .npy file in base64


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None  # None without --enable-prompt-tokens-details


class _VllmReply(msgspec.Struct):
    choices: list[_Choice]
    prompt_logprobs: list[dict[int, _Scored] | None] | None = None
    usage: _Usage | None = None


class _Flat(msgspec.Struct):
    counts: bytes  # the number of entries at each position, int32
    token_ids: bytes  # the token of each entry, int32
    logprobs: bytes  # the log-probability of each entry, float32


class _Rollout(msgspec.Struct):
    token_ids: bytes  # the sampled tokens, int32
    finish_reason: str | None
    scores: _Flat  # at each position the sampled token and then the likeliest, so that a token may be there twice
    prompt_scores: _Flat | None = None
    weight_versions: list[Span] | None = None
    routed_experts: bytes | None = None  # a .npy file
    cached_tokens: int | None = None  # the number of prompt tokens from the prefix cache
    prompt_hash: bytes = b""  # the value of ``prompt_hash`` of the prompt that was sampled from


class _ForceAnswer(msgspec.Struct):
    way: str  # the name of the sampling setting that carries the tokens, or ""
    reason: str  # the reason why the worker cannot decode given tokens


_DECODER = msgspec.json.Decoder(_VllmReply)
_ROLLOUT_DECODER = msgspec.json.Decoder(_Rollout)


class VllmBackend(Backend):
    """vLLM as one kind of server."""

    name = "vLLM"
    route = GENERATE
    own_route = ROLLOUTS
    without_route = "rljax needs vLLM 0.32 or newer"
    logprobs_hint = "start with --logprobs-mode processed_logprobs"
    without_plugin = (
        "rljax's plugin is not in this server, or too old for it: install this rljax beside vLLM (install_vllm in a "
        "checkout, on a TPU with --tpu) and start it with rljax serve vllm MODEL"
    )
    version_route = "/weight_info"

    def body(self, route: str, request: Request, model: str, platform: str = "") -> dict[str, Any]:
        """Returns a body with all settings that shape the distribution, so that no default of the server can change it.

        A response ends at ``sampling.stop_token_ids`` and at no other end-of-sequence token.
        """
        sampling = {
            "n": 1,
            "max_tokens": request.sampling.max_response_tokens,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "top_k": request.sampling.top_k,
            "min_p": request.sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": _asked(request, route) or int(not can("vllm", "scores_alone", platform)),
            "ignore_eos": True,
            "stop_token_ids": list(request.sampling.stop_token_ids),
            "seed": request.seed if can("vllm", "takes_seeds", platform) else None,
            **request.forced,
        }
        if request.prompt_logprobs is not None:
            sampling["prompt_logprobs"] = request.prompt_logprobs
        named = {} if route == ROLLOUTS else {"model": model}
        return {**named, "token_ids": request.prompt.tolist(), "sampling_params": sampling}

    def read(self, route: str, reply: bytes, request: Request) -> Completion:
        """Reads a reply of either route, as :meth:`Backend.read` says."""
        if route == ROLLOUTS:
            rollout = _ROLLOUT_DECODER.decode(reply)
            if not rollout.prompt_hash:
                raise ReplyError(f"{route} does not say which prompt it answers: install the same rljax beside both")
            own_hash = prompt_hash(request.prompt.astype("<i4", copy=False).tobytes())
            check_own_prompt(route, rollout.prompt_hash == own_hash)
            return _read_rollout(route, rollout, request)
        read = _DECODER.decode(reply)
        (choice,) = read.choices
        if choice.index != 0:
            raise ValueError(f"its choice has index {choice.index}, expected 0")
        content = choice.logprobs.content if choice.logprobs else []
        arrays = {"rollout_logprobs": as_floats(map(attrgetter("logprob"), content))}
        if k := request.sampling.reported:
            lists = list(map(attrgetter("top_logprobs"), content))
            entries = list(chain.from_iterable(lists))
            ids, logprobs = map(attrgetter("token_id"), entries), map(attrgetter("logprob"), entries)
            arrays |= make_tops(map(len, lists), ids, logprobs, k, len(request.prompt))
        details = read.usage and read.usage.prompt_tokens_details
        return make_completion(
            route,
            request,
            np.array(choice.token_ids, np.int32),
            arrays,
            are_others=list(map(attrgetter("token_id"), content)) != choice.token_ids,
            experts=_read_routes(choice.routed_experts) if request.routes else None,
            finish_reason=str(choice.finish_reason),
            spans=as_spans(choice.weight_versions),
            cached=details and details.cached_tokens,
            prompt_logprobs=tuple(
                {token: scored.logprob for token, scored in (top or {}).items()} for top in read.prompt_logprobs or ()
            ),
        )

    async def ask_plugin(self, server: Remote, method: str, *arguments: Any) -> list[Any]:
        """Asks the workers through ``/collective_rpc``."""
        answer = await server.call("POST", "/collective_rpc", json={"method": method, "args": list(arguments)})
        try:
            return list(answer["results"])
        except (KeyError, TypeError) as error:
            raise ReplyError(f"{server.url}/collective_rpc answered without {error}: {str(answer)[:300]}") from error

    async def force(self, server: Remote) -> Callable[[np.ndarray], Mapping[str, Any]]:
        """Makes the workers decode given tokens, by hooks or by vLLM's own trace replay (:meth:`Backend.force`)."""
        if not can("vllm", "decodes_given", server.platform):
            raise ValueError(f"{server.url} decodes no given tokens: vLLM on a TPU samples its own")
        try:
            answers: list[_ForceAnswer] = await self.ask(server, _ForceAnswer, "rljax_force")
        except ServerRefusedError as error:
            raise ValueError(f"{server.url} decodes no given tokens: {self.without_plugin} ({error})") from error
        if reasons := [answer.reason for answer in answers if not answer.way]:
            raise ValueError(f"{server.url} decodes no given tokens: {reasons[0]}")
        way = answers[0].way
        return lambda tokens: {way: {FORCED_TOKENS: tokens.tolist()} if way == "extra_args" else tokens.tolist()}

    async def describe(self, server: Remote) -> ServerInfo:
        """Returns the description of any vLLM server. Without rljax's plugin it lacks dtype and vocabulary."""
        try:
            (model,) = (await server.call("GET", "/v1/models"))["data"]
        except (KeyError, ValueError, ServerRefusedError) as error:
            raise ValueError(f"{server.url} does not list one model at /v1/models: {error}") from error
        if (await ask_if_there(server, "GET", "/is_paused")).get("is_paused"):
            raise ValueError(f"{server.url} is paused: end the run that publishes weights to it, or POST /resume")
        described = await ask_if_there(server, "POST", "/collective_rpc", json={"method": "rljax_describe"})
        weights = await ask_if_there(server, "GET", self.version_route)
        plugin = (described.get("results") or [{}])[0]
        server.model, server.platform = str(model["id"]), plugin.get("platform", "")
        await self.find_route(server)
        return dataclasses.replace(
            server_info(server.url, plugin, "vllm"),
            model=str(model["id"]),
            root=str(model.get("root") or ""),
            version=str((await ask_if_there(server, "GET", "/version")).get("version", "")),
            max_model_len=model.get("max_model_len"),
            has_first_weights=weights.get("weight_version") == "default",
        )

    async def resume(self, server: Remote) -> None:
        """Wakes and resumes the server if it is paused. Raises HandshakeError if it has no endpoints for that."""
        development = (
            "no weight-update endpoints: start the server with VLLM_SERVER_DEV_MODE=1, as rljax serve vllm does"
        )
        with refusals(server.url, development):
            if not (await server.call("GET", "/is_paused")).get("is_paused"):
                return
            is_sleeping = (await server.call("GET", "/is_sleeping")).get("is_sleeping")
        asked = await ask_if_there(server, "POST", "/collective_rpc", json={"method": "rljax_describe"})
        if any(worker.get("is_broken") for worker in asked.get("results") or ()):
            return  # a TPU whose last update broke off can take new weights, and nothing else
        if is_sleeping:
            await self.wake(server)
        log.info("%s was left paused; resuming it", server.url)
        await server.call("POST", "/resume")

    def differences(self, described: Mapping[str, Any], expected: Expectation) -> list[str]:
        """Returns the lines of :func:`common_differences`, and lines about vLLM's own settings."""
        lines = common_differences(described, expected, 'vLLM\'s --hf-overrides \'{"head_dtype": "float32"}\'')
        if described["backend"] != BACKEND:
            lines.append(
                f"the weight-transfer backend is {described['backend']!r}, expected {BACKEND!r} "
                "(--weight-transfer-config)"
            )
        if described.get("reads_images"):
            lines.append("it reads images, and only text is published: serve a save of its text")
        if expected.needs_routes and not described.get("returns_routes", False):
            lines.append(
                "it does not report the experts of its tokens (rollout.router_replay = r3): start it with "
                "--enable-return-routed-experts and VLLM_USE_V2_MODEL_RUNNER=1, which vLLM's build for a CPU does not "
                "have"
            )
        sizes, head_dim = described.get("head_sizes"), described["shape"].get("head_dim")
        if sizes and head_dim not in sizes:
            lines.append(f"head_dim is {head_dim}; vLLM's attention on the server's device takes {sizes}")
        most, needed = described["max_logprobs"], max(TOP, expected.config.reported) + 1
        needed = min(needed, described["shape"].get("vocab_size") or needed)
        if 0 <= most < needed:  # -1 is any number
            lines.append(
                f"max_logprobs is {most}, expected at least {needed}, for the likeliest tokens "
                f"and the sampled one (rollout.top_logprobs or rollout.top_k): start it with --max-logprobs {needed}"
            )
        longest, rope = longest_asked(described, expected), expected.hf_config.get("rope_parameters", {})
        scaling = read_rope(rope, longest) if rope.get("rope_type") == "yarn" else None
        if scaling and (reach := int(scaling.original_length * scaling.factor)) < longest:
            said = f"{reach} tokens, where vLLM's table ends, expected at least {longest}"
            lines.append(f"the model's yarn reaches {said}")
        return lines

    async def show(self, server: Remote, probe: Mapping[str, Any]) -> None:
        """Tells the plugin where the run's weights will be, by the start of a weight transfer (:meth:`Backend.show`).

        Raises HandshakeError if the server has several engines, because only one of them answers the plugin's calls.
        """
        asked = [{"include_dp": with_engines} for with_engines in ("true", "false")]
        workers = [await ask_if_there(server, "GET", "/get_world_size", params=params) for params in asked]
        if workers[0] != workers[1]:
            remedy = "start a server for each of them, without --data-parallel-size"
            raise HandshakeError(f"{server.url}: only one of its engines would prove its weights: {remedy}")
        await server.call("POST", "/init_weight_transfer_engine", json={"init_info": probe})

    async def push(self, server: Remote, version: WeightVersion, in_flight: InFlight = "wait") -> None:
        """Pauses the server, updates its weights, resets its prefix cache and resumes it."""
        update = {"path": "" if version.source else str(version.path), "tag": version.tag}

        async def post(path: str, **kwargs: Any) -> dict[str, Any]:
            return await server.call("POST", path, timeout_s=UPDATE_S, **kwargs)

        await post("/pause", params={"mode": in_flight, "clear_cache": "true"})
        try:
            await post("/start_weight_update")
        except ServerRefusedError:  # the last one broke off, by an error or with its trainer
            await self.ask_plugin(server, "rljax_end_update")
            await post("/start_weight_update")
        await post("/update_weights", json={"update_info": update})
        await post("/finish_weight_update", json={"weight_version": version.tag})
        # On servers that know clear_cache, /pause has cleared the cache already. This call is for all others. It also
        # drops the keys and values of held responses, which are then computed again.
        held = {"reset_running_requests": "true"} if in_flight == "keep" else {}
        if (await post("/reset_prefix_cache", params=held)).get("success") is False:
            raise RuntimeError(f"{server.url} could not reset its prefix cache: requests are still running there")
        await post("/resume")

    async def sleep(self, server: Remote) -> None:
        """Puts the server to sleep at level 2, which drops its weights."""
        await server.call("POST", "/sleep", timeout_s=UPDATE_S, params={"level": 2, "mode": "wait"})

    async def wake(self, server: Remote) -> None:
        """Wakes the server. It then holds no weights."""
        await server.call("POST", "/wake_up", timeout_s=UPDATE_S)


def _read_routes(file: bytes | None) -> np.ndarray | None:
    """Returns integers [tokens - 1, layers, k] from the bytes of a .npy file, or None. No pickled object is read."""
    if file is None:
        return None
    found = np.load(io.BytesIO(file), allow_pickle=False)
    if not isinstance(found, np.ndarray):
        raise ValueError("routed_experts is no .npy file")
    return found


def _asked(request: Request, route: str) -> int:
    """Returns the number of log-probabilities that a request asks for at each position.

    vLLM's own endpoints put the sampled token first. If it is none of the likeliest, it displaces the last of them. So
    one more is asked for. It must not be more than the vocabulary has, or vLLM's engine would end.
    """
    k = request.sampling.reported
    asked = k if route == ROLLOUTS else k + 1
    return min(asked, request.vocab_size or asked) if k else 0


def _read_rollout(route: str, read: _Rollout, request: Request) -> Completion:
    """Reads a reply of ROLLOUTS. Raises ValueError if its arrays do not fit together."""
    tokens = np.frombuffer(read.token_ids, "<i4")
    counts, ids, logprobs = _arrays(read.scores)
    if counts.min(initial=1) < 1:
        raise ValueError("a position without a log-probability")
    firsts, k = np.cumsum(counts) - counts, request.sampling.reported
    tops = make_tops(counts, ids, logprobs, k, len(request.prompt)) if k else {}
    return make_completion(
        route,
        request,
        tokens,
        {"rollout_logprobs": logprobs[firsts], **tops},
        are_others=not np.array_equal(ids[firsts], tokens),
        experts=_read_routes(read.routed_experts) if request.routes else None,
        finish_reason=str(read.finish_reason),
        spans=as_spans(read.weight_versions),
        cached=read.cached_tokens,
        prompt_logprobs=() if read.prompt_scores is None else _by_position(*_arrays(read.prompt_scores)),
    )


def _arrays(scores: _Flat) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the number of entries at each position, and the token and log-probability of each entry."""
    counts, ids = np.frombuffer(scores.counts, "<i4"), np.frombuffer(scores.token_ids, "<i4")
    logprobs = np.frombuffer(scores.logprobs, "<f4")
    if counts.min(initial=0) < 0 or not counts.sum(dtype=np.int64) == len(ids) == len(logprobs):
        raise ValueError(f"{len(ids)} tokens with {len(logprobs)} log-probabilities, counted as {counts.sum()}")
    return counts, ids, logprobs


def _by_position(counts: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> tuple[Mapping[int, float], ...]:
    ends = np.cumsum(counts).tolist()
    entries = list(zip(ids.tolist(), logprobs.tolist(), strict=True))
    return tuple(dict(entries[end - count : end]) for end, count in zip(ends, counts.tolist(), strict=True))
