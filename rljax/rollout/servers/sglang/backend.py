"""SGLang as one kind of server: what it says of itself, and new weights in the order that its endpoints want."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rljax.errors import ServerGoneError, ServerRefusedError
from rljax.rollout.servers import workers
from rljax.rollout.servers.backend import Expectation, Loaded
from rljax.rollout.servers.client import ServerClient
from rljax.rollout.servers.handshake import optional, server_info
from rljax.rollout.servers.sglang.handshake import shake_hands
from rljax.rollout.servers.sglang.wire import SglangWire
from rljax.rollout.servers.sglang.workers import ask_workers
from rljax.rollout.servers.wire import ServerInfo
from rljax.rollout.types import InFlight
from rljax.weights.directory import WeightDirectory, WeightVersion

_UPDATE_S = 600.0  # longest that one step of an update may take
_PAUSES = {"keep": "retract", "abort": "abort"}  # retract: keys and values of what goes on are computed again


class SglangBackend(SglangWire):
    """See served.backend.Backend."""

    start_command = "launch/sglang_server.sh MODEL --port P"
    logprobs_hint = "SGLang reports them of other logits than it samples from"

    def describe(self, client: ServerClient, url: str) -> ServerInfo:
        """See Backend. A server without rljax's plugin does not say its vocabulary."""
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
            info = server_info(url, ask_workers(client, url, "rljax_describe")[0], "sglang")
        except ServerRefusedError:
            plain = optional(client, url, "GET", "/server_info")
            dtype = plain.get("dtype", "auto")
            info = ServerInfo(
                url,
                dtype="" if dtype == "auto" else str(dtype),
                version=str(plain.get("version", "")),
                max_model_len=plain.get("max_req_input_len"),
            )
        client.find_route(url)
        name = str(model.get("served_model_name") or root)
        return dataclasses.replace(info, model=name, root=root, has_first_weights=version == "default")

    def handshake(self, client: ServerClient, url: str, expected: Expectation, files: WeightDirectory) -> ServerInfo:
        """See Backend."""
        return shake_hands(client, url, expected, files)

    def prepare(self, client: ServerClient, url: str, version: WeightVersion) -> Mapping[str, Any]:
        """See Backend."""
        return workers.pull(self._ask(client, url), url, version, _UPDATE_S)

    def push(self, client: ServerClient, url: str, version: WeightVersion, in_flight: InFlight = "wait") -> None:
        """See Backend. The server waits for what it samples, or stops it, loads, and flushes the cache."""
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
            optional(client, url, "POST", "/pause_generation", json={"mode": "retract"})
            raise

    def sleep(self, client: ServerClient, url: str) -> None:
        """Raises RuntimeError: settings that ask for it are refused (rollout.colocated)."""
        raise RuntimeError(f"{url}: rollout.colocated works with vLLM servers")

    def wake(self, client: ServerClient, url: str) -> None:
        """Raises RuntimeError as :meth:`sleep`."""
        self.sleep(client, url)

    def serves(self, client: ServerClient, url: str, version: WeightVersion) -> bool:
        """See Backend."""
        try:
            answer = client.call(url, "GET", "/model_info", timeout_s=10.0)
        except ServerRefusedError as error:
            raise ServerGoneError(str(error)) from error
        return answer.get("weight_version") == version.tag

    def loaded(self, client: ServerClient, url: str, version: WeightVersion) -> Sequence[Loaded]:
        """See Backend."""
        return workers.loaded(self._ask(client, url), url, version)

    def _ask(self, client: ServerClient, url: str) -> workers.Ask:
        return lambda method, *arguments: ask_workers(client, url, method, *arguments)
