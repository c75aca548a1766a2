"""vLLM as one kind of server: what it says of itself, and new weights in the order that its endpoints want."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rljax.checksum import Checksum
from rljax.errors import ReplyError, ServerGoneError, ServerRefusedError, VerificationError
from rljax.rollout.served.backend import Expectation, Loaded
from rljax.rollout.served.client import ServerClient
from rljax.rollout.served.wire import ServerInfo
from rljax.rollout.vllm.handshake import server_info, shake_hands
from rljax.rollout.vllm.wire import VllmWire
from rljax.rollout.weights.directory import WeightDirectory, WeightVersion

_UPDATE_S = 600.0  # longest that one step of an update may take
_POLL_S = 0.05


class VllmBackend(VllmWire):
    """See served.backend.Backend."""

    start_command = "launch/vllm_server.sh MODEL --port P"
    logprobs_option = "--logprobs-mode processed_logprobs"

    def describe(self, client: ServerClient, url: str) -> ServerInfo:
        """See Backend. A server without rljax's plugin does not say its dtype and vocabulary."""
        try:
            (model,) = client.call(url, "GET", "/v1/models")["data"]
        except (KeyError, ValueError, ServerRefusedError) as error:
            raise ValueError(f"{url} does not list one model at /v1/models: {error}") from error
        if _optional(client, url, "GET", "/is_paused").get("is_paused"):
            raise ValueError(f"{url} is paused: end the run that publishes weights to it, or POST /resume")
        described = _optional(client, url, "POST", "/collective_rpc", json={"method": "rljax_describe"})
        client.set_model(url, str(model["id"]))
        client.find_route(url)
        return dataclasses.replace(
            server_info(url, (described.get("results") or [{}])[0]),
            model=str(model["id"]),
            root=str(model.get("root") or ""),
            version=str(_optional(client, url, "GET", "/version").get("version", "")),
            max_model_len=model.get("max_model_len"),
            has_first_weights=_optional(client, url, "GET", "/weight_info").get("weight_version") == "default",
        )

    def handshake(self, client: ServerClient, url: str, expected: Expectation, files: WeightDirectory) -> ServerInfo:
        """See Backend."""
        return shake_hands(client, url, expected, files)

    def prepare(self, client: ServerClient, url: str, version: WeightVersion) -> Mapping[str, Any]:
        """See Backend. The workers start the pull, and are asked how far it is, so that no request waits for it."""
        if not version.source:
            return {}
        name = version.path.name
        begun = time.monotonic()
        client.call(url, "POST", "/collective_rpc", json={"method": "rljax_pull", "args": [name]})
        while time.monotonic() - begun < _UPDATE_S:
            answer = client.call(url, "POST", "/collective_rpc", json={"method": "rljax_pulled", "args": [name]})
            try:
                done = [worker for worker in answer["results"] if worker is not None]
                failed = [worker["error"] for worker in done if worker["error"]]
            except (KeyError, TypeError) as error:
                raise ReplyError(f"{url} answered without {error}: {str(answer)[:300]}") from error
            if failed:
                raise ServerGoneError(f"{url} could not pull {version.tag}: {failed[0]}")
            if len(done) == len(answer["results"]):
                return max(done, key=lambda worker: worker["seconds"])
            time.sleep(_POLL_S)
        raise ServerGoneError(f"{url} did not pull {version.tag} within {_UPDATE_S:g} s")

    def push(self, client: ServerClient, url: str, version: WeightVersion) -> None:
        """See Backend: pause -> update -> reset prefix cache -> resume."""
        update = {"update_info": {"path": "" if version.source else str(version.path), "tag": version.tag}}

        def post(path: str, **kwargs: Any) -> dict[str, Any]:
            return client.call(url, "POST", path, timeout_s=_UPDATE_S, **kwargs)

        post("/pause", params={"mode": "wait", "clear_cache": "true"})
        post("/start_weight_update")
        post("/update_weights", json=update)
        post("/finish_weight_update", json={"weight_version": version.tag})
        # /pause has cleared the cache already on servers that still know clear_cache; this one is for good.
        if post("/reset_prefix_cache").get("success") is False:
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
        answer = client.call(url, "POST", "/collective_rpc", json={"method": "rljax_checksums"})
        try:
            tags = {worker["tag"] for worker in answer["results"]}
            if tags != {version.tag}:
                raise VerificationError(f"{url} was last given the weights {sorted(tags)}, not {version.tag!r}")
            return [
                Loaded({name: sums and Checksum(*sums) for name, sums in each["tensors"].items()}, each["seconds"])
                for each in answer["results"]
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise ReplyError(f"{url} answered without {error}: {str(answer)[:300]}") from error


def _optional(client: ServerClient, url: str, method: str, path: str, **content: Any) -> dict[str, Any]:
    """The reply of an endpoint that a server may lack; empty when it does."""
    try:
        return client.call(url, method, path, **content)
    except ServerRefusedError:
        return {}
