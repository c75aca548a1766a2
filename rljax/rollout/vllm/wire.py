"""The two request forms of vLLM's token endpoints and what their replies mean: plain data, no I/O.

``/inference/v1/generate`` reports which weight version drew which tokens; ``/v1/completions`` is the fallback of
servers that do not have it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rljax.errors import ReplyError
from rljax.rollout.types import SamplingParams

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
MODEL = "policy"


@dataclass(frozen=True)
class Request:
    """One response to draw.

    Attributes:
      prompt: int32 [s] token ids.
      sampling: how to draw it.
      seed: of this response alone; None leaves the draw to the server.
      top_logprobs: how many of the likeliest tokens' log-probabilities to report at each position.
      prompt_logprobs: whether to report the prompt's own log-probabilities; always those at temperature 1.
    """

    prompt: np.ndarray
    sampling: SamplingParams
    seed: int | None = None
    top_logprobs: int = 0
    prompt_logprobs: bool = False


@dataclass(frozen=True)
class Completion:
    """One drawn response as the server reports it.

    Attributes:
      token_ids: int32 [t].
      logprobs: float32 [t], of these tokens.
      finish_reason: "stop", "length", or "abort" when the server gave it up.
      spans: (weight version tag, start, end) in order; None when the server does not report them.
      top_logprobs: at each position the log-probability of each reported token; empty from ``/v1/completions``.
      prompt_logprobs: the same at each position of the prompt, its own token among them; none at the first, and empty
        unless asked for.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    spans: tuple[tuple[str, int, int], ...] | None
    top_logprobs: tuple[Mapping[int, float], ...] = ()
    prompt_logprobs: tuple[Mapping[int, float], ...] = ()


def body(route: str, request: Request, model: str = MODEL) -> dict[str, Any]:
    """The JSON body of ``request`` for ``route``, at a server that calls its model ``model``.

    Everything that shapes the distribution is sent, so that no default of the server's can; end-of-sequence tokens
    are those of ``sampling.stop_token_ids`` and no others.
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
        sampling["prompt_logprobs"] = 0
    tokens = request.prompt.tolist()
    if route == GENERATE:
        return {"model": model, "token_ids": tokens, "sampling_params": sampling}
    return {"model": model, "prompt": tokens, "return_token_ids": True, "return_tokens_as_token_ids": True, **sampling}


def completion(route: str, reply: Mapping[str, Any]) -> Completion:
    """Reads the reply of ``route``.

    Raises:
      ReplyError: a field is missing, or tokens and log-probabilities do not match.
    """
    try:
        choice = reply["choices"][0]
        tokens: Sequence[int] = choice["token_ids"]
        spans = choice.get("weight_versions")
        if route == GENERATE:
            content = (choice["logprobs"] or {"content": []})["content"]
            logprobs = [item["logprob"] for item in content]
            named = [item["token_id"] for item in content]
            tops = tuple({top["token_id"]: top["logprob"] for top in item["top_logprobs"]} for item in content)
        else:
            content = choice["logprobs"]
            logprobs = content["token_logprobs"]
            named = [_token_id(name) for name in content["tokens"]]
            tops = tuple({_token_id(name): value for name, value in top.items()} for top in content["top_logprobs"])
        prompt = (reply if route == GENERATE else choice).get("prompt_logprobs") or ()
        scored = tuple({int(token): float(item["logprob"]) for token, item in (top or {}).items()} for top in prompt)
        finish = str(choice["finish_reason"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ReplyError(f"{route} answered without {error}: {str(reply)[:300]}") from error
    if list(named) != list(tokens) and finish != "abort":
        raise ReplyError(f"{route} gave {len(tokens)} tokens and log-probabilities of {len(named)} others")
    return Completion(
        token_ids=np.asarray(tokens, np.int32),
        logprobs=np.asarray(logprobs, np.float32),
        finish_reason=finish,
        spans=None if spans is None else tuple((str(s["version"]), int(s["start"]), int(s["end"])) for s in spans),
        top_logprobs=tops,
        prompt_logprobs=scored,
    )


def response_seed(seed: int, prompt: int, sample: int) -> int:
    """The seed of one response, 31 bits."""
    digest = hashlib.blake2b(f"{seed}/{prompt}/{sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


def sharpening(first: Sequence[Completion], second: Sequence[Completion]) -> float:
    """How many times as far apart the second replies' likeliest tokens are (log-probabilities) as the first's.

    Of replies of one token each to the same prompts, drawn at two temperatures; NaN when the first's are all as likely.
    """
    gaps = np.zeros(2)
    for pair in zip(first, second, strict=True):
        tops = [reply.top_logprobs[0] for reply in pair]
        common = tops[0].keys() & tops[1].keys()  # which tokens are reported depends on the one that was drawn
        gaps += [np.ptp([top[token] for token in common]) if common else 0.0 for top in tops]
    return float(gaps[1] / gaps[0]) if gaps[0] > 0 else float("nan")


def _token_id(name: str) -> int:
    """442 from ``token_id:442``."""
    return int(name.removeprefix("token_id:"))
