"""Requests to SGLang's ``/generate`` and what its replies mean: plain data, no I/O."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np

from rljax.errors import ReplyError
from rljax.rollout.servers.wire import Completion, Request

GENERATE = "/generate"


# What is read of a reply; the decoder skips other fields and makes no Python object of them.
class _Finish(msgspec.Struct):
    type: str


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


_Scored = tuple[float, int, Any]  # log-probability, token id, text (null)


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None
    output_token_logprobs: list[_Scored]
    output_top_logprobs: list[list[_Scored] | None] | None = None
    input_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    input_top_logprobs: list[list[_Scored] | None] | None = None
    weight_versions: list[_Span] | None = None


class _Reply(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


_DECODER = msgspec.json.Decoder(_Reply)
_NONE = float(np.finfo(np.float32).min)  # stands for the logarithm of a probability that is 0 in float32


class SglangWire:
    """See served.wire.Wire."""

    name = "SGLang"
    routes: Sequence[str] = (GENERATE,)
    model = "policy"

    def body(self, route: str, request: Request, model: str) -> dict[str, Any]:
        """See Wire.

        Everything that shapes the distribution is sent, so that no default of the server's can. ``ignore_eos`` would
        let the stop tokens of the request pass, too; the plugin has taken the model's own away.
        """
        stops = list(request.sampling.stop_token_ids)
        sampling: dict[str, Any] = {
            "max_new_tokens": request.sampling.max_response_tokens,
            "temperature": request.sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": not stops,
            "stop_token_ids": stops or None,
            "no_stop_trim": True,
        }
        if request.seed is not None:
            sampling["sampling_seed"] = request.seed
        return {
            "input_ids": request.prompt.tolist(),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": 0 if request.prompt_logprobs else -1,
            "top_logprobs_num": request.top_logprobs,
            "stream": False,
        }

    def completion(self, route: str, reply: bytes, request: Request) -> Completion:
        """See Wire.

        Raises:
          ReplyError: a field is missing or of another type, or tokens and log-probabilities do not match.
        """
        try:
            read = _DECODER.decode(reply)
            meta = read.meta_info
            tops: tuple[Mapping[int, float], ...] = ()
            if request.top_logprobs:
                tops = tuple(_known(top or ()) for top in meta.output_top_logprobs or ())
            prompt: tuple[Mapping[int, float], ...] = ()
            if request.prompt_logprobs:
                scored = meta.input_token_logprobs or ()
                likely = (meta.input_top_logprobs or ()) if request.top_logprobs else ()
                prompt = tuple(
                    {} if value is None else {other: v for v, other, _ in top or ()} | {token: value}
                    for (value, token, _), top in itertools.zip_longest(scored, likely[: len(scored)])
                )
            with np.errstate(over="ignore"):  # infinity is refused by check_completion
                values = map(itemgetter(0), meta.output_token_logprobs)
                logprobs = np.fromiter(values, np.float64).astype(np.float32)
            completion = Completion(
                token_ids=np.array(read.output_ids, np.int32),
                logprobs=logprobs,
                finish_reason="None" if meta.finish_reason is None else meta.finish_reason.type,
                spans=tuple((span.version, span.start, span.end) for span in meta.weight_versions or ()) or None,
                top_logprobs=tops,
                prompt_logprobs=prompt,
            )
        except (ValueError, ArithmeticError, RecursionError) as error:
            said = f"{type(error).__name__} {error}"
            shown = " ".join(reply[:300].decode(errors="replace").split())
            raise ReplyError(f"{route} answered with no completion, {said}: {shown}") from error
        are_others = list(map(itemgetter(1), meta.output_token_logprobs)) != read.output_ids
        if are_others and completion.finish_reason != "abort":
            count = len(meta.output_token_logprobs)
            raise ReplyError(f"{route} gave {len(read.output_ids)} tokens and log-probabilities of {count} others")
        return completion


def _known(top: Sequence[_Scored]) -> dict[int, float]:
    """The likeliest tokens, without those whose probability is less than float32 holds: SGLang takes its logarithm."""
    return {token: value for value, token, _ in top if value > _NONE}
