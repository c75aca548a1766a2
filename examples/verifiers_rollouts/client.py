"""The requests of the program to the trainer and to the servers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
from verifiers_rollouts.settings import EndError

POLL_S = 0.5
"""The time between two attempts of a request (seconds)."""


class RefusedError(Exception):
    """A server has refused a request. The message has its words."""


class Client:
    """Sends requests to the trainer and to the servers, again while they have no room or do not answer."""

    def __init__(self, http: aiohttp.ClientSession, wait_s: float) -> None:
        """Sends nothing yet. ``wait_s`` is the longest time without an answer (seconds)."""
        self._http, self._wait_s = http, wait_s

    async def ask(self, url: str, content: Any = None, **headers: str) -> Any:
        """Returns the JSON of the answer. Without ``content`` it is a GET request.

        Raises RefusedError if the request is refused, and EndError if nothing answers.
        """
        method, deadline = "GET" if content is None else "POST", time.monotonic() + self._wait_s
        while True:
            try:
                async with self._http.request(method, url, json=content, headers=headers) as reply:
                    if reply.status == 200:
                        return await reply.json()
                    said = " ".join((await reply.text()).split())[:300]
                if reply.status == 429:  # The trainer is there, and has enough groups.
                    deadline = time.monotonic() + self._wait_s
                elif reply.status != 503:  # Servers are paused while they get new weights.
                    raise RefusedError(f"{url} answers {reply.status}: {said}")
            except (OSError, aiohttp.ClientError) as error:
                said = str(error) or type(error).__name__
            if time.monotonic() > deadline:
                raise EndError(f"{url} gave no answer for {self._wait_s:g} s: {said}")
            await asyncio.sleep(POLL_S)
