"""Rounding of attention and its gradients in float32 and 16-bit runs, against float64.

    python experiments/attention_errors.py --output benchmarks/attention_errors.json

On the same rounded inputs: the full square of ``bench_attention.py``, the blocks that replaced it, and the TPU's kernel
in Pallas' interpreter, whose products of float32 probabilities are exact here and not on a TPU. An error is a root mean
square over that of the true values. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_attention import compiled, full_square, random_heads, segments_of

from rljax.errors import run_cli
from rljax.policy.attention_blocks import block_attention
from rljax.policy.attention_splash import splash_attention

NAMES = ("output", "dq", "dk", "dv")
# Dtype, and what the gradient of the output is multiplied by: in float16 small ones may round to zero.
CASES = (("float32", 1.0), ("bfloat16", 1.0), ("float16", 1.0), ("float16", 2.0**-12))
Arrays = list[np.ndarray]


def float64_gradients(arrays: Arrays, segments: np.ndarray) -> Arrays:
    """Output, dq, dk and dv of one row, head by head."""
    q, k, v, d_out = (x[0] for x in arrays)
    mask = np.tri(len(q), dtype=bool) & (segments[0][:, None] == segments[0][None, :])
    found = [np.zeros_like(x) for x in (q, q, k, v)]
    scale = q.shape[2] ** -0.5
    for head in range(q.shape[1]):
        group = head * k.shape[1] // q.shape[1]
        keys, values, cotangent = k[:, group], v[:, group], d_out[:, head]
        scores = np.where(mask, q[:, head] @ keys.T * scale, -np.inf)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        dp = cotangent @ values.T
        ds = p * (dp - np.sum(p * dp, axis=1, keepdims=True)) * scale
        found[0][:, head], found[1][:, head] = p @ values, ds @ keys
        found[2][:, group] += ds.T @ q[:, head]
        found[3][:, group] += p.T @ cotangent
    return found


def measure_errors(t: int, length: int, dtype: str, heads: tuple[int, int, int], scale: float) -> dict[str, Any]:
    """Errors of each implementation, and their ratios to those of the full square."""
    segments = segments_of(t, length)
    q, k, v, d_out = random_heads(t, heads)
    rounded = [np.asarray(jnp.asarray(x, dtype)).astype(np.float64) for x in (q, k, v, d_out * scale)]
    expected = float64_gradients(rounded, segments)
    implementations: dict[str, Any] = {"full_square": full_square, "blocks": block_attention}
    if dtype == "bfloat16":
        implementations["splash_interpreted"] = functools.partial(splash_attention, interpret=True)
    case: dict[str, Any] = {"tokens": t, "segment_tokens": min(t, length), "dtype": dtype, "gradient_scale": scale}
    for name, attention in implementations.items():
        run, given = compiled(attention, rounded, segments, dtype, backward=True)
        got = [np.asarray(x[0], np.float64) for x in run(*given)]
        errors = [np.sqrt(np.mean((x - true) ** 2) / np.mean(true**2)) for x, true in zip(got, expected, strict=True)]
        case[name] = dict(zip(NAMES, map(float, errors), strict=True))
        case[f"{name}_ratio"] = {part: case[name][part] / case["full_square"][part] for part in NAMES}
    return case


def print_errors(cases: list[dict[str, Any]]) -> None:
    """The table of ``measure_errors``."""
    print(f"| segments of | dtype | gradient scale | implementation | {' | '.join(NAMES)} |")
    print("|---|---|---|---|---|---|---|---|")
    for case in cases:
        first = f"{case['segment_tokens']:,} | {case['dtype']} | {case['gradient_scale']:.3g}"
        for name in ("full_square", "blocks", "splash_interpreted"):
            if name in case:
                cells = (f"{case[name][part]:.2e} ({case[f'{name}_ratio'][part]:.2f})" for part in NAMES)
                print(f"| {first} | {name.replace('_', ' ')} | {' | '.join(cells)} |")


def main(argv: Sequence[str]) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of the row, a multiple of 1024 (2048)")
    parser.add_argument("--segment-tokens", type=int, default=1000, help="of each segment of a packed row (1000)")
    parser.add_argument("--heads", nargs=3, type=int, default=[2, 1, 128], help="query, key-value, width (2 1 128)")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args(argv)
    rows = [(options.tokens, options.tokens), (options.tokens, options.segment_tokens)]
    cases = [measure_errors(*row, dtype, tuple(options.heads), scale) for row in rows for dtype, scale in CASES]
    print_errors(cases)
    if options.output:
        command = f"python experiments/attention_errors.py {' '.join(argv)}"
        result = {"command": command, "jax": jax.__version__, "heads": options.heads, "cases": cases}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
