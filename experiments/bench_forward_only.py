"""What a step saves when groups without signal take a forward alone, and what the saving costs in numbers.

    python experiments/bench_forward_only.py --json benchmarks/forward_only.json

A tiny Qwen3 on the CPU takes steps on batches of which no, half or all groups carry loss: once as they are packed, and
once with every micro-batch taking forward and backward, the same executable and the same rows, the two ways in turn.
Prints a Markdown table. Times are processor seconds of all threads, because other programs may run beside; the share
saved is what counts, and depends on the model: of the matrix products with weights, a forward is a third.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.policy.config import PolicyConfig
from rljax.policy.model import init_params
from rljax.schedule import inject_learning_rate
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.measure import DiagnosisConfig
from rljax.trainer.objective import Objective
from rljax.trainer.packing import PackedBatch, TrainSequence, max_micro_batches, pack
from rljax.trainer.state import create_state
from rljax.trainer.step import PrecisionConfig, TrainStep

POLICY = PolicyConfig(512, 128, 384, 3, 4, 2, 32, tie_word_embeddings=True)
GROUPS, GROUP, PROMPT, LIMIT, ROW, ROWS = 16, 8, 16, 240, 256, 4
SIGNAL = (1.0, 0.5, 0.0)


def make_sequences(share: float) -> list[TrainSequence]:
    """Long-tailed lengths; the first ``share`` of the groups carry loss."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(70), 0.8, GROUPS * GROUP), 1, LIMIT).astype(int)
    return [
        TrainSequence(
            rng.integers(0, POLICY.vocab_size, PROMPT).astype(np.int32),
            rng.integers(0, POLICY.vocab_size, length).astype(np.int32),
            -rng.exponential(7.0, length).astype(np.float32),
            float(rng.normal()),
            i // GROUP < share * GROUPS,
        )
        for i, length in enumerate(lengths)
    ]


def make_step(shape: tuple[int, int, int]) -> tuple[TrainStep, Any]:
    """A step that keeps its gradient, and its state."""
    mesh, tx = make_mesh(MeshConfig(1, 1)), inject_learning_rate(lambda rate: optax.trace(decay=0.0), 1.0)
    step = TrainStep(
        POLICY,
        tx,
        mesh,
        precision=PrecisionConfig(compute_dtype="float32"),
        objective=Objective(LossConfig(), CorrectionConfig(), GROUPS * GROUP, LIMIT),
        batch_shape=shape,
        diagnosis=DiagnosisConfig(),
    )
    return step, lambda: create_state(init_params(POLICY, 0), POLICY, tx, mesh, dynamic_scale=False)


def timed(step: TrainStep, state: Any, batch: PackedBatch) -> tuple[float, Any, dict[str, np.ndarray]]:
    """Processor seconds, gradient and row of one step."""
    start = time.process_time()
    state, row, _ = jax.block_until_ready(step(state, batch, 0.0, True))
    return time.process_time() - start, jax.device_get(state.opt_state.inner_state.trace), jax.device_get(row)


def compare(step: TrainStep, new_state: Any, batch: PackedBatch, rounds: int) -> dict[str, Any]:
    """The batch as packed against all of it forward and backward."""
    ways = {"forward_alone": batch, "all_backward": batch._replace(with_loss=batch.used)}
    found: dict[str, list[Any]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, given in ways.items():
            found[name].append(timed(step, new_state(), given))
    seconds = {name: float(np.median([each[0] for each in runs])) for name, runs in found.items()}
    (_, grads, row), (_, all_grads, all_row) = found["forward_alone"][0], found["all_backward"][0]
    norms = [float(optax.tree.norm(tree)) for tree in (jax.tree.map(np.subtract, grads, all_grads), all_grads)]
    gaps = [abs(row[key] - all_row[key]) / (abs(all_row[key]) + 1e-9) for key in row if key != "optimizer/grad_noise"]
    return {
        "micro_batches": int(batch.used),
        "with_loss": int(batch.with_loss),
        "processor_seconds": seconds,
        "saved": 1 - seconds["forward_alone"] / seconds["all_backward"],
        "gradient_difference": norms[0] / norms[1] if norms[1] else norms[0],
        "largest_row_difference": float(max(np.max(gap) for gap in gaps)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args(arguments)
    shape = max_micro_batches(GROUPS * GROUP, PROMPT + LIMIT, ROW, ROWS), ROWS, ROW
    step, new_state = make_step(shape)
    cases = {}
    for share in SIGNAL:
        batch = pack(make_sequences(share), row_tokens=ROW, rows_per_micro_batch=ROWS, micro_batches=shape[0])
        if not cases:
            timed(step, new_state(), batch)  # compiles
        cases[f"{share:g} of the groups with signal"] = compare(step, new_state, batch, options.rounds)
    print("| batch | micro-batches | with loss | all backward ms | forward alone ms | saved | gradient differs by |")
    print("|---|---|---|---|---|---|---|")
    for name, case in cases.items():
        alone, whole = (case["processor_seconds"][way] * 1e3 for way in ("forward_alone", "all_backward"))
        counts = f"{case['micro_batches']} | {case['with_loss']} | {whole:.0f} | {alone:.0f}"
        print(f"| {name} | {counts} | {case['saved']:.1%} | {case['gradient_difference']:.1e} |")
    if options.json:
        found = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared; jax {jax.__version__}, float32",
            "compilations": step.compilations,
            "cases": cases,
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
