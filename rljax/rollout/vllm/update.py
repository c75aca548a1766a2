"""New weights into a vLLM server, in the order that its development endpoints want."""

from __future__ import annotations

from typing import Any

from rljax.errors import ServerGoneError, ServerRefusedError
from rljax.rollout.served.client import VllmClient
from rljax.rollout.weights.files import WeightVersion


def push(client: VllmClient, url: str, version: WeightVersion, timeout_s: float = 600.0) -> None:
    """pause -> update -> reset prefix cache -> resume at one server. It is not proof that the update arrived.

    On a refusal the server stays paused: it may hold half of the weights.

    Raises:
      ServerGoneError: the server does not answer.
      RuntimeError: it refused a step.
    """
    update = {"update_info": {"path": str(version.path), "tag": version.tag}}

    def post(path: str, **kwargs: Any) -> dict[str, Any]:
        return client.call(url, "POST", path, timeout_s=timeout_s, **kwargs)

    post("/pause", params={"mode": "wait", "clear_cache": "true"})
    post("/start_weight_update")
    post("/update_weights", json=update)
    post("/finish_weight_update", json={"weight_version": version.tag})
    # /pause has cleared the cache already on servers that still know clear_cache; this one is for good.
    if post("/reset_prefix_cache").get("success") is False:
        raise RuntimeError(f"{url} could not reset its prefix cache: requests are still running there")
    post("/resume")


def serves(client: VllmClient, url: str, version: WeightVersion) -> bool:
    """Whether the server says that it holds ``version``; True of a server that cannot say.

    Raises ServerGoneError when it does not answer.
    """
    try:
        answer = client.call(url, "GET", "/weight_info", timeout_s=10.0)
    except ServerRefusedError as error:
        if error.status == 404:
            return True
        raise ServerGoneError(str(error)) from error
    return answer.get("weight_version") == version.tag
