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
            scored = tuple(
                {int(token): float(item["logprob"]) for token, item in (top or {}).items()} for top in prompt
            )
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


def _token_id(name: str) -> int:
    """442 from ``token_id:442``."""
    return int(name.removeprefix("token_id:"))
