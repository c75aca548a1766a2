"""The loopback server that the train client of ``verifiers`` posts its turns to, in the process of ``verifiers``.

It has the part of vLLM's interface that the client uses: ``/inference/v1/generate`` and ``/v1/models``. The program
asks a server of the run for the tokens, and keeps the answers. A header names the trace that asks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from verifiers_rollouts.chat import FULL

MODEL = "policy"
"""The name of the model in requests."""

SESSION = "X-Session-ID"
"""The name of the header with the identity of the trace that asks."""

_LARGEST = 1 << 30  # The largest body of a request (bytes); aiohttp's own limit is 1 MiB.


@dataclass(frozen=True)
class Room:
    """The limits of the trajectories of a batch."""

    prompt_tokens: int  # the longest first prompt (tokens)
    response_tokens: int  # the most tokens behind the first prompt
    turn_tokens: int  # the most tokens of one turn
    temperature: float  # the temperature of all samples of the batch


@dataclass(eq=False)
class Asking:
    """One trajectory that asks for turns."""

    key: int  # the number of the trajectory
    room: Room  # the limits
    turns: int = 0  # the number of turns asked for so far
    first: int | None = None  # the number of tokens of the trained agent's first prompt, or None before it
    is_full: bool = False  # whether a turn of the trained agent was refused because no token was left for it
    # The time at which the environment's work began (``time.monotonic``), or None while the engine samples.
    since: float | None = field(default_factory=time.monotonic)
    is_late: bool = False  # whether the environment took too long
    # The lock that a turn holds, so that a trajectory asks for one turn at a time.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class RefusedTurnError(Exception):
    """No server gives the turn. The message says why."""


Ask = Callable[[Asking, list[int], int, bool], Awaitable[dict[str, Any]]]


class Shim:
    """The server.

    ``sessions`` has the trajectory of each trace, and whether its agent is trained, by the identity of the trace.
    """

    def __init__(self, ask: Ask) -> None:
        """Prepares the server.

        ``ask`` is an async function of a trajectory, the tokens so far, the most tokens of the turn, and whether the
        agent is trained. It returns the server's answer, or raises RefusedTurnError.
        """
        self.sessions: dict[str, tuple[Asking, bool]] = {}
        self._ask = ask
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Starts the server on a free port of 127.0.0.1, and returns its URL."""
        app = web.Application(client_max_size=_LARGEST)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def close(self) -> None:
        """Stops the server."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _generate(self, request: web.Request) -> web.Response:
        asking, is_trained = self.sessions.get(request.headers.get(SESSION, ""), (None, False))
        if asking is None:
            return _refused("no trajectory of this run asks: the header with its trace is unknown")
        body = await request.json()
        params = body.get("sampling_params", {})
        if (refusal := _unlike(params, asking.room)) is not None:
            return _refused(refusal)
        async with asking.lock:
            tokens = body["token_ids"]
            room = asking.room
            first = room.prompt_tokens  # The prompts of other agents may fill all that a server takes.
            if is_trained:
                first = asking.first = len(tokens) if asking.first is None else asking.first
            if not 1 <= first <= room.prompt_tokens:
                return _refused(f"the prompt has {first} tokens, expected 1 to {room.prompt_tokens}")
            left = first + room.response_tokens - len(tokens)
            if left < 1:
                asking.is_full |= is_trained
                return _refused(f"this trajectory's {FULL} is {first + room.response_tokens} tokens")
            limits = (left, room.turn_tokens, params.get("max_tokens") or left)
            asking.turns += 1
            try:
                answer = await self._ask(asking, tokens, min(limits), is_trained)
            except RefusedTurnError as error:
                return _refused(str(error))
        logprobs = zip(answer["token_ids"], answer["logprobs"], strict=True)
        content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in logprobs]
        choice = {
            "index": 0,
            "token_ids": answer["token_ids"],
            "logprobs": {"content": content},
            "finish_reason": "length" if answer["truncated"] else "stop",
        }
        return web.json_response({"request_id": f"{asking.key}-{asking.turns}", "choices": [choice]})


def _unlike(params: dict[str, Any], room: Room) -> str | None:
    """Returns a message if the environment asks for settings that the batch is not sampled with, else None."""
    asked = params.get("temperature", room.temperature)
    if asked != room.temperature:
        return f"the environment asks for temperature {asked}, but the run samples at {room.temperature}"
    if params.get("stop"):
        return "the environment asks for stop strings, but the run stops at tokens"
    return None


def _refused(message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=400)
