"""Requests to vLLM's two token endpoints and what their replies mean: plain data, no I/O.

``/inference/v1/generate`` reports which weight version sampled which tokens; ``/v1/completions`` is the fallback of
servers that do not have it.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from rljax.errors import ReplyError
from rljax.rollout.servers.wire import Completion, Request

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"


Scores = TypeVar("Scores")
Item = TypeVar("Item")


# What is read of a reply; the decoder skips other fields and makes no Python object of them. ``gc`` is off where
# thousands of objects would set off the garbage collector: none of them can be part of a cycle.
class _Scored(msgspec.Struct, gc=False):
    logprob: float


class _Sampled(_Scored, gc=False):
    token_id: int


class _SampledAmongTops(_Sampled):
    top_logprobs: list[_Sampled]


class _Content(msgspec.Struct, Generic[Item]):
    content: list[Item]


class _Named(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]


class _NamedAmongTops(_Named):
    top_logprobs: list[dict[str, float]]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


_PromptScores = list[dict[int, _Scored] | None] | None


class _Choice(msgspec.Struct, Generic[Scores], kw_only=True):
    token_ids: list[int]
    finish_reason: str | None
    logprobs: Scores
    index: int = 0
    weight_versions: list[_Span] | None = None
    prompt_logprobs: _PromptScores = None  # of COMPLETIONS
    routed_experts: bytes | None = None  # of a .npy file, in base64


class _Reply(msgspec.Struct, Generic[Scores]):
    choices: list[_Choice[Scores]]
    prompt_logprobs: _PromptScores = None  # of GENERATE


# By route, and whether the likeliest tokens are read.
_DECODERS: dict[tuple[str, bool], msgspec.json.Decoder[Any]] = {
    (GENERATE, False): msgspec.json.Decoder(_Reply[_Content[_Sampled] | None]),
    (GENERATE, True): msgspec.json.Decoder(_Reply[_Content[_SampledAmongTops] | None]),
    (COMPLETIONS, False): msgspec.json.Decoder(_Reply[_Named]),
    (COMPLETIONS, True): msgspec.json.Decoder(_Reply[_NamedAmongTops]),
}


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
            sampling["prompt_logprobs"] = request.top_logprobs
        tokens = request.prompt.tolist()
        if route == GENERATE:
            return {"model": model, "token_ids": tokens, "sampling_params": sampling}
        as_ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return {"model": model, "prompt": tokens, **as_ids, **sampling}

    def completion(self, route: str, reply: bytes, request: Request) -> Completion:
        """See Wire.

        Raises:
          ReplyError: a field is missing or of another type, there is not one choice, or tokens and log-probabilities
            do not match.
        """
        has_tops = request.top_logprobs > 0
        try:
            read = _DECODERS[route, has_tops].decode(reply)
            (choice,) = read.choices
            if choice.index != 0:
                raise ValueError(f"the choice of another place, {choice.index}")
            tokens = choice.token_ids
            read_scores = _read_content if route == GENERATE else _read_named
            are_others, logprobs, tops = read_scores(choice, has_tops)
            completion = Completion(
                token_ids=np.array(tokens, np.int32),
                logprobs=logprobs,
                finish_reason=str(choice.finish_reason),
                spans=tuple((span.version, span.start, span.end) for span in choice.weight_versions or ()) or None,
                top_logprobs=tops,
                prompt_logprobs=tuple(
                    {token: scored.logprob for token, scored in (top or {}).items()}
                    for top in read.prompt_logprobs or choice.prompt_logprobs or ()
                ),
                routes=None if request.routes is None else _read_routes(choice.routed_experts),
            )
        except (ValueError, ArithmeticError, RecursionError) as error:
            said = f"{type(error).__name__} {error}"
            shown = " ".join(reply[:300].decode(errors="replace").split())
            raise ReplyError(f"{route} answered with no completion, {said}: {shown}") from error
        if (are_others or len(logprobs) != len(tokens)) and completion.finish_reason != "abort":
            raise ReplyError(f"{route} gave {len(tokens)} tokens and log-probabilities of {len(logprobs)} others")
        return completion


def _read_routes(file: bytes | None) -> np.ndarray | None:
    """Integers [tokens - 1, layers, k] from a .npy file; no pickled object is read."""
    if file is None:
        return None
    found = np.load(io.BytesIO(file), allow_pickle=False)
    if not isinstance(found, np.ndarray):
        raise ValueError("routed_experts is no .npy file")
    return found


# Whether a choice scores other tokens than it gives; float32 [t] log-probabilities; the likeliest tokens at each place.
_Parts = tuple[bool, np.ndarray, tuple[Mapping[int, float], ...]]


def _read_content(choice: Any, has_tops: bool) -> _Parts:
    """Of a choice of GENERATE."""
    content = choice.logprobs.content if choice.logprobs else []
    are_others = list(map(attrgetter("token_id"), content)) != choice.token_ids
    tops = ({top.token_id: top.logprob for top in item.top_logprobs} for item in content) if has_tops else ()
    return are_others, _floats(map(attrgetter("logprob"), content)), tuple(tops)


def _read_named(choice: Any, has_tops: bool) -> _Parts:
    """Of a choice of COMPLETIONS, whose tokens are named ``token_id:442``."""
    scored = choice.logprobs
    are_others = scored.tokens != list(map("token_id:{}".format, choice.token_ids))
    tops = ({_token_id(name): x for name, x in top.items()} for top in scored.top_logprobs) if has_tops else ()
    return are_others, _floats(scored.token_logprobs), tuple(tops)


def _floats(values: Iterable[float]) -> np.ndarray:
    with np.errstate(over="ignore"):  # infinity is refused by check_completion
        return np.fromiter(values, np.float64).astype(np.float32)


def _token_id(name: str) -> int:
    """442 from ``token_id:442``."""
    return int(name.removeprefix("token_id:"))
