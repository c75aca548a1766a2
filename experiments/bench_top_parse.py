"""Times the reading of replies that hold the likeliest tokens, and measures their memory.

    python experiments/bench_top_parse.py --json benchmarks/top_parse.json

One reply is a response of 8,192 tokens, each with its 20 likeliest tokens, as vLLM and SGLang send it. Reading is
parsing and checking. Times are of this process's processor. The memory is what Python and NumPy allocate at the peak
of reading, beside the reply itself. ``kept`` is the size of the arrays that stay. ``longest pause`` is the longest
time that an event loop stands still while the reply is read on a thread beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from rljax.rollout.servers.kind import Backend
from rljax.rollout.servers.replies import check_completion
from rljax.rollout.servers.requests import Completion, Request
from rljax.rollout.servers.sglang.client import GENERATE as SGLANG
from rljax.rollout.servers.sglang.client import SglangBackend
from rljax.rollout.servers.vllm.client import GENERATE, VllmBackend
from rljax.rollout.servers.vllm.server import ROLLOUTS, prompt_hash
from rljax.rollout.types import SamplingParams

TOKENS, K, RESPONSES, VOCABULARY = 8192, 20, 1024, 151_936
TICK_S = 0.001
PROMPT = np.zeros(8, np.int32)


def make_rows(rng: np.random.Generator, tokens: int = TOKENS) -> list[list[tuple[int, float]]]:
    """Returns (token, log-probability) pairs by position as vLLM lists them: the sampled token, then the likeliest."""
    rows = []
    for _ in range(tokens):
        logits = np.sort(rng.normal(0.0, 3.0, K + 1))[::-1]
        logprobs = (logits - np.log(np.exp(logits).sum()) - 0.01).astype(np.float32).tolist()
        ids = rng.choice(VOCABULARY, K + 1, replace=False).tolist()
        sampled = min(int(rng.zipf(2.0)) - 1, K)
        pairs = list(zip(ids, logprobs, strict=True))
        rows.append([pairs[sampled], *pairs[:sampled], *pairs[sampled + 1 :]])
    return rows


def vllm_reply(rows: list[list[tuple[int, float]]], k: int) -> bytes:
    """Returns a reply of vLLM's endpoint to a request for the ``k`` likeliest tokens."""
    ids = [row[0][0] for row in rows]
    shown = [row if k else row[:1] for row in rows]
    content = [
        {
            "token_id": row[0][0],
            "logprob": row[0][1],
            "rank": 1,
            "top_logprobs": [{"token_id": token, "logprob": value, "rank": 1} for token, value in row],
        }
        for row in shown
    ]
    choice = {"index": 0, "logprobs": {"content": content}, "finish_reason": "length", "token_ids": ids}
    spans = {"weight_versions": [{"version": "v1", "start": 0, "end": len(ids)}]}
    return json.dumps({"choices": [choice | spans]}, separators=(",", ":")).encode()


def own_reply(rows: list[list[tuple[int, float]]], k: int) -> bytes:
    """Returns a reply of rljax's endpoint in vLLM to ``PROMPT``. It lists the sampled token before the likeliest."""
    shown = [[row[0], *sorted(row, key=lambda pair: -pair[1])[:k]] for row in rows]

    def encoded(values: list[float], dtype: str) -> str:
        return base64.b64encode(np.asarray(values, dtype).tobytes()).decode()

    pairs = [pair for row in shown for pair in row]
    scores = {
        "counts": encoded([len(row) for row in shown], "<i4"),
        "token_ids": encoded([token for token, _ in pairs], "<i4"),
        "logprobs": encoded([value for _, value in pairs], "<f4"),
    }
    spans = [{"version": "v1", "start": 0, "end": len(rows)}]
    ids = encoded([row[0][0] for row in rows], "<i4")
    prompt = base64.b64encode(prompt_hash(PROMPT.tobytes())).decode()
    reply = {
        "prompt_hash": prompt,
        "token_ids": ids,
        "finish_reason": "length",
        "scores": scores,
        "weight_versions": spans,
    }
    return json.dumps(reply, separators=(",", ":")).encode()


def sglang_reply(rows: list[list[tuple[int, float]]], k: int) -> bytes:
    """Returns a reply of SGLang, which lists the likeliest tokens in order."""
    ordered = [sorted(((value, token, None) for token, value in row), reverse=True)[:k] for row in rows]
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [(row[0][1], row[0][0], None) for row in rows],
        "output_top_logprobs": ordered if k else [],
    }
    reply = {"output_ids": [row[0][0] for row in rows], "meta_info": meta}
    return json.dumps(reply, separators=(",", ":")).encode()


async def longest_pause(read: Callable[[], object]) -> float:
    """Returns the longest time (seconds) between two turns of the event loop while ``read`` runs on a thread."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as reader:
        done = loop.run_in_executor(reader, read)
        longest, last = 0.0, time.perf_counter()
        while not done.done():
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            longest, last = max(longest, now - last - TICK_S), now
        await done
    return longest


def measure(read: Callable[[], Completion], rounds: int) -> dict[str, float]:
    """Returns the medians of the time and of the longest pause (seconds), and the bytes at the peak and afterwards."""
    times, pauses = [], []
    for _ in range(rounds):
        start = time.process_time()
        read()
        times.append(time.process_time() - start)
        pauses.append(asyncio.run(longest_pause(read)))
    tracemalloc.start()
    kept = read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    arrays = [kept.token_ids, kept.logprobs, *(kept.tops or ())]
    return {
        "seconds": float(np.median(times)),
        "longest_pause_s": float(np.median(pauses)),
        "peak_bytes": peak,
        "kept_bytes": sum(array.nbytes for array in arrays),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="readings of each reply")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    rows = make_rows(np.random.default_rng(0))
    vllm, sglang = VllmBackend(), SglangBackend()
    cases: dict[str, tuple[Backend, str, int, bytes]] = {
        "vLLM, rljax's endpoint, k = 0": (vllm, ROLLOUTS, 0, own_reply(rows, 0)),
        "vLLM, rljax's endpoint, k = 20": (vllm, ROLLOUTS, K, own_reply(rows, K)),
        "vLLM, k = 0": (vllm, GENERATE, 0, vllm_reply(rows, 0)),
        "vLLM, k = 20": (vllm, GENERATE, K, vllm_reply(rows, K)),
        "SGLang, k = 0": (sglang, SGLANG, 0, sglang_reply(rows, 0)),
        "SGLang, k = 20": (sglang, SGLANG, K, sglang_reply(rows, K)),
    }
    results = {}
    print(
        "| reply of 8,192 tokens | reply | reading | longest pause | peak | kept | 1,024 replies: sent | read | kept |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, (backend, route, k, reply) in cases.items():
        request = Request(PROMPT, SamplingParams(TOKENS, reported=k), vocab_size=VOCABULARY)

        def read(backend=backend, route=route, reply=reply, request=request) -> Completion:  # type: ignore[no-untyped-def]
            completion = backend.completion(route, reply, request)
            check_completion("", completion, request, VOCABULARY)
            return completion

        found = measure(read, options.rounds) | {"reply_bytes": len(reply)}
        results[name] = found
        print(
            f"| {name} | {len(reply) / 2**20:.1f} MiB | {1000 * found['seconds']:.0f} ms "
            f"| {1000 * found['longest_pause_s']:.0f} ms | {found['peak_bytes'] / 2**20:.1f} MiB "
            f"| {found['kept_bytes'] / 2**20:.2f} MiB | {RESPONSES * len(reply) / 2**30:.2f} GiB "
            f"| {RESPONSES * found['seconds']:.0f} s | {RESPONSES * found['kept_bytes'] / 2**30:.2f} GiB |"
        )
    if options.json:
        sizes = {"tokens": TOKENS, "k": K, "responses": RESPONSES}
        command = f"python experiments/bench_top_parse.py --json {options.json}"
        options.json.write_text(json.dumps({"command": command, **sizes, "replies": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
