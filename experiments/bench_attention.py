"""Attention of packed rows: time and memory of the blocks against the full square that they replaced.

    python experiments/bench_attention.py --output benchmarks/attention.json

The full square is here as it was: multiples of 1,024 tokens in chunks of 1,024 queries over all keys, recomputed in the
backward pass, other rows and those of 1,024 in one piece. Both are compiled, then timed in turns; a ratio above 1 says
that the blocks are faster. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.errors import run_cli
from rljax.plan.kernels import attention_flops
from rljax.policy.attention import ONE_PIECE, attend, packed_attention, segment_mask
from rljax.policy.attention_blocks import block_pairs, block_size, shared_blocks
from rljax.policy.head import matmul_precision

CHUNK = 1024


def full_square(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """The attention before the blocks: every query meets every key of its row."""
    t = q.shape[1]
    if t <= CHUNK or t % CHUNK:
        return attend(q, k, v, segment_mask(segment_ids))

    @jax.checkpoint
    def one_chunk(start: jax.Array) -> jax.Array:
        query = jax.lax.dynamic_slice_in_dim(q, start, CHUNK, axis=1)
        segment = jax.lax.dynamic_slice_in_dim(segment_ids, start, CHUNK, axis=1)
        causal = (start + jnp.arange(CHUNK))[:, None] >= jnp.arange(t)[None, :]
        return attend(query, k, v, causal[None] & (segment[:, :, None] == segment_ids[:, None, :]))

    return jnp.moveaxis(jax.lax.map(one_chunk, jnp.arange(0, t, CHUNK)), 0, 1).reshape(q.shape)


def segments_of(t: int, length: int) -> np.ndarray:
    """A row of ``t`` tokens full of segments of ``length``, the last one shorter."""
    return (np.arange(t, dtype=np.int32) // length + 1)[None]


def random_heads(t: int, heads: tuple[int, int, int]) -> list[np.ndarray]:
    """Normal q, k, v and gradient of the output, float64 [1, t, h, d]."""
    rng = np.random.default_rng(0)
    h, g, d = heads
    return [rng.normal(size=(1, t, n, d)) for n in (h, g, g, h)]


def compiled(
    attention: Any, arrays: list[np.ndarray], segments: np.ndarray, dtype: str, backward: bool
) -> tuple[Any, Any]:
    """(the compiled forward, or forward and backward; its arguments)."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, segment_ids: jax.Array) -> Any:
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, segment_ids), q, k, v)
        return (out, *pull(d_out)) if backward else out

    given = (*(jnp.asarray(x, dtype) for x in arrays), jnp.asarray(segments))
    with jax.default_matmul_precision(matmul_precision(dtype)):
        return jax.jit(run).lower(*given).compile(), given


def seconds(run: Callable[..., Any], given: Any) -> float:
    """Of one call."""
    start = time.perf_counter()
    jax.block_until_ready(run(*given))
    return time.perf_counter() - start


def in_turns(runs: list[tuple[Any, Any]], repeats: int, patience: float) -> list[list[float]]:
    """Seconds of each, ``repeats`` times, or fewer after ``patience`` seconds; the first call is not counted."""
    for run in runs:
        seconds(*run)
    times: list[list[float]] = []
    while len(times) < repeats and (not times or sum(map(sum, times)) < patience):
        times.append([seconds(*run) for run in runs])
    return times


def measure_time(
    t: int, length: int, dtype: str, heads: tuple[int, int, int], repeats: int, patience: float
) -> dict[str, Any]:
    """Times, temporaries and work of both on one row."""
    segments, arrays = segments_of(t, length), random_heads(t, heads)
    case: dict[str, Any] = {"tokens": t, "segment_tokens": min(t, length), "dtype": dtype}
    for name, backward in (("forward", False), ("forward_and_backward", True)):
        runs = [compiled(f, arrays, segments, dtype, backward) for f in (full_square, packed_attention)]
        times = in_turns(runs, repeats, patience)
        case[name] = {
            "full_square_s": statistics.median(old for old, _ in times),
            "blocks_s": statistics.median(new for _, new in times),
            "ratio": statistics.median(old / new for old, new in times),
            "ratios": [old / new for old, new in times],
            "full_square_temporaries": runs[0][0].memory_analysis().temp_size_in_bytes,
            "blocks_temporaries": runs[1][0].memory_analysis().temp_size_in_bytes,
        }
    if t > ONE_PIECE:
        block = block_size(t)
        n = -(-t // block)
        shared = np.asarray(shared_blocks(jnp.asarray(np.pad(segments[0], (0, -t % block)).reshape(n, block))))
        done = sum(bool(shared[i, j]) for i, j in block_pairs(n)) * block**2
        needed = attention_flops(np.bincount(segments[0]).tolist(), num_heads=1, head_dim=1).forward // 4
        case |= {"block": block, "pairs_of_square": done / t**2, "needed_of_square": needed / t**2}
    return case


def print_times(cases: list[dict[str, Any]]) -> None:
    """The table of ``measure_time``."""
    print("| tokens | segments of | dtype | pairs | forward | forward and backward | temporaries (MiB) |")
    print("|---|---|---|---|---|---|---|")
    for case in cases:
        both = case["forward_and_backward"]
        cells = [
            f"{part['full_square_s']:.3f} -> {part['blocks_s']:.3f} s, {part['ratio']:.2f}x"
            for part in (case["forward"], both)
        ]
        memory = f"{both['full_square_temporaries'] / 2**20:,.0f} -> {both['blocks_temporaries'] / 2**20:,.0f}"
        pairs = f"{case['pairs_of_square']:.1%}" if "pairs_of_square" in case else "100%"
        first = f"{case['tokens']:,} | {case['segment_tokens']:,} | {case['dtype']} | {pairs}"
        print(f"| {first} | {' | '.join(cells)} | {memory} |")


def main(argv: Sequence[str]) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[1024, 1152, 1536, 2048, 4096, 8192, 16384], help="row lengths"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of the timed heads")
    parser.add_argument("--segment-tokens", type=int, default=1000, help="of each segment of a packed row (1000)")
    parser.add_argument("--heads", nargs=3, type=int, default=[1, 1, 128], help="query, key-value, width (1 1 128)")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each (3)")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds after which no call is repeated (10)")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args(argv)
    heads = tuple(options.heads)
    lengths = [(t, length) for t in options.tokens for length in (t, options.segment_tokens)]
    times = [
        measure_time(*row, dtype, heads, options.repeats, options.patience)
        for dtype in options.dtypes
        for row in lengths
    ]
    print_times(times)
    if options.output:
        command = f"python experiments/bench_attention.py {' '.join(argv)}"
        device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
        result = {"command": command, "device": device, "heads": heads, "times": times}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
