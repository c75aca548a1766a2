"""Measures the cost of the proof after a publish to a vLLM server: seconds, and the tokens and passes of the server.

The server starts here, beside the trainer. Each publish moves all weights a little. The first one calibrates the band
and compiles, so it is left out. The tokens and passes are the server's own counts, and do not depend on the machine's
load. The tokens that the trainer scores include the padding.

    python tools/bench_proof.py MODEL                     # a table
    python tools/bench_proof.py MODEL --output FILE.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np

from rljax.data.tokenizer import load_tokenizer
from rljax.errors import run_cli
from rljax.policy.families import config_to_hf, read_config
from rljax.policy.hf import load_params
from rljax.rollout.build import policy_functions
from rljax.rollout.servers.engine import ServedEngine
from rljax.rollout.servers.handshake import Expectation
from rljax.rollout.servers.process import environment_python
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.servers.vllm.server import VllmConfig, start
from rljax.rollout.types import RolloutConfig

SECONDS = ("publish/load_s", "publish/warm_s", "publish/probe_s", "publish/score_s", "publish/stall_s")
CHECKSUMS = ("time/checksums_s", "time/server_checksums_s")  # the second lies in publish/load_s
COUNTS = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "cached_tokens": "vllm:prefix_cache_hits_total",
    "sampled_tokens": "vllm:generation_tokens_total",
    "passes": "vllm:iteration_tokens_total_count",
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of the policy")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of server and trainer")
    parser.add_argument("--publishes", type=int, default=3, help="measured publishes (3)")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args(argv)
    before = os.getloadavg()[0]
    config = VllmConfig(options.model, str(environment_python("vllm")), options.dtype, max_model_len=512)
    with start(config, timeout_s=900) as server:
        rounds = measure(server.url, options.model, options.dtype, options.publishes)
    for name in rounds[0]:
        print(f"{name:26}", *(f"{each[name]:10.6g}" for each in rounds))
    if options.output is not None:
        load = f"{before:.1f}, {os.getloadavg()[0]:.1f}"
        result = {"command": f"python tools/bench_proof.py {' '.join(argv)}", "cores": os.cpu_count()}
        result |= {"load before and after": load, "publishes": rounds}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(url: str, model: str, dtype: str, count: int) -> list[dict[str, float]]:
    """Returns the seconds and counts of ``count`` publishes."""
    policy, tokenizer = read_config(model), load_tokenizer(model)
    lines = (f"Question {i}: what is {7 * i + 12} + {3 * i + 5} - {i}? Answer:" for i in range(64))
    prompts = [np.asarray(tokenizer.encode(line), np.int32) for line in lines]
    functions, scored = policy_functions(policy, dtype), [0]
    functions = dataclasses.replace(functions, score=counting(functions.score, scored))
    rollout = RolloutConfig(engine="vllm", urls=(url,), dtype=dtype)
    expected = Expectation(rollout, config_to_hf(policy, dtype), 400)
    engine = ServedEngine(expected, VllmBackend(), functions, probe_prompts=prompts)
    try:
        params, rounds = load_params(model, policy), []
        engine.publish(params, 0)
        for number in range(count):
            params, known, scored[0] = jax.tree.map(lambda leaf: leaf * 1.01, params), counts(url), 0
            metrics = engine.publish(params, number + 1)
            done = {name: each - known[name] for name, each in counts(url).items()}
            done["computed_tokens"] = done["prompt_tokens"] - done["cached_tokens"] + done["sampled_tokens"]
            seconds = {name: metrics[name] for name in (*SECONDS, *CHECKSUMS)}
            proof = sum(metrics[name] for name in (*SECONDS[1:4], *CHECKSUMS))
            rounds.append({**seconds, "proof_s": proof, **done, "scored_tokens": scored[0]})
    finally:
        engine.close()
    return rounds


def counting(score: Callable[..., Any], scored: list[int]) -> Callable[..., Any]:
    """Returns ``score``, which then adds the padded tokens of its rows to ``scored[0]``."""

    def counted(params: Any, sequences: Sequence[np.ndarray]) -> Any:
        scored[0] += len(sequences) * -(-max(map(len, sequences)) // 64) * 64
        return score(params, sequences)

    return counted


def counts(url: str) -> dict[str, float]:
    """Returns the server's counts since its start."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    found = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:")}
    return {name: found[key] for name, key in COUNTS.items()}


if __name__ == "__main__":
    sys.exit(run_cli(main))
