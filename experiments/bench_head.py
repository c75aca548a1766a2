"""Compares time and memory of the head in chunks of the vocabulary and of all logits at once, forward and backward.

    python experiments/bench_head.py --json benchmarks/head.json

Both ways compute log-probabilities and entropies of tokens over the vocabulary of Qwen3 (151,936), and their gradient.
The chunks also score k more tokens at each position (``ids``), or add up the squared probabilities (``collision``).
All ways are compiled and take turns. Memory is the size of the compiler's temporaries. Prints two Markdown tables. A
ratio above 1 in the first one means that the chunks are faster, or take less memory. A ratio of the second one is of
the chunks with more to compute to the chunks alone.
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
MORE: dict[str, tuple[int, bool]] = {"k = 20": (20, False), "k = 128": (128, False), "collision": (0, True)}
"""The additional work of the chunks: the number of ids at each position, and whether to add up squares."""


def all_logits(hidden: jax.Array, table: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes log-probabilities and entropies from all logits at once."""
    precision = matmul_precision(table.dtype)
    logits = jnp.einsum("nd,cd->nc", hidden, table, precision=precision, preferred_element_type=jnp.float32)
    logp = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0]
    return picked, -jnp.sum(jnp.exp(logp) * logp, axis=1)


def in_chunks(collision: bool = False) -> Callable[..., Any]:
    """Returns the head in chunks as a function of hidden states, table, targets and, if k > 0, of ids [n, k]."""

    def head(*arrays: jax.Array) -> Any:
        scores = token_logprobs(*arrays, collision=collision)
        logprobs = jnp.sum(scores.logprobs)
        return logprobs if scores.tops is None else logprobs + jnp.sum(scores.tops), (scores.entropy, scores.collision)

    return head


def at_once(*arrays: jax.Array) -> Any:
    logprobs, entropy = all_logits(*arrays)
    return jnp.sum(logprobs), entropy


def compiled(way: Callable[..., Any], arrays: tuple[jax.Array, ...]) -> Any:
    """Compiles the gradient of the summed log-probabilities, with the rest beside it."""
    return jax.jit(jax.value_and_grad(way, argnums=(0, 1), has_aux=True)).lower(*arrays).compile()


def compare(tokens: int, dtype: str, rounds: int, vocabulary: int) -> dict[str, Any]:
    """Measures median seconds and temporaries of all ways, and the distance of the gradients of the first two."""
    rng = np.random.default_rng(0)
    hidden, table = (jnp.asarray(rng.normal(size=(n, WIDTH)) / 16, dtype) for n in (tokens, vocabulary))
    arrays = hidden, table, jnp.asarray(rng.integers(0, vocabulary, tokens), jnp.int32)
    given = dict.fromkeys(("chunks", "all", *MORE), arrays)
    ways: dict[str, Any] = {"chunks": compiled(in_chunks(), arrays), "all": compiled(at_once, arrays)}
    for name, (k, collision) in MORE.items():
        if k:
            # The k ids at each position are different and come from the whole vocabulary.
            ids = (rng.integers(0, vocabulary, (tokens, 1)) + np.arange(k) * (vocabulary // k)) % vocabulary
            given[name] = (*arrays, jnp.asarray(ids, jnp.int32))
        ways[name] = compiled(in_chunks(collision), given[name])
    gradients = {name: jax.device_get(ways[name](*arrays))[1] for name in ("chunks", "all")}
    apart = [
        float(np.linalg.norm(np.float64(own) - np.float64(plain)) / np.linalg.norm(np.float64(plain)))
        for own, plain in zip(gradients["chunks"], gradients["all"], strict=True)
    ]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            begun = time.perf_counter()
            jax.block_until_ready(run(*given[name]))
            seconds[name].append(time.perf_counter() - begun)
    memory = {name: int(run.memory_analysis().temp_size_in_bytes) for name, run in ways.items()}

    def ratio(name: str) -> float:
        return statistics.median(b / a for a, b in zip(seconds["chunks"], seconds[name], strict=True))

    return {
        "tokens": tokens,
        "dtype": dtype,
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "ratio": ratio("all"),
        "temporary_bytes": memory,
        "memory_ratio": memory["all"] / memory["chunks"],
        "gradients_differ_by": max(apart),
        "more": {name: {"time": ratio(name), "memory": memory[name] / memory["chunks"]} for name in MORE},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way (7)")
    parser.add_argument("--tokens", type=int, help="only this number of tokens (256 and 1024)")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="entries of the vocabulary (151,936)")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    cases = []
    print(
        "| tokens, dtype | chunks ms | all ms | all / chunks | chunks MiB | all MiB | all / chunks | gradients differ |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    chosen = [(options.tokens, dtype) for dtype in ("float32", "bfloat16")] if options.tokens else CASES
    for tokens, dtype in chosen:
        one = compare(tokens, dtype, options.rounds, options.vocabulary)
        cases.append(one)
        own, plain = (one["seconds"][way] * 1e3 for way in ("chunks", "all"))
        small, large = (one["temporary_bytes"][way] / 2**20 for way in ("chunks", "all"))
        times, sizes = f"{own:.0f} | {plain:.0f} | {one['ratio']:.2f}", f"{small:.0f} | {large:.0f}"
        print(
            f"| {tokens}, {dtype} | {times} | {sizes} | {one['memory_ratio']:.0f} | {one['gradients_differ_by']:.1e} |"
        )
        sys.stdout.flush()
    print("\n| tokens, dtype | more | time | memory |\n|---|---|---|---|")
    for one in cases:
        for name, cost in one["more"].items():
            print(f"| {one['tokens']}, {one['dtype']} | {name} | {cost['time']:.2f} | {cost['memory']:.2f} |")
    if options.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores; jax {jax.__version__}"
        report = {"command": shlex.join(["python", *sys.argv]), "machine": machine, "cases": cases}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
