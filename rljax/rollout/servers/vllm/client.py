"""The trainer's side of vLLM: its token endpoints, the handshake, and new weights in the order that it wants.

``/inference/v1/generate`` reports which weight version sampled which tokens. ``/v1/completions`` is the fallback for
servers that lack it.
"""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar

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
from rljax.rollout.servers.verify import TOP
from rljax.rollout.servers.vllm.server import BACKEND
from rljax.rollout.servers.wire import Completion, Request, ServerInfo
from rljax.rollout.types import InFlight
from rljax.weights.store import WeightDirectory, WeightVersion

log = logging.getLogger(__name__)

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
_UPDATE_S = 600.0  # The longest that one step of an update may take (seconds).

Scores = TypeVar("Scores")
Item = TypeVar("Item")


# The fields that are read of a reply. The decoder skips other fields and makes no Python object of them. ``gc`` is off
# where thousands of objects would set off the garbage collector: none of them can be part of a cycle.
class _Scored(msgspec.Struct, gc=False):
    logprob: float


class _Sampled(_Scored, gc=False):
    token_id: int


class _SampledAmongTops(_Sampled):
    top_logprobs: list[_Sampled]


class _Content(msgspec.Struct, Generic[Item]):
    content: list[Item]


class _Named(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]


class _NamedAmongTops(_Named):
    top_logprobs: list[dict[str, float]]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


_PromptScores = list[dict[int, _Scored] | None] | None


class _Choice(msgspec.Struct, Generic[Scores], kw_only=True):
    token_ids: list[int]
    finish_reason: str | None
    logprobs: Scores
    index: int = 0
    weight_versions: list[_Span] | None = None
    prompt_logprobs: _PromptScores = None  # COMPLETIONS puts them here
    routed_experts: bytes | None = None  # a .npy file in base64


class _Reply(msgspec.Struct, Generic[Scores]):
    choices: list[_Choice[Scores]]
    prompt_logprobs: _PromptScores = None  # GENERATE puts them here


# The decoder for each route, and for whether the likeliest tokens are read.
_DECODERS: dict[tuple[str, bool], msgspec.json.Decoder[Any]] = {
    (GENERATE, False): msgspec.json.Decoder(_Reply[_Content[_Sampled] | None]),
    (GENERATE, True): msgspec.json.Decoder(_Reply[_Content[_SampledAmongTops] | None]),
    (COMPLETIONS, False): msgspec.json.Decoder(_Reply[_Named]),
    (COMPLETIONS, True): msgspec.json.Decoder(_Reply[_NamedAmongTops]),
}


class VllmBackend:
    """vLLM as one kind of server (``Backend``)."""

    name = "vLLM"
    routes: Sequence[str] = (GENERATE, COMPLETIONS)
    model = "policy"
    start_command = "rljax serve vllm MODEL --port P"
    logprobs_hint = "start with --logprobs-mode processed_logprobs"

    def __init__(self, *, in_place: bool = False) -> None:
        """``in_place``: Whether the workers write what changed into their weights, as ``PublishConfig.in_place``."""
        self._in_place = in_place

    def body(self, route: str, request: Request, model: str) -> dict[str, Any]:
        """Returns a body with all that shapes the distribution, so that no default of the server can change it.

        A response ends at ``sampling.stop_token_ids`` and at no other end-of-sequence token.
        """
        sampling = {
            "n": 1,
            "max_tokens": request.sampling.max_response_tokens,
            "temperature": request.sampling.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": request.top_logprobs,
            "ignore_eos": True,
            "stop_token_ids": list(request.sampling.stop_token_ids),
            "seed": request.seed,
        }
        if request.prompt_logprobs:
            sampling["prompt_logprobs"] = request.top_logprobs
        tokens = request.prompt.tolist()
        if route == GENERATE:
            return {"model": model, "token_ids": tokens, "sampling_params": sampling}
        as_ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return {"model": model, "prompt": tokens, **as_ids, **sampling}

    def completion(self, route: str, reply: bytes, request: Request) -> Completion:
        """Reads a reply of either route.

        Raises:
          ReplyError: A field is missing or of another type, there is not one choice, or tokens and log-probabilities
            do not match.
        """
        has_tops = request.top_logprobs > 0
        try:
            read = _DECODERS[route, has_tops].decode(reply)
            (choice,) = read.choices
            if choice.index != 0:
                raise ValueError(f"the choice of another place, {choice.index}")
            tokens = choice.token_ids
            read_scores = _read_content if route == GENERATE else _read_named
            are_others, logprobs, tops = read_scores(choice, has_tops)
            completion = Completion(
                token_ids=np.array(tokens, np.int32),
                logprobs=logprobs,
                finish_reason=str(choice.finish_reason),
                spans=tuple((span.version, span.start, span.end) for span in choice.weight_versions or ()) or None,
                top_logprobs=tops,
                prompt_logprobs=tuple(
                    {token: scored.logprob for token, scored in (top or {}).items()}
                    for top in read.prompt_logprobs or choice.prompt_logprobs or ()
                ),
                routes=None if request.routes is None else _read_routes(choice.routed_experts),
            )
        except (ValueError, ArithmeticError, RecursionError) as error:
            said = f"{type(error).__name__} {error}"
            shown = " ".join(reply[:300].decode(errors="replace").split())
            raise ReplyError(f"{route} answered with no completion, {said}: {shown}") from error
        if (are_others or len(logprobs) != len(tokens)) and completion.finish_reason != "abort":
            raise ReplyError(f"{route} gave {len(tokens)} tokens and log-probabilities of {len(logprobs)} others")
        return completion

    def describe(self, client: ServerClient, url: str) -> ServerInfo:
        """Returns the description of any vLLM server; one without rljax's plugin tells no dtype and no vocabulary."""
        try:
            (model,) = client.call(url, "GET", "/v1/models")["data"]
        except (KeyError, ValueError, ServerRefusedError) as error:
            raise ValueError(f"{url} does not list one model at /v1/models: {error}") from error
        if handshake.ask_if_there(client, url, "GET", "/is_paused").get("is_paused"):
            raise ValueError(f"{url} is paused: end the run that publishes weights to it, or POST /resume")
        described = handshake.ask_if_there(client, url, "POST", "/collective_rpc", json={"method": "rljax_describe"})
        client.set_model(url, str(model["id"]))
        handshake.find_route(client, url, self.routes)
        return dataclasses.replace(
            handshake.server_info(url, (described.get("results") or [{}])[0], "vllm"),
            model=str(model["id"]),
            root=str(model.get("root") or ""),
            version=str(handshake.ask_if_there(client, url, "GET", "/version").get("version", "")),
            max_model_len=model.get("max_model_len"),
            has_first_weights=handshake.ask_if_there(client, url, "GET", "/weight_info").get("weight_version")
            == "default",
        )

    def handshake(self, client: ServerClient, url: str, expected: Expectation, files: WeightDirectory) -> ServerInfo:
        """Resumes a paused server, compares it with the trainer, and shows it where weights come from."""
        development = (
            "no weight-update endpoints: start the server with VLLM_SERVER_DEV_MODE=1, as rljax serve vllm does"
        )
        if handshake.ask(client, url, "GET", "/is_paused", development).get("is_paused"):
            if handshake.ask(client, url, "GET", "/is_sleeping", development).get("is_sleeping"):
                client.call(url, "POST", "/wake_up")
            log.info("%s was left paused; resuming it", url)
            client.call(url, "POST", "/resume")
        plugin = (
            "rljax's plugin is not in this server: install rljax beside vLLM and start it with "
            "--worker-extension-cls rljax.rollout.servers.vllm.plugin.WorkerExtension"
        )
        reply = handshake.ask(client, url, "POST", "/collective_rpc", plugin, {"method": "rljax_describe"})
        try:
            described = reply["results"][0]
            handshake.check_protocol(url, described)
            differing = differences(described, expected)
        except (LookupError, TypeError, AttributeError) as error:
            raise ReplyError(f"{url}: /collective_rpc answered without {error}: {str(reply)[:300]}") from error
        if differing:
            raise HandshakeError("\n".join(f"{url}: {line}" for line in differing))
        unnamed = "it does not say which weights it holds: no /weight_info; a newer vLLM has it"
        handshake.ask(client, url, "GET", "/weight_info", unnamed)
        handshake.find_route(client, url, self.routes)
        info = handshake.server_info(url, described, "vllm")
        probe, unread = handshake.weights_probe(files)
        handshake.ask(client, url, "POST", "/init_weight_transfer_engine", unread, {"init_info": probe})
        return info

    def prepare(self, client: ServerClient, url: str, version: WeightVersion) -> Mapping[str, Any]:
        """Has the workers pull the version into their machine's mirror."""
        return pull_version(_ask(client, url), url, version, _UPDATE_S, keep_delta=self._in_place)

    def push(self, client: ServerClient, url: str, version: WeightVersion, in_flight: InFlight = "wait") -> None:
        """Pauses the server, updates its weights, resets its prefix cache and resumes it."""
        update: dict[str, Any] = {"path": "" if version.source else str(version.path), "tag": version.tag}
        if self._in_place:
            update["in_place"] = True

        def post(path: str, **kwargs: Any) -> dict[str, Any]:
            return client.call(url, "POST", path, timeout_s=_UPDATE_S, **kwargs)

        post("/pause", params={"mode": in_flight, "clear_cache": "true"})
        try:
            post("/start_weight_update")
        except ServerRefusedError:  # the last one broke off, by an error or with its trainer
            _ask(client, url)("rljax_end_update")
            post("/start_weight_update")
        post("/update_weights", json={"update_info": update})
        post("/finish_weight_update", json={"weight_version": version.tag})
        # /pause has cleared the cache already on servers that still know clear_cache; this call is for all others. It
        # also drops the keys and values of responses that go on, which are computed again.
        held = {"reset_running_requests": "true"} if in_flight == "keep" else {}
        if post("/reset_prefix_cache", params=held).get("success") is False:
            raise RuntimeError(f"{url} could not reset its prefix cache: requests are still running there")
        post("/resume")

    def sleep(self, client: ServerClient, url: str) -> None:
        """Puts the server to sleep at level 2, which drops its weights."""
        client.call(url, "POST", "/sleep", timeout_s=_UPDATE_S, params={"level": 2, "mode": "wait"})

    def wake(self, client: ServerClient, url: str) -> None:
        """Wakes the server, which holds no weights then."""
        client.call(url, "POST", "/wake_up", timeout_s=_UPDATE_S)

    def serves(self, client: ServerClient, url: str, version: WeightVersion) -> bool:
        """Returns whether ``/weight_info`` names the version."""
        return names_version(client, url, "/weight_info", version)

    def loaded(self, client: ServerClient, url: str, version: WeightVersion) -> Sequence[WorkerChecksums]:
        """Asks the workers' plugin for the checksums of what they loaded."""
        return read_checksums(_ask(client, url), url, version)


def _ask(client: ServerClient, url: str) -> AskWorkers:
    """Returns the function that asks the workers at ``url`` through ``/collective_rpc``."""

    def ask(method: str, *arguments: Any) -> Sequence[Any]:
        answer = client.call(url, "POST", "/collective_rpc", json={"method": method, "args": list(arguments)})
        try:
            return list(answer["results"])
        except (KeyError, TypeError) as error:
            raise ReplyError(f"{url} answered without {error}: {str(answer)[:300]}") from error

    return ask


def differences(described: Mapping[str, Any], expected: Expectation) -> list[str]:
    """Returns one line for each thing that differs between a server and the trainer.

    Args:
      described: The answer of rljax's plugin in the server.
      expected: The trainer's side.
    """
    lines = []
    if described["backend"] != BACKEND:
        lines.append(
            f"the weight-transfer backend is {described['backend']!r}, expected {BACKEND!r} (--weight-transfer-config)"
        )
    lines += handshake.dtype_differences(described, expected, 'vLLM\'s --hf-overrides \'{"head_dtype": "float32"}\'')
    if expected.needs_routes and not described.get("returns_routes", False):
        lines.append(
            "it does not report the experts of its tokens (rollout.router_replay = r3): start it with "
            "--enable-return-routed-experts and VLLM_USE_V2_MODEL_RUNNER=1, which vLLM's build for a CPU does not have"
        )
    lines += handshake.shape_differences(described, expected)
    sizes = described.get("head_sizes")
    if sizes and described["shape"]["head_dim"] not in sizes:
        lines.append(
            f"head_dim is {described['shape']['head_dim']}; vLLM's attention on the server's device takes {sizes}"
        )
    lines += handshake.length_differences(described, expected)
    if described["max_logprobs"] < TOP:
        lines.append(f"max_logprobs is {described['max_logprobs']}, expected at least {TOP}")
    if described["default_sampling"]:
        lines.append(
            f"default sampling is not plain: {described['default_sampling']}; start with --generation-config vllm"
        )
    return lines


def _read_routes(file: bytes | None) -> np.ndarray | None:
    """Returns integers [tokens - 1, layers, k] from a .npy file. No pickled object is read."""
    if file is None:
        return None
    found = np.load(io.BytesIO(file), allow_pickle=False)
    if not isinstance(found, np.ndarray):
        raise ValueError("routed_experts is no .npy file")
    return found


_Parts = tuple[bool, np.ndarray, tuple[Mapping[int, float], ...]]
"""Whether other tokens are scored than are there, the log-probabilities float32 [t], the likeliest tokens by place."""


def _read_content(choice: Any, has_tops: bool) -> _Parts:
    """Reads the scores of a choice of GENERATE."""
    content = choice.logprobs.content if choice.logprobs else []
    are_others = list(map(attrgetter("token_id"), content)) != choice.token_ids
    tops = ({top.token_id: top.logprob for top in item.top_logprobs} for item in content) if has_tops else ()
    return are_others, _floats(map(attrgetter("logprob"), content)), tuple(tops)


def _read_named(choice: Any, has_tops: bool) -> _Parts:
    """Reads the scores of a choice of COMPLETIONS, whose tokens are named ``token_id:442``."""
    scored = choice.logprobs
    are_others = scored.tokens != list(map("token_id:{}".format, choice.token_ids))
    tops = ({_token_id(name): x for name, x in top.items()} for top in scored.top_logprobs) if has_tops else ()
    return are_others, _floats(scored.token_logprobs), tuple(tops)


def _floats(values: Iterable[float]) -> np.ndarray:
    with np.errstate(over="ignore"):  # infinity is refused by check_completion
        return np.fromiter(values, np.float64).astype(np.float32)


def _token_id(name: str) -> int:
    """Returns 442 for ``token_id:442``."""
    return int(name.removeprefix("token_id:"))
