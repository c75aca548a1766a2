"""vLLM as one kind of server: what it says of itself, and new weights in the order that its endpoints want."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rljax.errors import ReplyError, ServerGoneError, ServerRefusedError
from rljax.rollout.servers import workers
from rljax.rollout.servers.backend import Expectation, Loaded
from rljax.rollout.servers.client import ServerClient
from rljax.rollout.servers.handshake import optional, server_info
from rljax.rollout.servers.vllm.handshake import shake_hands
from rljax.rollout.servers.vllm.wire import VllmWire
from rljax.rollout.servers.wire import ServerInfo
from rljax.rollout.types import InFlight
from rljax.weights.directory import WeightDirectory, WeightVersion

_UPDATE_S = 600.0  # longest that one step of an update may take


class VllmBackend(VllmWire):
    """See served.backend.Backend."""

    start_command = "launch/vllm_server.sh MODEL --port P"
    logprobs_hint = "start with --logprobs-mode processed_logprobs"

    def __init__(self, *, in_place: bool = False) -> None:
        """``in_place``: as ``PublishConfig.in_place``."""
        super().__init__()
        self._in_place = in_place

    def describe(self, client: ServerClient, url: str) -> ServerInfo:
        """See Backend. A server without rljax's plugin does not say its dtype and vocabulary."""
        try:
            (model,) = client.call(url, "GET", "/v1/models")["data"]
        except (KeyError, ValueError, ServerRefusedError) as error:
            raise ValueError(f"{url} does not list one model at /v1/models: {error}") from error
        if optional(client, url, "GET", "/is_paused").get("is_paused"):
            raise ValueError(f"{url} is paused: end the run that publishes weights to it, or POST /resume")
        described = optional(client, url, "POST", "/collective_rpc", json={"method": "rljax_describe"})
        client.set_model(url, str(model["id"]))
        client.find_route(url)
        return dataclasses.replace(
            server_info(url, (described.get("results") or [{}])[0], "vllm"),
            model=str(model["id"]),
            root=str(model.get("root") or ""),
            version=str(optional(client, url, "GET", "/version").get("version", "")),
            max_model_len=model.get("max_model_len"),
            has_first_weights=optional(client, url, "GET", "/weight_info").get("weight_version") == "default",
        )

    def handshake(self, client: ServerClient, url: str, expected: Expectation, files: WeightDirectory) -> ServerInfo:
        """See Backend."""
        return shake_hands(client, url, expected, files)

    def prepare(self, client: ServerClient, url: str, version: WeightVersion) -> Mapping[str, Any]:
        """See Backend."""
        return workers.pull(_ask(client, url), url, version, _UPDATE_S, keep_delta=self._in_place)

    def push(self, client: ServerClient, url: str, version: WeightVersion, in_flight: InFlight = "wait") -> None:
        """See Backend: pause -> update -> reset prefix cache -> resume."""
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
        # /pause has cleared the cache already on servers that still know clear_cache; this one is for good. It takes
        # the keys and values of responses that go on, too, which are computed again.
        held = {"reset_running_requests": "true"} if in_flight == "keep" else {}
        if post("/reset_prefix_cache", params=held).get("success") is False:
            raise RuntimeError(f"{url} could not reset its prefix cache: requests are still running there")
        post("/resume")

    def sleep(self, client: ServerClient, url: str) -> None:
        """See Backend."""
        client.call(url, "POST", "/sleep", timeout_s=_UPDATE_S, params={"level": 2, "mode": "wait"})

    def wake(self, client: ServerClient, url: str) -> None:
        """See Backend."""
        client.call(url, "POST", "/wake_up", timeout_s=_UPDATE_S)

    def serves(self, client: ServerClient, url: str, version: WeightVersion) -> bool:
        """See Backend."""
        try:
            answer = client.call(url, "GET", "/weight_info", timeout_s=10.0)
        except ServerRefusedError as error:
            raise ServerGoneError(str(error)) from error
        return answer.get("weight_version") == version.tag

    def loaded(self, client: ServerClient, url: str, version: WeightVersion) -> Sequence[Loaded]:
        """See Backend."""
        return workers.loaded(_ask(client, url), url, version)


def _ask(client: ServerClient, url: str) -> workers.Ask:
    """A method of the workers at ``url``, with its arguments, to what each of them answers."""

    def ask(method: str, *arguments: Any) -> Sequence[Any]:
        answer = client.call(url, "POST", "/collective_rpc", json={"method": method, "args": list(arguments)})
        try:
            return list(answer["results"])
        except (KeyError, TypeError) as error:
            raise ReplyError(f"{url} answered without {error}: {str(answer)[:300]}") from error

    return ask
