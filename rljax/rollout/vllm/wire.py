"""Requests to vLLM's two token endpoints and what their replies mean: plain data, no I/O.

``/inference/v1/generate`` reports which weight version sampled which tokens; ``/v1/completions`` is the fallback of
servers that do not have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rljax.errors import ReplyError
from rljax.rollout.served.wire import Completion, Request

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"


class VllmWire:
    """See served.wire.Wire."""

    name = "vLLM"
    routes: Sequence[str] = (GENERATE, COMPLETIONS)
    model = "policy"

    def body(self, route: str, request: Request, model: str) -> dict[str, Any]:
        """See Wire.

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
        as_ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return {"model": model, "prompt": tokens, **as_ids, **sampling}

    def completion(self, route: str, reply: Mapping[str, Any]) -> Completion:
        """See Wire.

        Raises:
          ReplyError: a field is missing or of another type, there is not one choice, or tokens and log-probabilities
            do not match.
        """
        try:
            (choice,) = reply["choices"]
            if choice.get("index", 0) != 0:
                raise ValueError(f"the choice of another place, {choice['index']}")
            tokens = choice["token_ids"]
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
            completion = Completion(
                token_ids=np.array([_whole(token) for token in tokens], np.int32),
                logprobs=np.array([_number(value) for value in logprobs], np.float32),
                finish_reason=str(choice["finish_reason"]),
                spans=_spans(choice.get("weight_versions")),
                top_logprobs=tuple({_whole(token): _number(value) for token, value in top.items()} for top in tops),
                prompt_logprobs=tuple(
                    {int(token): _number(item["logprob"]) for token, item in (top or {}).items()} for top in prompt
                ),
            )
            others = list(named) != list(tokens) or len(logprobs) != len(tokens)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            said = f"{type(error).__name__} {error}"
            raise ReplyError(f"{route} answered with no completion, {said}: {str(reply)[:300]}") from error
        if others and completion.finish_reason != "abort":
            raise ReplyError(f"{route} gave {len(tokens)} tokens and log-probabilities of {len(named)} others")
        return completion


def _spans(given: Any) -> tuple[tuple[str, int, int], ...] | None:
    """(version, start, end) of each; none at all is the same as not reported."""
    spans = tuple((str(span["version"]), _whole(span["start"]), _whole(span["end"])) for span in given or ())
    return spans or None


def _token_id(name: str) -> int:
    """442 from ``token_id:442``."""
    return int(name.removeprefix("token_id:"))


def _whole(value: Any) -> int:
    """``value``, which JSON gave as a whole number: no boolean, no text, no 5.0."""
    if type(value) is not int:
        raise TypeError(f"expected a whole number, got {value!r}")
    return value


def _number(value: Any) -> float:
    """``value``, which JSON gave as a number; NaN and infinity are numbers to Python's JSON."""
    if type(value) not in (int, float):
        raise TypeError(f"expected a number, got {value!r}")
    return float(value)
