"""Compares a training step of a Qwen3.5 hybrid with a step of a dense Qwen3 policy of the same width, on the CPU.

    python experiments/bench_hybrid.py --json benchmarks/hybrid_step.json
    python experiments/bench_hybrid.py --paper

Both policies are random and have eight layers of width 640, the same MLPs and vocabulary, and one row of 2,048 tokens.
Their blocks are computed again in the backward pass. Six blocks of the hybrid are delta nets, which have heads in the
proportion of Qwen3.5-4B. The sides take turns: steps, forwards alone, and a delta rule alone. Each ratio is hybrid to
dense, the median of the turns with the lowest and highest. ``--paper`` counts operations and bytes of Qwen3.5-4B on an
H100 instead.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from peer_steps import Case, first_weights, packed, policy_of, rljax
from reports import write_report

from rljax.policy.delta_net import CHUNK, DeltaTokens, chunked
from rljax.policy.model import cast_params
from rljax.policy.score import packed_logprobs

TOKENS = 2048
LAYERS, VALUE_HEADS = 8, 8
CASES = {dtype: Case(640, LAYERS, sequences=1, tokens=TOKENS, dtype=dtype) for dtype in ("float32", "bfloat16")}
Run = Callable[[], Any]


def forward(case: Case) -> Run:
    """Returns a function that computes the log-probabilities of the case's tokens."""
    params, policy, batch = cast_params(first_weights(case), case.dtype), policy_of(case), packed(case)
    rows = tuple(jnp.asarray(x[0]) for x in (batch.tokens, batch.segment_ids, batch.positions))
    compiled = jax.jit(lambda params, rows: packed_logprobs(params, policy, *rows).logprobs)
    return lambda: jax.block_until_ready(compiled(params, rows))


def rules(case: Case, *, backward: bool) -> Run:
    """Returns a function that computes the delta rule of one block, and with ``backward`` its gradients."""
    policy = policy_of(case)
    draw = np.random.default_rng(0)
    heads = (1, TOKENS, policy.delta_value_heads)
    wide = (draw.normal(size=(*heads, 128)).astype(np.float32) / 11 for _ in range(3))
    narrow = (-0.01 * draw.random(heads, np.float32), draw.random(heads, np.float32))
    tokens = DeltaTokens(*map(jnp.asarray, (*wide, *narrow)), jnp.zeros((1, TOKENS), bool))
    state = jnp.zeros((1, policy.delta_value_heads, 128, 128))

    def total(tokens: DeltaTokens) -> jax.Array:
        return jnp.sum(jnp.square(chunked(tokens, state)[0]))

    compiled = jax.jit(jax.grad(total, allow_int=True) if backward else total)
    return lambda: jax.block_until_ready(compiled(tokens))


def compare(case: Case, rounds: int) -> dict[str, Any]:
    """Measures the seconds of all ways, which take turns."""
    hybrid = case._replace(value_heads=VALUE_HEADS)
    steps = {"dense": rljax(case), "hybrid": rljax(hybrid)}
    ways: dict[str, Run] = {f"{name} step": step.run for name, step in steps.items()}
    ways |= {"dense forward": forward(case), "hybrid forward": forward(hybrid)}
    ways |= {"rule forward": rules(hybrid, backward=False), "rule both": rules(hybrid, backward=True)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):  # the first turn compiles
        for name, run in ways.items():
            begun = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - begun)
    found: dict[str, Any] = {"case": case._asdict(), "seconds": {k: statistics.median(v) for k, v in seconds.items()}}
    for part in ("step", "forward"):
        ratios = [a / b for a, b in zip(seconds[f"hybrid {part}"], seconds[f"dense {part}"], strict=True)]
        found[part] = {"ratio": statistics.median(ratios), "range": [min(ratios), max(ratios)]}
    return found | {"temporary_bytes": {name: step.facts["temporary_bytes"] for name, step in steps.items()}}


def paper() -> str:
    """Returns the operations and bytes of a forward of a token in one block of Qwen3.5-4B, with times on an H100."""
    d, keys, values, heads, inner = 2560, 16 * 128, 32 * 128, 32, 9216
    products = {
        "delta net": d * (2 * keys + 2 * values + 2 * heads) + values * d + 3 * d * inner,
        "attention": d * (2 * 16 * 256 + 2 * 4 * 256) + 16 * 256 * d + 3 * d * inner,
    }
    # Products of a chunk with k and q, the solved right side, three products with the state, one with new values.
    rule = 2 * heads * (2 * CHUNK * 128 + CHUNK * 256 + 3 * 128 * 128 + CHUNK * 128)
    # Each of q, k, v, y, the solved values and keys, and six arrays of pairs of a chunk, is written and read once.
    moved = 2 * 4 * heads * (6 * 128 + 6 * CHUNK)
    lines = [
        f"{name}: {2 * count / 1e6:.0f} MFLOP in 16 bits, {2 * count / 989e6:.3f} us"
        for name, count in products.items()
    ]
    times = f"{rule / 67e6:.3f} us by operations, {moved / 3.35e6:.3f} us by bytes"
    return "\n".join([*lines, f"rule: {rule / 1e6:.1f} MFLOP in float32, {moved / 1e6:.2f} MB, {times}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and writes the file; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side (5)")
    parser.add_argument("--only", help="text in the names of the cases to run")
    parser.add_argument("--paper", action="store_true", help="count operations and bytes on an H100")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    if options.paper:
        print(paper())
        return 0
    results: dict[str, Any] = {}
    print("| case | dense s | hybrid s | hybrid / dense | of the forward | rules s | MiB: dense, hybrid |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name, case in CASES.items():
        if options.only and options.only not in name:
            continue
        results[name] = one = compare(case, options.rounds)
        seconds = one["seconds"]
        rule = LAYERS * 3 / 4 * (seconds["rule forward"] + seconds["rule both"])
        ratios = (
            "{:.2f} ({:.2f}-{:.2f})".format(one[part]["ratio"], *one[part]["range"]) for part in ("step", "forward")
        )
        memory = ", ".join(f"{one['temporary_bytes'][side] / 2**20:.0f}" for side in ("dense", "hybrid"))
        steps = f"{seconds['dense step']:.2f} | {seconds['hybrid step']:.2f}"
        print(f"| {name} | {steps} | {' | '.join(ratios)} | {rule:.2f} | {memory} |", flush=True)
        write_report(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
