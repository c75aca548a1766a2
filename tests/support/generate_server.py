"""A server with vLLM's /inference/v1/generate that samples with an engine of this process, and keeps its answers."""

import base64
import io
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from rljax.rollout.engine import TurnRequest
from rljax.rollout.types import SamplingParams

LIMITS = (64, 320)  # the engine compiles once for each limit, so a request's limit is rounded up
VERSIONS = ("default", "run.1")  # the first token of a turn is of version 0, and the others are of version 1


class GenerateServer:
    """The server; ``kept`` has the responses to each prompt, whose key is the tuple of its tokens."""

    def __init__(self, engine):
        self.kept, self._engine, self._seeds, self._lock = {}, engine, itertools.count(), threading.Lock()
        self._httpd = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._httpd.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self._httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._httpd.shutdown()
        self._httpd.server_close()

    def answer(self, body):
        """Returns the reply to a request. The experts of a token are its id and half of it."""
        tokens, asked = body["token_ids"], body["sampling_params"]
        limit = min(each for each in LIMITS if each >= asked["max_tokens"])
        stops = tuple(asked["stop_token_ids"])
        params = SamplingParams(limit, asked["temperature"], stops, reported=max(0, asked["logprobs"] - 1))
        with self._lock:
            request = TurnRequest(0, 1, np.asarray(tokens, np.int32), asked["max_tokens"])
            (response,) = self._engine.answer_round([request], params, seed=next(self._seeds))
            self.kept.setdefault(tuple(tokens), []).append(response)
        ids, scores, content = response.token_ids.tolist(), response.logprobs.tolist(), []
        for t, (token, logprob) in enumerate(zip(ids, scores, strict=True)):
            likeliest = [] if response.tops is None else zip(*(part[t].tolist() for part in response.tops), strict=True)
            tops = [(token, logprob), *likeliest]
            content.append(_scored(token, logprob) | {"top_logprobs": [_scored(*each) for each in tops]})
        first, rest = ((name, *place) for name, place in zip(VERSIONS, ((0, 1), (1, len(ids))), strict=True))
        spans = [dict(zip(("version", "start", "end"), span, strict=True)) for span in (first, rest)[: len(ids)]]
        return {
            "token_ids": ids,
            "finish_reason": "length" if response.truncated else "stop",
            "logprobs": {"content": content},
            "weight_versions": spans,
            "routed_experts": _npy(routes_of([*tokens, *ids])),
        }


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


def _handler(server):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            found = self.path == "/inference/v1/generate"
            reply = json.dumps({"choices": [server.answer(body)]} if found else {"error": "Not Found"}).encode()
            self.send_response(200 if found else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *args):
            pass

    return Handler
