"""Compares time and memory of the head in chunks of the vocabulary and of all logits at once, forward and backward.

    python experiments/bench_head.py --json benchmarks/head.json

Both ways compute log-probabilities and entropies of tokens over the vocabulary of Qwen3 (151,936), and their gradient.
Both are compiled and take turns. Memory is the size of the compiler's temporaries. Prints a Markdown table; a ratio
above 1 means that the chunks are faster, or take less memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.policy.head import matmul_precision, token_logprobs

VOCABULARY, WIDTH = 151_936, 256
CASES = [(256, "float32"), (1024, "float32"), (1024, "bfloat16")]


def all_logits(hidden: jax.Array, table: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes log-probabilities and entropies from all logits at once."""
    precision = matmul_precision(table.dtype)
    logits = jnp.einsum("nd,cd->nc", hidden, table, precision=precision, preferred_element_type=jnp.float32)
    logp = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0]
    return picked, -jnp.sum(jnp.exp(logp) * logp, axis=1)


def compiled(way: Callable[..., Any], arrays: tuple[jax.Array, ...]) -> Any:
    """Compiles the gradient of the summed log-probabilities, with the entropies."""

    def summed(hidden: jax.Array, table: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        logprobs, entropy = way(hidden, table, targets)
        return jnp.sum(logprobs), entropy

    return jax.jit(jax.value_and_grad(summed, argnums=(0, 1), has_aux=True)).lower(*arrays).compile()


def compare(tokens: int, dtype: str, rounds: int) -> dict[str, Any]:
    """Measures median seconds and temporaries of both ways, and the distance of their gradients."""
    rng = np.random.default_rng(0)
    hidden, table = (jnp.asarray(rng.normal(size=(n, WIDTH)) / 16, dtype) for n in (tokens, VOCABULARY))
    arrays = hidden, table, jnp.asarray(rng.integers(0, VOCABULARY, tokens), jnp.int32)
    ways = {"chunks": compiled(token_logprobs, arrays), "all": compiled(all_logits, arrays)}
    gradients = {name: jax.device_get(run(*arrays))[1] for name, run in ways.items()}
    apart = [
        float(np.linalg.norm(np.float64(own) - np.float64(plain)) / np.linalg.norm(np.float64(plain)))
        for own, plain in zip(gradients["chunks"], gradients["all"], strict=True)
    ]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            begun = time.perf_counter()
            jax.block_until_ready(run(*arrays))
            seconds[name].append(time.perf_counter() - begun)
    memory = {name: int(run.memory_analysis().temp_size_in_bytes) for name, run in ways.items()}
    return {
        "tokens": tokens,
        "dtype": dtype,
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "ratio": statistics.median(b / a for a, b in zip(seconds["chunks"], seconds["all"], strict=True)),
        "temporary_bytes": memory,
        "memory_ratio": memory["all"] / memory["chunks"],
        "gradients_differ_by": max(apart),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way (7)")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    cases = []
    print(
        "| tokens, dtype | chunks ms | all ms | all / chunks | chunks MiB | all MiB | all / chunks | gradients differ |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for tokens, dtype in CASES:
        one = compare(tokens, dtype, options.rounds)
        cases.append(one)
        own, plain = (one["seconds"][way] * 1e3 for way in ("chunks", "all"))
        small, large = (one["temporary_bytes"][way] / 2**20 for way in ("chunks", "all"))
        times, sizes = f"{own:.0f} | {plain:.0f} | {one['ratio']:.2f}", f"{small:.0f} | {large:.0f}"
        print(
            f"| {tokens}, {dtype} | {times} | {sizes} | {one['memory_ratio']:.0f} | {one['gradients_differ_by']:.1e} |"
        )
        sys.stdout.flush()
    if options.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores; jax {jax.__version__}"
        report = {"command": shlex.join(["python", *sys.argv]), "machine": machine, "cases": cases}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
