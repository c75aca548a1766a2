"""A stand-in for a vLLM server, with the endpoints that the client uses.

Every sampled token has log-probability -1. The token at position t of a prompt has -t / 8. The top log-probabilities
are processed ones unless ``raw`` is set. Responses of more than one token have the ones of ``tops`` if it is set.
"""

import base64
import contextlib
import dataclasses
import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlparse

import numpy as np
from safetensors.numpy import load_file

from rljax.rollout.servers.vllm.server import ROLLOUTS, prompt_hash
from rljax.weights.format import PROTOCOL
from rljax.weights.sums import array_checksum

SHAPE = {
    **{"vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
    **{"num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
GENERATE = "/inference/v1/generate"


class FakeVllm:
    """A stand-in server whose settings are attributes; ``seen`` counts the requests by path."""

    def __init__(self, port=0):
        self.version, self.weights_path = "default", None
        self.logprob = -1.0
        self.policy = None  # a function of (prompt, settings) that returns tokens and their log-probabilities
        self.delay_s = self.token_s = 0.0  # the time of each request, and that of each token
        self.after_load_s = 0.0  # the additional time of requests after an update
        self.pauses = []  # the mode of each pause
        self.asked, self.sampling = [], []  # the (prompt, limit, seed) of each sample, and its settings
        self.tops = None  # maps a token to the (token, log-probability) pairs of its position, the sampled one first
        self.described = {}  # additional entries of the plugin's description
        self.forcing = {"way": "extra_args", "reason": ""}  # its answer to a client that gives the tokens to decode
        self.obeys, self.names_versions = True, True  # whether it decodes the given tokens, and names its versions
        self.block = 0  # the size of a block of its prefix cache (tokens), which it tells of; 0: it does not tell
        self.cached = set()  # the prefixes of prompts, in whole blocks, that it has computed
        self.fail_next = []  # the statuses of the next samples
        self.routes = {ROLLOUTS, GENERATE, "/weight_info"}
        self.dtype, self.protocol, self.max_logprobs = "float32", PROTOCOL, 20
        self.engines = 1  # the number of its engines, of one worker each
        self.model, self.root, self.finish = "policy", "nowhere", "length"
        self.raw, self.paused, self.asleep = False, False, False
        self.key = ""  # every route except /health needs this key
        self.refuse = {}  # the status by path
        self.not_loaded = set()  # the tensors that its next updates leave out
        self.seen, self.events = Counter(), []
        self.running, self.most_running = 0, 0
        self._lock = threading.Condition()
        self._holds, self._given_up = False, 0
        self._httpd = _Server(("127.0.0.1", port), _handler(self))
        self.port = self._httpd.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self):
        with self._lock:
            self._holds = False
            self._lock.notify_all()
        self._httpd.shutdown()
        self._httpd.server_close()

    def answer(self, method, path, body):
        self.seen[path] += 1
        if path in (ROLLOUTS, GENERATE, "/weight_info") and path not in self.routes:
            return 404, {"error": "Not Found"}
        if path in self.refuse:
            return self.refuse[path], {"error": {"message": "no such thing"}}
        if path in ("/sleep", "/wake_up"):
            self.asleep = path == "/sleep"
        if self.asleep and path.endswith(("/generate", "_weight_update", "_weights")):
            return 500, {"error": {"message": "it sleeps"}}
        told = {
            "/health": dict,
            "/is_sleeping": lambda: {"is_sleeping": self.asleep},
            "/is_paused": lambda: {"is_paused": self.paused},
            "/v1/models": lambda: {"data": [{"id": self.model, "root": self.root, "max_model_len": 128}]},
            "/version": lambda: {"version": "fake"},
            "/weight_info": lambda: {"weight_version": self.version},
            "/get_world_size": lambda: {"world_size": self.engines if body["include_dp"] == "true" else 1},
            "/collective_rpc": lambda: {"results": [self._call(body["method"], *body.get("args", ()))]},
        }
        if path in told:
            return 200, told[path]()
        if path == ROLLOUTS:
            return (200, self.lines(body)) if method == "POST" else (405, {"detail": "Method Not Allowed"})
        if path.endswith("/generate"):
            return self._sample(body) if method == "POST" else (405, {"detail": "Method Not Allowed"})
        if path in ("/pause", "/resume"):
            with self._lock:
                self.paused = path == "/pause"
                self._holds = self.paused and body["mode"] != "wait"
                self._given_up += self._holds and body["mode"] == "abort"
                self.pauses += [body["mode"]] if path == "/pause" else []
                self._lock.notify_all()
        if path == "/finish_weight_update":
            self.version = body["weight_version"]
        if path == "/update_weights":
            self.weights_path = body["update_info"]["path"]
        self.events.append(path)
        return 200, {}

    def _call(self, method, *arguments):
        if method == "rljax_force":
            return self.forcing
        if method == "rljax_checksums":
            return self.checksums(*arguments)
        assert method == "rljax_describe", method
        facts = {"protocol": self.protocol, "vllm": "fake", "dtype": self.dtype, "quantization": None, "shape": SHAPE}
        facts |= {"max_model_len": 128, "max_logprobs": self.max_logprobs, "block_size": 16, "backend": "rljax_file"}
        return facts | self.described

    def checksums(self):
        tensors = {}
        for file in Path(self.weights_path).glob("*.safetensors"):
            tensors |= {name: dataclasses.astuple(array_checksum(array)) for name, array in load_file(file).items()}
        return {"tag": self.version, "tensors": tensors | dict.fromkeys(self.not_loaded), "seconds": 0.25}

    def lines(self, asked):
        """Yields the lines of rljax's endpoint; each has the answer of /inference/v1/generate to its request."""
        with ThreadPoolExecutor(len(asked)) as threads:
            bodies = [{"model": self.model, **each} for each in asked]
            sampled = [threads.submit(self.answer, "POST", GENERATE, body) for body in bodies]
            for each in as_completed(sampled):
                status, reply = each.result()
                number = sampled.index(each)
                said = json.dumps(rollout_reply(reply, asked[number]["token_ids"]) if status == 200 else reply)
                yield f"{number} {status} {said}\n".encode()

    def _sample(self, body):
        with self._lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            status = self.fail_next.pop(0) if self.fail_next else 200
        try:
            time.sleep(self.delay_s + (self.after_load_s if self.pauses[1:] else 0.0))
            return self._sampled(body, status)
        finally:
            with self._lock:
                self.running -= 1

    def _sampled(self, body, status):
        if status != 200:
            return status, {"error": {"message": f"told to fail with {status}"}}
        if body["model"] != self.model:
            return 404, {"error": {"message": f"there is no model {body['model']}"}}
        sampling, prompt = body["sampling_params"], body["token_ids"]
        self.asked.append((prompt, sampling["max_tokens"], sampling["seed"]))
        self.sampling.append(sampling)
        tokens, spans, finish = [], [], self.finish
        given = sampling.get("trace_decode_token_ids") or sampling.get("extra_args", {}).get("rljax_tokens")
        given = given if self.obeys else None
        logprobs = [self.logprob] * sampling["max_tokens"]
        if self.policy is not None:
            given, logprobs = self.policy(prompt, sampling)
        with self._lock:
            given_up = self._given_up
        for i in range(sampling["max_tokens"]):
            time.sleep(self.token_s)
            with self._lock:
                self._lock.wait_for(lambda: not self._holds or self._given_up > given_up, timeout=30)
                if self._given_up > given_up:
                    finish = "abort"
                    break
                tokens.append((prompt[-1] + i) % 64 if given is None else given[i])
                if not spans or spans[-1]["version"] != self.version:
                    spans.append({"version": self.version, "start": i})
                spans[-1]["end"] = i + 1
        self.events.append("sample")
        sharpness = 1.0 if self.raw else max(sampling["temperature"], 1e-3)
        count = sampling["logprobs"]
        tops = [{t: -float(t) / sharpness for t in range(count)}] * len(tokens)
        if self.tops is not None and sampling["max_tokens"] > 1:
            tops = [dict(self.tops(token)[:count]) for token in tokens]
        scored = None
        if "prompt_logprobs" in sampling:
            if sampling["prompt_logprobs"] > 64:  # the engine of the real server ends
                return 500, {"error": {"message": "selected index k out of range"}}
            likely = {str((60 + i) % 64): {"logprob": -4.0 - i} for i in range(sampling["prompt_logprobs"])}
            scored = [None] + [{**likely, str(token): {"logprob": -t / 8}} for t, token in enumerate(prompt) if t]
        content = [
            {
                "token_id": token,
                "logprob": value,
                "top_logprobs": [{"token_id": t, "logprob": v} for t, v in top.items()],
            }
            for token, value, top in zip(tokens, logprobs, tops, strict=False)
        ]
        choice = {"token_ids": tokens, "finish_reason": finish, "logprobs": {"content": content}}
        choice["weight_versions"] = spans if self.names_versions else None
        told = self.block and {"prompt_tokens_details": {"cached_tokens": self._from_cache(prompt)}}
        return 200, {"choices": [choice], "prompt_logprobs": scored, "usage": told or {"prompt_tokens": len(prompt)}}

    def _from_cache(self, prompt):
        """Returns the number of tokens of the prompt in cached blocks, and caches all its whole blocks."""
        with self._lock:
            blocks = [tuple(prompt[:end]) for end in range(self.block, len(prompt), self.block)]
            known = sum(block in self.cached for block in blocks)
            self.cached.update(blocks)
        return known * self.block


def rollout_reply(reply, prompt):
    """Returns the reply of rljax's endpoint to ``prompt`` that corresponds to one of /inference/v1/generate."""
    (choice,) = reply["choices"]
    content = choice["logprobs"]["content"]
    rows = [[(each["token_id"], each["logprob"])] for each in content]
    for row, each in zip(rows, content, strict=True):
        row += [(top["token_id"], top["logprob"]) for top in each["top_logprobs"]]
    scored = reply.get("prompt_logprobs")
    of_prompt = scored and [[(int(t), v["logprob"]) for t, v in (row or {}).items()] for row in scored]
    return {
        "prompt_hash": hash_of(prompt),
        "token_ids": as_base64(choice["token_ids"], "<i4"),
        "finish_reason": choice["finish_reason"],
        "scores": flat_scores(rows),
        "prompt_scores": of_prompt and flat_scores(of_prompt),
        "weight_versions": choice.get("weight_versions"),
        "routed_experts": choice.get("routed_experts"),
        "cached_tokens": reply.get("usage", {}).get("prompt_tokens_details", {}).get("cached_tokens"),
    }


def flat_scores(rows):
    """Returns the (token, log-probability) pairs of each position in the format of rljax's endpoint."""
    return {
        "counts": as_base64([len(row) for row in rows], "<i4"),
        "token_ids": as_base64([token for row in rows for token, _ in row], "<i4"),
        "logprobs": as_base64([value for row in rows for _, value in row], "<f4"),
    }


def hash_of(prompt):
    """Returns the hash by which a reply of rljax's endpoint names its prompt, as it stands in JSON."""
    return base64.b64encode(prompt_hash(np.asarray(prompt, "<i4").tobytes())).decode()


def as_base64(values, dtype):
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 2048
    allow_reuse_address = True


def _handler(fake):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self):
            length = int(self.headers.get("Content-Length") or 0)
            path, query = urlparse(self.path).path, parse_qsl(urlparse(self.path).query)
            body = json.loads(self.rfile.read(length)) if length else {}
            body = body if isinstance(body, list) else body | dict(query)
            if fake.key and path != "/health" and self.headers["Authorization"] != f"Bearer {fake.key}":
                status, reply = 401, {"error": "this server wants a key"}
            else:
                status, reply = fake.answer(self.command, path, body)
            parts = [json.dumps(reply).encode()] if isinstance(reply, dict) else reply
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            if isinstance(reply, dict):
                self.send_header("Content-Length", str(len(parts[0])))
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            with contextlib.suppress(OSError):  # the client has gone away
                for part in parts:
                    self.wfile.write(part)

        do_GET = do_POST = _answer

        def log_message(self, *args):
            pass

    return Handler
