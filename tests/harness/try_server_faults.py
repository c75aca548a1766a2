"""Plants faults between rljax and a rollout server, one kind after another, and reports how a rollout ends.

    python tests/harness/try_server_faults.py --out benchmarks/server_faults.md
    python tests/harness/try_server_faults.py --scripted --stall 3 --out /tmp/faults.md

A proxy stands before a vLLM server, which this program starts on configs/toy-base; with --scripted it is the stand-in
of the tests. Each fault is planted twice. In the first three replies of a rollout, the rollout should survive it. In
every reply, the rollout should end with one line, unless the fault only costs time. Each place of a response may occur
once (and must, if the rollout survives); its log-probabilities must be sound and its version the published one. FILE.md
gets the table, and FILE.json the numbers behind it. The exit status is 1 if a rollout hung, lost or doubled a response,
or ended otherwise.
"""

import asyncio
import contextlib
import functools
import json
import logging
import re
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

import jax
import numpy as np
import tyro

from rljax.errors import ServerError, run_cli
from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.rollout.build import make_engine
from rljax.rollout.engine import Samples
from rljax.rollout.servers.process import environment_python
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.servers.vllm.server import ROLLOUTS, VllmConfig, start
from rljax.rollout.types import ClientLimits, RolloutConfig, SamplingParams
from rljax.sharding import MeshConfig, make_mesh

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "configs/toy-base"
PLANTED = 3  # the replies that get a fault which a rollout should survive
VERSION = 3
TOKENS = 12
DOWN_S = 1.5  # the seconds for which the proxy refuses connections
SCRIPTED_VOCAB = 64


@dataclass(frozen=True)
class Arguments:
    out: Path | None = None  # The Markdown file for the table. The JSON file is beside it.
    scripted: bool = False  # Whether the stand-in of the tests takes the place of vLLM.
    prompts: int = 4  # The number of prompts of a rollout.
    responses: int = 8  # The number of responses to each prompt.
    stall: float = 60.0  # The seconds that a stall lasts.
    fault: tyro.conf.UseAppendAction[tuple[str, ...]] = ()  # A fault to plant. May be repeated. Without any: all.


def first_logprob(value):
    return lambda choice: choice["logprobs"]["content"][0].update(logprob=value)


def replace_token(choice):
    """Puts a token id that no vocabulary holds in both places that name the token."""
    choice["token_ids"][0] = choice["logprobs"]["content"][0]["token_id"] = 2**30


def repeat_token(choice):
    """Adds one token more than was asked for, with everything that belongs to it."""
    for part in (choice["token_ids"], choice["logprobs"]["content"]):
        part.append(part[-1])
    choice["weight_versions"][-1]["end"] += 1


CHOICES = {
    "log-probabilities missing": lambda choice: choice.update(logprobs=None),
    "a log-probability NaN": first_logprob(float("nan")),
    "a log-probability positive": first_logprob(0.5),
    "a log-probability as text": first_logprob("-0.5"),
    "a log-probability less": lambda choice: choice["logprobs"]["content"].pop(),
    "a token more than asked for": repeat_token,
    "a token id outside the vocabulary": replace_token,
    "tokens in another order": lambda choice: choice["token_ids"].insert(0, choice["token_ids"].pop() ^ 1),
    "weights of another run": lambda choice: choice["weight_versions"][0].update(version="default"),
    "spans that end too early": lambda choice: choice["weight_versions"][-1].update(end=1),
}
REPLIES = {
    **{name: lambda reply, act=act: act(reply["choices"][0]) for name, act in CHOICES.items()},
    "a choice twice": lambda reply: reply["choices"].append(reply["choices"][0]),
    "the second choice alone": lambda reply: reply["choices"][0].update(index=1),
    "no choice": lambda reply: reply["choices"].clear(),
}
STATUSES = {"500": 500, "503": 503}
COST_TIME = ("1 MB/s",)
CONNECTIONS = ("refused", "reset mid-body", "truncated JSON", "stall", "a byte now and then", *COST_TIME)
FAULTS = (*CONNECTIONS, *STATUSES, *REPLIES)


class Proxy:
    """A proxy that forwards HTTP to one server on its own thread, and plants the armed fault in replies to samples."""

    def __init__(self, upstream, stall_s):
        self._upstream, self._stall_s = (urlparse(upstream).hostname, urlparse(upstream).port), stall_s
        self._exchanges = set()  # the event loop holds tasks weakly
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._listener = asyncio.run_coroutine_threadsafe(self._listen(0), self._loop).result(30.0)
        self.port = self._listener.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.arm("", 0)

    def arm(self, fault, times):
        """Plants ``fault`` in the next ``times`` replies to samples."""
        self._fault, self._left, self.planted = fault, times, 0

    def close(self):
        self._loop.call_soon_threadsafe(self._listener.close)

    async def _listen(self, port):
        return await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=1024)

    async def _serve(self, reader, writer):
        self._exchanges.add(asyncio.current_task())
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            try:
                head, body = await read_message(reader)
                path = head.split(b" ")[1].decode()
                if path == ROLLOUTS:  # It is hidden, so that each sample has a reply of its own.
                    writer.write(message(404, b"{}"))
                    return
                fault = ""
                if self._left and path.endswith(("/generate", "/completions")):
                    self._left, self.planted, fault = self._left - 1, self.planted + 1, self._fault
                await self._answer(fault, head, body, writer)
            finally:
                self._exchanges.discard(asyncio.current_task())
                writer.close()

    async def _answer(self, fault, head, body, writer):
        if fault == "refused":
            writer.transport.abort()
            await self._refuse()
            return
        if fault in STATUSES:
            writer.write(message(STATUSES[fault], b'{"error": {"message": "planted"}}'))
            return
        status, content = await self._forward(head, body)
        if fault in REPLIES:
            reply = json.loads(content)
            REPLIES[fault](reply)
            content = json.dumps(reply).encode()
        if fault == "truncated JSON":
            content = content[: len(content) // 2]
        if fault == "stall":
            await asyncio.sleep(self._stall_s)
        sent = message(status, content)
        if fault == "reset mid-body":
            writer.write(sent[: -len(content) // 2])
            await writer.drain()
            writer.transport.abort()
            return
        slow = {"1 MB/s": (1000, 0.001), "a byte now and then": (1, self._stall_s / 50)}
        size, pause_s = slow.get(fault, (len(sent), 0.0))
        for begin in range(0, len(sent), size):
            writer.write(sent[begin : begin + size])
            await writer.drain()
            await asyncio.sleep(pause_s)

    async def _refuse(self):
        """Closes the listener for a moment; simultaneous refusals count as one fault."""
        if self._listener.is_serving():
            self._listener.close()
            await asyncio.sleep(DOWN_S if self._left < 1000 else 60.0)
            self._listener = await self._listen(self.port)

    async def _forward(self, head, body):
        reader, writer = await asyncio.open_connection(*self._upstream)
        writer.write(re.sub(rb"(?i)\r\nconnection:[^\r]*", b"\r\nConnection: close", head) + body)
        try:
            head, content = await read_message(reader)
        finally:
            writer.close()
        return int(head.split(b" ")[1]), content


async def read_message(reader):
    """Returns the head, with its empty line, and the body of an HTTP message that states its length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return head, await reader.readexactly(int(length[1])) if length else b""


def message(status, content):
    lines = [f"HTTP/1.1 {status} Planted", "Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + content


@contextlib.contextmanager
def scripted_server(limits):
    """Yields the stand-in's URL, a function from a URL to an engine that has the policy, and the vocabulary size."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import served_engines
    import vllm_fake

    def make(url):
        engine = served_engines.make(url, backend=VllmBackend(), **limits)
        engine.publish(served_engines.PARAMS, VERSION)
        return engine

    fake = vllm_fake.FakeVllm()
    yield fake.url, make, SCRIPTED_VOCAB
    fake.stop()


@contextlib.contextmanager
def real_server(limits):
    """Does the same as :func:`scripted_server` for a vLLM server, which runs inside the block."""
    policy = read_config(MODEL)
    params = load_params(MODEL, policy)

    def make(proxied):
        config = RolloutConfig(engine="vllm", urls=(proxied,), dtype="float32", **limits)
        mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        engine = make_engine(config, policy, mesh, max_prompt_tokens=16, max_tokens=64)
        engine.publish(params, VERSION)
        return engine

    log_path = Path(tempfile.mkdtemp(prefix="rljax-faults-")) / "server.log"
    python = str(environment_python("vllm"))
    with start(VllmConfig(str(MODEL), python, "float32", max_model_len=512, log_path=log_path)) as server:
        yield server.url, make, policy.vocab_size


def rollout(make, proxy, fault, times, prompts, n, vocab):
    """Runs a rollout of ``prompts * n`` responses with the fault planted ``times`` times; returns its row."""
    engine = make(proxy.url)
    responses, samples, ended = [], Samples(iter(())), ""
    try:
        proxy.arm(fault, times)
        asked = [np.arange(1, 4 + i, dtype=np.int32) for i in range(prompts)]
        samples = engine.generate(asked, n, SamplingParams(TOKENS), seed=0)
        responses.extend(samples)
    except (ServerError, RuntimeError) as error:
        ended = str(error)
    finally:
        planted = proxy.planted
        proxy.arm("", 0)
        counts = engine.fleet.report() | samples.metrics
        engine.close()
    places = [(response.prompt_index, response.sample_index) for response in responses]
    expected = [(i, j) for i in range(prompts) for j in range(n)]
    sound = all(is_sound(response, vocab) for response in responses) and "\n" not in ended
    once = sorted(places) == expected if not ended else len(set(places)) == len(places)
    counted = {key: int(counts.get(f"rollout/{key}", 0)) for key in ("retries", "server_losses")}
    return {"planted": planted, "ended": ended, "good": sound and once, "responses": len(places), **counted}


def is_sound(response, vocab):
    ids, logprobs = response.response, response["rollout_logprobs"]
    bounds = 0 <= ids.min() <= ids.max() < vocab and np.isfinite(logprobs).all() and logprobs.max() <= 1e-3
    return bool(bounds and len(ids) == TOKENS and response["version"].tolist() == [VERSION] * TOKENS)


def within(limit_s, work):
    """Returns the result of ``work``, or a row that says that it took too long or failed without a one-line error."""
    done = {"planted": 0, "ended": f"HUNG for {limit_s:g} s", "good": False, "responses": 0}

    def run():
        try:
            done.update(work())
        except Exception as error:
            logging.exception("not one line")
            done.update(ended=f"NOT ONE LINE: {type(error).__name__} {error}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return dict(done)


def said(row):
    if row["ended"]:
        text = re.sub(r"http://127\.0\.0\.1:\d+", "URL", row["ended"])
        return "ended in one line: " + (text if len(text) <= 150 else text[:147] + "...")
    survived = f"survived, {row['retries']} retries, {row['server_losses']} losses of the server"
    return f"{survived}, {row['responses']} responses"


def main(argv):
    options = tyro.cli(Arguments, args=argv, description=__doc__)
    logging.basicConfig(level=logging.ERROR)
    VllmBackend.attempts, VllmBackend.first_wait_s, VllmBackend.longest_wait_s = 4, 0.05, 0.5
    rows = []
    lines = ["| fault | planted | some replies | every reply | each response once |", "|---|---|---|---|---|"]
    # A stalled response is given up after half a stall and sampled again.
    limits = {"server_wait_s": 4 * DOWN_S, "limits": ClientLimits(request_timeout_s=options.stall / 2)}
    with (scripted_server if options.scripted else real_server)(limits) as (url, make, vocab):
        for fault in options.fault or FAULTS:
            row = {"fault": fault}
            for name, times in (("some", PLANTED), ("every", sys.maxsize)):
                proxy = Proxy(url, options.stall)
                work = functools.partial(rollout, make, proxy, fault, times, options.prompts, options.responses, vocab)
                row[name] = within(120.0 + 6 * options.stall, work)
                proxy.close()
            fitting = not row["some"]["ended"] and bool(row["every"]["ended"]) != (fault in COST_TIME)
            row["good"] = fitting and row["some"]["good"] and row["every"]["good"]
            rows.append(row)
            cells = [fault, str(row["some"]["planted"]), said(row["some"]), said(row["every"])]
            cells = [cell.replace("|", "\\|") for cell in [*cells, "yes" if row["good"] else "**NO**"]]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    bad = sum(not row["good"] for row in rows)
    print(f"{len(rows)} faults, {bad} not good")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
        options.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(run_cli(main))
