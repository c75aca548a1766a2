"""An endpoint of rljax in vLLM's API server, which samples several responses and replies with arrays.

vLLM's own endpoints make a Python object for each token and each likeliest token, and need a request for each response.
That costs processor time which the workers need. Here the scores stay in flat lists, and are sent as JSON with base64
of little-endian arrays. One request asks for several responses. Each response comes in a line of its own as soon as it
is complete. The line has a hash of the prompt. The sampling, the checks of a request and the statuses of errors are
those of vLLM. Where the client goes away, the responses of its request are given up.

vLLM loads :class:`ServeRollouts` with ``--middleware rljax.rollout.servers.vllm.endpoint.ServeRollouts``.
"""

from __future__ import annotations

import asyncio
import io
import json
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams

from rljax.rollout.servers.vllm.server import FORCED_TOKENS, ROLLOUTS, prompt_hash
from rljax.weights.access import App, Message


class ServeRollouts:
    """ASGI middleware that adds the endpoint to vLLM's application, and on a TPU guards the routes that resume it."""

    def __init__(self, app: App) -> None:
        """Wraps the application ``app``. The endpoint is added when the server starts."""
        self._app = app

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        """Handles one request, or the start and end of the server."""
        if scope["type"] == "lifespan":
            # A route of the application itself is behind all middleware that guards vLLM's own routes.
            routes = scope["app"].router.routes
            routes.insert(0, Route(ROLLOUTS, RolloutEndpoint(), methods=["POST"]))
            for route in routes if current_platform.is_tpu() else ():
                if getattr(route, "path", "") in ("/resume", "/wake_up"):
                    route.app = after_whole_updates(route.app)
        await self._app(scope, receive, send)


def after_whole_updates(app: App) -> App:
    """Returns ``app`` behind a check, which refuses requests while a TPU has mixed weights and no cache."""

    async def guarded(scope: Message, receive: Any, send: Any) -> None:
        workers = await scope["app"].state.engine_client.collective_rpc("rljax_describe")
        said = {"error": "a weight update has not ended, so the weights may be mixed: publish a whole version"}
        is_broken = any(worker["is_broken"] for worker in workers)
        await (JSONResponse(said, HTTPStatus.CONFLICT) if is_broken else app)(scope, receive, send)

    return guarded


class Asked(msgspec.Struct):
    """The prompt of one response, and its sampling settings as vLLM names them."""

    token_ids: list[int]
    sampling_params: dict[str, Any]


_DECODER = msgspec.json.Decoder(list[Asked])
_NOT_ON_TPU = (
    *("seed", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words"),
    *("min_tokens", "allowed_token_ids"),
)
"""The settings that vLLM ignores on a TPU, and ``seed``, which it refuses without a message."""


class RolloutEndpoint:
    """The endpoint, an ASGI application."""

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        """Samples the responses that one HTTP request asks for, and sends a line for each as it completes."""
        request = Request(scope, receive)
        try:
            asked = _DECODER.decode(await request.body())
        except msgspec.MsgspecError as error:
            raise ValueError(f"the body is not a list of requests for rollouts: {error}") from error
        engine = scope["app"].state.engine_client
        left = {asyncio.create_task(_line(engine, number, each)) for number, each in enumerate(asked)}
        leaving = asyncio.create_task(_leave(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
            while left and not leaving.done():
                await asyncio.wait((*left, leaving), return_when=asyncio.FIRST_COMPLETED)
                for task in [each for each in left if each.done()]:
                    left.remove(task)
                    await send({"type": "http.response.body", "body": task.result(), "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            for task in (*left, leaving):
                task.cancel()


async def _leave(receive: Any) -> bytes:
    """Waits until the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass
    return b""


async def _line(engine: Any, number: int, asked: Asked) -> bytes:
    """Samples one response. Returns the line with its reply or with the error that vLLM would answer with, in ASCII."""
    try:
        status, reply = 200, msgspec.json.encode(await _sample(engine, asked))
    except Exception as error:
        answered = create_error_response(error)
        status, reply = int(answered.error.code), json.dumps(answered.model_dump()).encode()
    return b"%d %d %b\n" % (number, status, reply)


async def _sample(engine: Any, asked: Asked) -> dict[str, Any]:
    """Samples one response, and returns its reply."""
    settings = _settings(asked, engine.model_config.get_vocab_size())
    sampling = engine.generate(tokens_input(asked.token_ids), settings, f"rollout-{uuid4().hex}")
    output = [output async for output in sampling][-1]
    if output.outputs[0].finish_reason == "error":
        raise RuntimeError("Internal server error")
    return as_reply(output)


def _settings(asked: Asked, vocab_size: int) -> SamplingParams:
    """Returns the sampling settings of one response.

    Raises ValueError for values that vLLM does not check without a tokenizer. Some of them would end its engine.
    """
    own = {"output_kind": RequestOutputKind.FINAL_ONLY.value, "flat_logprobs": True, "detokenize": False}
    if unknown := asked.sampling_params.keys() - set(SamplingParams.__struct_fields__):
        raise ValueError(f"sampling_params has unknown keys: {', '.join(sorted(unknown))}")
    try:
        settings = msgspec.convert({**asked.sampling_params, **own}, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(f"sampling_params: {error}") from error
    forced = {"token_ids": asked.token_ids, "trace_decode_token_ids": settings.trace_decode_token_ids}
    forced[FORCED_TOKENS] = (settings.extra_args or {}).get(FORCED_TOKENS)
    for name, ids in forced.items():
        if wrong := [token for token in ids or () if type(token) is not int or not 0 <= token < vocab_size]:
            raise ValueError(f"{name} must be in 0 .. {vocab_size - 1}, got {wrong[0]!r:.60}")
    if settings.seed is not None and not -(2**63) <= settings.seed < 2**63:
        raise ValueError(f"seed must be a signed integer of 64 bits, got {settings.seed:.3e}")
    if current_platform.is_tpu():
        plain = SamplingParams()
        for name in _NOT_ON_TPU:
            if (got := getattr(settings, name)) not in (neutral := getattr(plain, name), None):
                raise ValueError(f"{name} must be {neutral!r}, got {got!r:.60}: vLLM on a TPU does not know it")
        if settings.logprobs == 0:
            settings.logprobs = 1  # a request for the sampled token alone ends in an error there
    for token, bias in (settings.logit_bias or {}).items():
        if not -100 <= bias <= 100:
            raise ValueError(f"logit_bias must be in -100 .. 100, got {bias} for token {token}")
    return settings


def as_reply(output: Any) -> dict[str, Any]:
    """Returns the reply for an output of vLLM, in the form that ``VllmBackend`` reads.

    ``msgspec`` writes the bytes as base64.
    """
    (sampled,) = output.outputs
    return {
        "prompt_hash": prompt_hash(np.asarray(output.prompt_token_ids, "<i4").tobytes()),
        "token_ids": np.asarray(sampled.token_ids, "<i4").tobytes(),
        "finish_reason": sampled.finish_reason,
        "scores": _as_flat(sampled.logprobs),
        "prompt_scores": _as_flat(output.prompt_logprobs),
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in sampled.weight_versions or ()
        ],
        "cached_tokens": output.num_cached_tokens,
        "routed_experts": _as_file(sampled.routed_experts),
    }


def _as_flat(scores: Any) -> dict[str, bytes] | None:
    """Returns the number of entries at each position, and the token and log-probability of each entry."""
    if scores is None:
        return None
    ends, starts = np.asarray(scores.end_indices, "<i4"), np.asarray(scores.start_indices, "<i4")
    return {
        "counts": (ends - starts).tobytes(),
        "token_ids": np.asarray(scores.token_ids, "<i4").tobytes(),
        "logprobs": np.asarray(scores.logprobs, "<f4").tobytes(),
    }


def _as_file(array: np.ndarray | None) -> bytes | None:
    if array is None:
        return None
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()
