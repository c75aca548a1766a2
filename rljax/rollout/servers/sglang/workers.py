"""Questions to rljax's plugin in SGLang's workers, which ``/weights_checker`` hands on."""

from __future__ import annotations

import json
from typing import Any

from rljax.errors import ReplyError
from rljax.rollout.servers.client import ServerClient

_ANSWER = "rljax"  # as in the plugin


def ask_workers(client: ServerClient, url: str, method: str, *arguments: Any) -> list[Any]:
    """What each worker answers.

    Args:
      client: to ask with.
      url: of the server.
      method: of the plugin's Worker.
      arguments: plain JSON.

    Raises:
      ServerRefusedError: there is no plugin, or the method failed; the message holds why.
      ServerGoneError: the server does not answer.
      ReplyError: it answers with what cannot be read.
    """
    body = {"action": method, "selector": "target", "skip_tensor_list": [json.dumps(each) for each in arguments]}
    reply = client.call(url, "POST", "/weights_checker", json=body)
    try:
        return [json.loads(rank["checksums"][_ANSWER]) for rank in reply["ranks"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ReplyError(f"{url} answered without {error}: {str(reply)[:300]}") from error
