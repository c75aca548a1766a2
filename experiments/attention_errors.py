"""Measures the rounding of attention and its gradients in float32 and 16-bit runs, against float64.

    python experiments/attention_errors.py --output benchmarks/attention_errors.json

Two implementations get the same rounded inputs: the blocks, and the TPU's kernel in Pallas' interpreter. The
interpreter computes products of float32 probabilities exactly; a TPU does not. An error is a root mean square over the
root mean square of the true values. Prints a Markdown table.
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

from rljax.errors import run_cli
from rljax.policy.attention import splash_attention
from rljax.policy.flash import block_attention
from rljax.policy.head import matmul_precision

NAMES = ("output", "dq", "dk", "dv")
# Each case is a dtype and the factor of the output's gradient: small gradients may round to zero in float16.
CASES = (("float32", 1.0), ("bfloat16", 1.0), ("float16", 1.0), ("float16", 2.0**-12))
Arrays = list[np.ndarray]


def segments_of(t: int, length: int) -> np.ndarray:
    """Returns segment ids of a row of ``t`` tokens in segments of ``length`` (the last is shorter), int32 [1, t]."""
    return (np.arange(t, dtype=np.int32) // length + 1)[None]


def random_heads(t: int, heads: tuple[int, int, int]) -> Arrays:
    """Draws normal q, k, v and gradient of the output, float64 [1, t, h, d]."""
    rng = np.random.default_rng(0)
    h, g, d = heads
    return [rng.normal(size=(1, t, n, d)) for n in (h, g, g, h)]


def output_and_gradients(attention: Any, arrays: Arrays, segments: np.ndarray, dtype: str) -> Arrays:
    """Computes the output, dq, dk and dv of one row in ``dtype``; returns float64 [t, h, d] each."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, segment_ids: jax.Array) -> Any:
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, segment_ids), q, k, v)
        return (out, *pull(d_out))

    with jax.default_matmul_precision(matmul_precision(dtype)):
        results = jax.jit(run)(*(jnp.asarray(x, dtype) for x in arrays), jnp.asarray(segments))
    return [np.asarray(x[0], np.float64) for x in results]


def float64_gradients(arrays: Arrays, segments: np.ndarray) -> Arrays:
    """Computes the output, dq, dk and dv of one row in float64, head by head."""
    q, k, v, d_out = (x[0] for x in arrays)
    mask = np.tri(len(q), dtype=bool) & (segments[0][:, None] == segments[0][None, :])
    output, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    scale = q.shape[2] ** -0.5
    for head in range(q.shape[1]):
        group = head * k.shape[1] // q.shape[1]
        keys, values, cotangent = k[:, group], v[:, group], d_out[:, head]
        scores = np.where(mask, q[:, head] @ keys.T * scale, -np.inf)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        dp = cotangent @ values.T
        ds = p * (dp - np.sum(p * dp, axis=1, keepdims=True)) * scale
        output[:, head], dq[:, head] = p @ values, ds @ keys
        dk[:, group] += ds.T @ q[:, head]
        dv[:, group] += p.T @ cotangent
    return [output, dq, dk, dv]


def measure_errors(t: int, length: int, dtype: str, heads: tuple[int, int, int], scale: float) -> dict[str, Any]:
    """Measures the errors of each implementation on one row."""
    segments = segments_of(t, length)
    q, k, v, d_out = random_heads(t, heads)
    rounded = [np.asarray(jnp.asarray(x, dtype)).astype(np.float64) for x in (q, k, v, d_out * scale)]
    expected = float64_gradients(rounded, segments)
    implementations: dict[str, Any] = {"blocks": block_attention}
    if dtype == "bfloat16":
        implementations["splash_interpreted"] = functools.partial(splash_attention, interpret=True)
    case: dict[str, Any] = {"tokens": t, "segment_tokens": min(t, length), "dtype": dtype, "gradient_scale": scale}
    for name, attention in implementations.items():
        got = output_and_gradients(attention, rounded, segments, dtype)
        errors = [np.sqrt(np.mean((x - true) ** 2) / np.mean(true**2)) for x, true in zip(got, expected, strict=True)]
        case[name] = dict(zip(NAMES, map(float, errors), strict=True))
    return case


def print_errors(cases: list[dict[str, Any]]) -> None:
    """Prints the table of ``measure_errors``."""
    print(f"| segments of | dtype | gradient scale | implementation | {' | '.join(NAMES)} |")
    print("|---|---|---|---|---|---|---|---|")
    for case in cases:
        first = f"{case['segment_tokens']:,} | {case['dtype']} | {case['gradient_scale']:.3g}"
        for name in ("blocks", "splash_interpreted"):
            if name in case:
                cells = (f"{case[name][part]:.2e}" for part in NAMES)
                print(f"| {first} | {name.replace('_', ' ')} | {' | '.join(cells)} |")


def main(argv: Sequence[str]) -> int:
    """Prints the table and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a row, a multiple of 1024 (2048)")
    parser.add_argument("--segment-tokens", type=int, default=1000, help="tokens of a segment of a packed row (1000)")
    parser.add_argument(
        "--heads", nargs=3, type=int, default=[2, 1, 128], help="query heads, key-value heads, width (2 1 128)"
    )
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
