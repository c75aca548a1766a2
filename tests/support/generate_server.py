"""A server with vLLM's /inference/v1/generate that samples with an engine of this process, and keeps its answers."""

import base64
import io
import itertools
import threading

import numpy as np
from vllm_fake import FakeVllm

from rljax.rollout.engine import TurnRequest
from rljax.rollout.types import SamplingParams

LIMITS = (64, 320)  # the engine compiles once for each limit, so a request's limit is rounded up
VERSIONS = ("default", "run.1")  # the first token of a turn is of version 0, and the others are of version 1


class GenerateServer(FakeVllm):
    """The server; ``kept`` has the responses to each prompt, whose key is the tuple of its tokens."""

    def __init__(self, engine):
        self.kept, self._engine, self._seeds, self._sampling = {}, engine, itertools.count(), threading.Lock()
        super().__init__()

    def answer(self, method, path, body):
        """Returns the reply to a request. The experts of a token are its id and half of it."""
        if path != "/inference/v1/generate":
            return 404, {"error": "Not Found"}
        tokens, asked = body["token_ids"], body["sampling_params"]
        limit = min(each for each in LIMITS if each >= asked["max_tokens"])
        stops = tuple(asked["stop_token_ids"])
        params = SamplingParams(limit, asked["temperature"], stops, reported=max(0, asked["logprobs"] - 1))
        with self._sampling:
            request = TurnRequest(0, 1, np.asarray(tokens, np.int32), asked["max_tokens"])
            (response,) = self._engine.answer_round([request], params, seed=next(self._seeds))
            self.kept.setdefault(tuple(tokens), []).append(response)
        ids, content = response.response.tolist(), []
        for t, (token, logprob) in enumerate(zip(ids, response["rollout_logprobs"].tolist(), strict=True)):
            likeliest = []
            if "top_ids" in response.columns:
                likeliest = zip(response["top_ids"][t].tolist(), response["top_logprobs"][t].tolist(), strict=True)
            tops = [_scored(*each) for each in [(token, logprob), *likeliest]]
            content.append(_scored(token, logprob) | {"top_logprobs": tops})
        spans = [(VERSIONS[0], 0, 1), (VERSIONS[1], 1, len(ids))][: len(ids)]
        spans = [dict(zip(("version", "start", "end"), span, strict=True)) for span in spans]
        choice = {"token_ids": ids, "finish_reason": "length" if response.truncated else "stop"}
        choice |= {"logprobs": {"content": content}, "weight_versions": spans}
        choice["routed_experts"] = _npy(routes_of([*tokens, *ids]))
        return 200, {"choices": [choice]}


def routes_of(tokens):
    """Returns the experts that the server reports for ``tokens``, uint8 [t - 1, 1, 2]."""
    ids = np.asarray(tokens[:-1], np.uint8)
    return np.stack([ids, ids // 2], axis=-1)[:, None]


def _scored(token, logprob):
    return {"token_id": token, "logprob": logprob}


def _npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()
