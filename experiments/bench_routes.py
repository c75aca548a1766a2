"""Measures the cost of router replay on the trainer's host: the bytes of routes, and the time to read and pack them.

    python experiments/bench_routes.py --json benchmarks/routes.json

A reply has 8,192 tokens after a prompt of 1,024, with and without the routes of Qwen3-30B-A3B (48 layers, 8 of 128
experts). Rows of 9,216 tokens are packed with and without routes. The parts take turns. A time is the median over the
rounds of this process's processor time, because other programs may run at the same time.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from bench_top_parse import vllm_reply

from rljax.policy.hub import KNOWN_SHAPES
from rljax.rollout.servers.replies import check_completion
from rljax.rollout.servers.requests import Request
from rljax.rollout.servers.vllm.client import GENERATE, VllmBackend
from rljax.rollout.types import SamplingParams
from rljax.trainer.packing import TrainSequence, pack

SHAPE = KNOWN_SHAPES["Qwen/Qwen3-30B-A3B-Base"]
PROMPT, RESPONSE, SEQUENCES = 1024, 8192, 16


def make_parts() -> dict[str, Callable[[], object]]:
    """Returns the functions to time by name."""
    rng = np.random.default_rng(0)
    tokens, logprobs = rng.integers(0, 151_000, RESPONSE).astype(np.int32), -rng.exponential(0.5, RESPONSE)
    layers, k = SHAPE.num_layers, SHAPE.experts_per_token
    routes = rng.integers(0, SHAPE.num_experts, (PROMPT + RESPONSE - 1, layers, k)).astype(np.uint8)
    file = io.BytesIO()
    np.save(file, routes)
    rows = [[pair] for pair in zip(tokens.tolist(), logprobs.astype(np.float32).tolist(), strict=True)]
    body = vllm_reply(rows, 0)
    plain = json.loads(body)
    plain["choices"][0]["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    bodies = {"without": body, "with": json.dumps(plain).encode()}
    prompt, sampling = rng.integers(0, 151_000, PROMPT).astype(np.int32), SamplingParams(RESPONSE)
    requests = {"without": Request(prompt, sampling), "with": Request(prompt, sampling, routes=(layers, k, 128))}
    sequence = TrainSequence(prompt, tokens, logprobs.astype(np.float32), 1.0, True)
    sequences = {"without": [sequence] * SEQUENCES, "with": [sequence._replace(routes=routes)] * SEQUENCES}

    def read(which: str) -> None:
        completion = VllmBackend().completion(GENERATE, bodies[which], requests[which])
        check_completion("", completion, requests[which], SHAPE.vocab_size)

    def fill(which: str) -> object:
        return pack(sequences[which], row_tokens=PROMPT + RESPONSE, rows_per_micro_batch=8, micro_batches=2)

    return {
        **{f"a reply {which} routes": lambda which=which: read(which) for which in bodies},  # type: ignore[misc]
        **{f"a sequence packed {which} routes": lambda which=which: fill(which) for which in bodies},  # type: ignore[misc]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each part")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    parts = make_parts()
    samples: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(options.rounds):
        for name, part in parts.items():
            start = time.process_time()
            part()
            samples[name].append((time.process_time() - start) / (SEQUENCES if "packed" in name else 1))
    medians = {name: float(np.median(times)) for name, times in samples.items()}
    for name, seconds in medians.items():
        print(f"| {name} | {1000 * seconds:.1f} ms |")
    if options.json:
        sizes = {"route_bytes_per_token": SHAPE.route_bytes, "tokens": PROMPT + RESPONSE}
        result = {"command": f"python experiments/bench_routes.py --json {options.json}", **sizes, "seconds": medians}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
