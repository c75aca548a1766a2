"""Tests of the plugin's endpoint from the client's side: requests are gathered, and each is answered in a line."""

import asyncio
import base64
import contextlib
import hashlib
import json
import math
import socket
import struct
import threading
import tracemalloc

import numpy as np
import pytest
from opened_clients import listed_asks, opened, quick
from vllm_fake import as_base64, flat_scores, hash_of

from rljax.errors import ReplyError, ServerError
from rljax.rollout.servers.http import Http
from rljax.rollout.servers.replies import check_completion
from rljax.rollout.servers.requests import Request
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.servers.vllm.server import ROLLOUTS
from rljax.rollout.types import SamplingParams

pytestmark = pytest.mark.timeout(60)
PROMPT = np.array([3, 4, 5], np.int32)
REQUEST = Request(PROMPT, SamplingParams(2, reported=2), vocab_size=64)
QUICK = quick(attempts=3, wait_s=0.001)
REPLY = {
    "prompt_hash": hash_of(PROMPT),
    "token_ids": as_base64([9, 2], "<i4"),
    "finish_reason": "length",
    "scores": flat_scores([[(9, -4.0), (1, -0.5), (2, -1.5)], [(2, -1.5), (1, -0.5), (2, -1.5)]]),
    "weight_versions": [{"version": "v1", "start": 0, "end": 2}],
}


def read(reply, request=REQUEST):
    completion = VllmBackend().completion(ROLLOUTS, json.dumps(reply).encode(), request)
    check_completion("http://server", completion, request, 64)
    return completion


def stream(client, count, vocab_size=64, metrics=None):
    requests = [Request(PROMPT + i, SamplingParams(2), seed=i) for i in range(count)]
    return client.stream(lambda: listed_asks(requests), None, vocab_size, metrics)


# ---- The content of a reply ----


def test_a_reply_is_read():
    """It names its prompt by a hash of little-endian integers, on which other releases must agree."""
    completion = read(REPLY)
    assert completion.response.tolist() == [9, 2]
    assert completion["rollout_logprobs"].tolist() == [-4.0, -1.5]
    assert completion.spans == (("v1", 0, 2),)
    assert completion["top_ids"].tolist() == [[1, 2], [1, 2]]
    assert completion["top_logprobs"].tolist() == [[-0.5, -1.5], [-0.5, -1.5]]
    scored = REPLY | {"prompt_scores": flat_scores([[], [(4, -0.25), (7, -1.0)], [(5, -0.5), (5, -0.5)]])}
    request = Request(PROMPT, SamplingParams(2), prompt_logprobs=1)
    assert read(scored, request).prompt_logprobs == ({}, {4: -0.25, 7: -1.0}, {5: -0.5})
    assert read(REPLY, request).prompt_logprobs == ()
    expected = hashlib.blake2b(struct.pack("<3i", 3, 4, 70_000), digest_size=8).digest()
    assert base64.b64decode(hash_of([3, 4, 70_000])) == expected


BAD = {
    "no scores": ({"scores": None}, "Expected `object`, got `null`"),
    "no base64": ({"token_ids": "%%%"}, "answered with no completion"),
    "half a number": ({"token_ids": base64.b64encode(b"12345").decode()}, "must be a multiple of element size"),
    "scores of others": ({"scores": flat_scores([[(9, -1.0)], [(3, -1.0)]])}, "log-probabilities of 2 others"),
    "a score less": ({"scores": flat_scores([[(9, -1.0)]])}, "gave 2 tokens and log-probabilities of 1 others"),
    "no score": ({"scores": flat_scores([[(9, -1.0)], []])}, "a position without a log-probability"),
    "NaN": ({"scores": flat_scores([[(9, math.nan)], [(2, -1.5)]])}, "gave a log-probability of nan"),
    "another prompt": ({"prompt_hash": hash_of([3, 4, 6])}, "gave the reply to another prompt than the request has"),
    "no prompt": ({"prompt_hash": ""}, "does not say which prompt it answers: install the same rljax beside both"),
}
for first, second, count in ((3, 4, 7), (-1, 7, 6)):
    scores = REPLY["scores"] | {"counts": as_base64([first, second], "<i4")}
    BAD[f"counted {first}"] = ({"scores": scores}, f"6 tokens with 6 log-probabilities, counted as {count}")


@pytest.mark.parametrize(("change", "said"), BAD.values(), ids=BAD.keys())
def test_a_reply_that_does_not_fit_together_is_refused(change, said):
    with pytest.raises(ReplyError, match=said):
        read(REPLY | change)


# ---- The server and the form of a request ----


def answers(found):
    return {place: reply.response.tolist() for place, reply in found}


def test_requests_are_gathered_and_failures_are_asked_again(fake):
    fake.fail_next, metrics = [500, 429, 503], {}
    with opened(fake.url, backend=QUICK) as client:
        assert answers(stream(client, 5, metrics=metrics)) == {(i, 0): [5 + i, 6 + i] for i in range(5)}
        assert client.report()["rollout/server_losses"] == 0
    assert metrics == {"rollout/requests": 8, "rollout/retries": 3}
    assert 0 < fake.seen[ROLLOUTS] < 8


def mixed_up(fake, monkeypatch, times):
    """Makes the server give each reply of its next ``times`` batches to the request after it."""
    left, sound = [times], fake.lines

    def lines(asked):
        left[0] -= 1
        for line in sound(asked):
            number, rest = line.split(b" ", 1)
            yield b"%d %b" % ((int(number) + (left[0] >= 0)) % len(asked), rest)

    monkeypatch.setattr(fake, "lines", lines)


def test_replies_of_other_prompts_are_not_taken_and_said_once(fake, monkeypatch, caplog):
    mixed_up(fake, monkeypatch, 2)
    with opened(fake.url, backend=QUICK) as client:
        assert answers(stream(client, 4)) == {(i, 0): [5 + i, 6 + i] for i in range(4)}
        (line,) = [record.getMessage() for record in caplog.records]
        said = f"{fake.url}/rljax/rollouts gave the reply to another prompt than the request has"
        assert line == f"{said}; no such reply is taken, rollout/retries counts them"
        mixed_up(fake, monkeypatch, 1000)
        with pytest.raises(ServerError, match=rf"^response \d failed 3 times; the last: {said}$"):
            dict(stream(client, 4))


# ---- Lines in the order of their arrival ----


class Scripted:
    """A server whose endpoint sends what the test says, in chunks, as the reply to the batch in ``asked``."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked, self.connection = [], None

    def accept(self):
        self.connection, _ = self._listener.accept()
        self.connection.settimeout(20)
        received = b""
        while b"\r\n\r\n" not in received:
            received += self.connection.recv(65536)
        head, _, body = received.partition(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        while len(body) < length:
            body += self.connection.recv(65536)
        self.asked = json.loads(body)
        self.connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

    def line(self, number, *cuts):
        """Sends the line of a response, in chunks that end at ``cuts``."""
        asked = self.asked[number]
        tokens = [asked["token_ids"][-1]] * asked["sampling_params"]["max_tokens"]
        reply = {"token_ids": as_base64(tokens, "<i4"), "finish_reason": "length"}
        reply["prompt_hash"] = hash_of(asked["token_ids"])
        reply["scores"] = flat_scores([[(token, -1.0)] for token in tokens])
        line = f"{number} 200 {json.dumps(reply)}\n".encode()
        for start, end in zip((0, *cuts), (*cuts, len(line)), strict=True):
            self.send(line[start:end])

    def send(self, content):
        self.connection.sendall(f"{len(content):x}\r\n".encode() + content + b"\r\n")

    def close(self):
        self._listener.close()
        if self.connection is not None:
            self.connection.close()


@pytest.fixture
def scripted():
    with contextlib.closing(Scripted()) as made:
        yield made


@contextlib.contextmanager
def streamed(scripted, act, count):
    """Yields the first response and the others of a batch of ``count`` requests. ``act`` sends the first."""
    with opened(scripted.url, backend=QUICK) as client:
        accepted = threading.Thread(target=lambda: (scripted.accept(), act()))
        found = stream(client, count)
        accepted.start()
        first = next(found)
        accepted.join()
        yield first, found


def test_a_response_comes_before_the_next_is_complete(scripted):
    with streamed(scripted, lambda: scripted.line(2, 1, 7, 40), 3) as ((place, reply), found):
        assert (place, reply.response.tolist()) == ((2, 0), [7, 7])
        scripted.line(0)
        scripted.line(1)
        assert sorted(place for place, _ in found) == [(0, 0), (1, 0)]


def test_a_stream_that_is_closed_closes_its_connection(scripted):
    with streamed(scripted, lambda: scripted.line(0), 2) as (_, found):
        found.close()
        assert scripted.connection.recv(1) == b""


def test_a_reply_is_not_kept_until_the_slowest_comes(scripted):
    """Eight of nine requests are answered with 1 MB each; none of them waits for its reply any more."""

    async def held():
        http = Http({})
        waiting = [asyncio.create_task(http.ask(scripted.url, ROLLOUTS, 20.0, {})) for _ in range(9)]
        await asyncio.to_thread(scripted.accept)
        for number in range(8):
            await asyncio.to_thread(scripted.send, b"%d 200 %b\n" % (number, b"x" * 2**20))
            assert len(await waiting.pop(0)) == 2**20
        found, _ = tracemalloc.get_traced_memory()
        await asyncio.to_thread(scripted.send, b"8 200 x\n")
        assert await waiting.pop() == b"x"
        await http.aclose()
        return found

    tracemalloc.start()
    try:
        assert asyncio.run(held()) < 6 * 2**20
    finally:
        tracemalloc.stop()


def test_a_batch_whose_server_dies_is_sampled_elsewhere(scripted, fake):
    """One response came before the loss. The others are asked of the other server, each once."""
    with opened(scripted.url, fake.url, backend=QUICK) as client:
        client.on_loop(client.server(fake.url).pause)
        found = stream(client, 4)
        dying = threading.Thread(target=lambda: (scripted.accept(), scripted.line(2), scripted.close()))
        dying.start()
        items = [next(found)]
        client.on_loop(client.server(fake.url).open, None)
        items += found
        dying.join()
        assert (client.report()["rollout/server_losses"], list(client.down())) == (1, [scripted.url])
    assert sorted(place for place, _ in items) == [(i, 0) for i in range(4)]
    assert sorted(prompt[-1] for prompt, _, _ in fake.asked) == [5, 6, 8]


def test_whatever_line_comes_back(fake):
    with opened(fake.url, backend=QUICK) as client:
        for line in (b"\n", b"x 200 {}\n", b"9 200 {}\n", b"0\n", b"0 200 {}\n", b"0 200 [\n", b"\xff\n"):
            fake.lines = lambda asked, line=line: iter([line])
            with pytest.raises(ServerError, match=r"^response 0 failed 3 times.*$"):
                list(stream(client, 1))
