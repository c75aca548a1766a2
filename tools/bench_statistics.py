"""Measures the time and memory that the mismatch statistics add to a training step.

The program times the compiled statistics, and in turn with them the log-softmax of the same tokens over a vocabulary
(forward pass only). A training step does much more than this log-softmax, so the ratio of the two times is an upper
bound of the overhead. The memory is what the compiler reports.

    python tools/bench_statistics.py                          # print a table
    python tools/bench_statistics.py --output benchmarks/mismatch.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.mismatch import mismatch_statistics, read_tokens
from rljax.mismatch.correction import importance_statistics
from rljax.policy.head import TokenScores
from rljax.policy.model import ForwardStats
from rljax.trainer.measure import DiagnosisConfig
from rljax.trainer.measure import measure as measure_step
from rljax.trainer.packing import PackedBatch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4, help="rows of a micro-batch (default: 4)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a row (default: 2048)")
    parser.add_argument("--sequence", type=int, default=512, help="tokens of a sequence in packed rows (default: 512)")
    parser.add_argument(
        "--width",
        type=int,
        default=256,
        help="hidden size of the log-softmax that is timed for comparison (default: 256)",
    )
    parser.add_argument(
        "--vocabulary", type=int, default=18992, help="vocabulary size of that log-softmax (default: 18992)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds; each round times every case once (default: 9)")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    result = measure(parser.parse_args())
    for name, case in result["cases"].items():
        print(
            f"{name:28s} {case['median_ms']:9.3f} ms  {case['ratio_to_head']:8.4f} of the log-softmax  "
            f"{case['temporaries_mib']:8.2f} MiB  compiled in {case['compile_s']:.2f} s"
        )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compiles every case, times all of them in each round, and writes the result if ``--output`` is given."""
    compiled = {name: compile_case(function, arrays) for name, (function, arrays) in cases(options).items()}
    times: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(options.rounds):
        for name, (program, arrays, _) in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*arrays))
            times[name].append(time.perf_counter() - start)
    head = statistics.median(times["head_log_softmax"])
    result = {
        "hardware": f"{jax.devices()[0].device_kind}, {platform.machine()}, jax {jax.__version__}",
        "rows": options.rows,
        "tokens": options.tokens,
        "sequence": options.sequence,
        "vocabulary": options.vocabulary,
        "width": options.width,
        "rounds": options.rounds,
        "cases": {
            name: {
                "median_ms": 1e3 * statistics.median(times[name]),
                "ratio_to_head": statistics.median(times[name]) / head,
                "temporaries_mib": program.memory_analysis().temp_size_in_bytes / 2**20,
                "compile_s": compile_s,
            }
            for name, (program, _, compile_s) in compiled.items()
        },
    }
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    return result


def cases(options: argparse.Namespace) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Returns the (function, arguments) of each case by name."""
    rng = np.random.default_rng(0)
    shape = (options.rows, options.tokens)
    rollout = -rng.exponential(0.5, shape).astype(np.float32)
    trainer = (rollout + 1e-3 * rng.standard_normal(shape)).astype(np.float32)
    per_row = -(-options.tokens // options.sequence)
    ids = np.arange(options.tokens)[None] // options.sequence + per_row * np.arange(options.rows)[:, None]
    number = per_row * options.rows
    logprobs = tuple(map(jnp.asarray, (trainer, rollout, np.ones(shape, bool))))
    packed = (*logprobs, jnp.asarray(ids, jnp.int32))
    hidden = jnp.asarray(rng.standard_normal((*shape, options.width)), jnp.float32)
    table = jnp.asarray(0.02 * rng.standard_normal((options.width, options.vocabulary)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, options.vocabulary, shape), jnp.int32)

    def head(hidden: Any, table: Any, targets: Any) -> Any:
        logits = jnp.einsum("btd,dv->btv", hidden, table)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    def read(a: Any, b: Any, mask: Any, ids: Any) -> Any:
        return read_tokens(a, b, mask, sequence_ids=ids, num_sequences=number)

    return {
        "head_log_softmax": (head, (hidden, table, targets)),
        "statistics_rows": (lambda *rows: mismatch_statistics(read_tokens(*rows)), logprobs),
        "statistics_packed": (lambda *rows: mismatch_statistics(read(*rows)), packed),
        "importance_packed": (lambda *rows: importance_statistics(read(*rows)), packed),
        "whole_step_packed": (
            lambda a, b, mask, ids: measure_step(
                TokenScores(a, jnp.abs(a), stats=ForwardStats(jnp.float32(1.0), None)),
                _micro(b, mask, ids),
                number,
                DiagnosisConfig(),
            ),
            packed,
        ),
    }


def _micro(rollout: jax.Array, mask: jax.Array, ids: jax.Array) -> PackedBatch:
    """Returns a micro-batch with advantages of both signs and some tokens of older policies."""
    zeros = jnp.zeros(ids.shape, jnp.int32)
    advantages = jnp.where(ids % 2 == 0, 1.0, -1.0)
    return PackedBatch(zeros, zeros, zeros, ids, mask, mask, rollout, advantages, ids % 3, with_loss=None, used=None)


def compile_case(function: Callable[..., Any], arrays: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], float]:
    """Compiles and runs once; returns the program, its arguments and the time to trace and compile (seconds)."""
    start = time.perf_counter()
    program = jax.jit(function).lower(*arrays).compile()
    seconds = time.perf_counter() - start
    jax.block_until_ready(program(*arrays))
    return program, arrays, seconds


if __name__ == "__main__":
    main()
