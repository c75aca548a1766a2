"""Compares a training step on the CPU with transformers and torch on the same tokens, as model and batch grow.

    python experiments/bench_step.py --json benchmarks/step.json

Both sides make policy-gradient steps of random Qwen3 policies with AdamW. rljax also measures the mismatch, and
recomputes blocks according to ``precision.remat``. The other side is ``Qwen3ForCausalLM`` with autograd, log-softmax of
all logits and ``torch.optim.AdamW``. A step has one micro-batch of sequences of one length, so neither side pads. The
two take turns. In bfloat16 torch computes under autocast on float32 weights. In float32 the norms of the first
gradients must agree within 1e-3. Prints a Markdown table; a ratio above 1 means that rljax is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.policy.config import PolicyConfig
from rljax.policy.hf import save_params
from rljax.policy.model import init_params
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.measure import DiagnosisConfig
from rljax.trainer.objective import Objective
from rljax.trainer.packing import TrainSequence, pack
from rljax.trainer.precision import PrecisionConfig
from rljax.trainer.state import OptimizerConfig, create_state, make_optimizer
from rljax.trainer.step import TrainStep

PROMPT = 32
RATE = 1e-6


class Case(NamedTuple):
    """The shape of a policy and of a micro-batch."""

    width: int = 256
    layers: int = 4
    sequences: int = 8
    length: int = 256
    remat: str = "none"
    dtype: str = "float32"

    @property
    def tokens(self) -> int:
        """The tokens of the micro-batch."""
        return self.sequences * self.length

    def policy(self) -> PolicyConfig:
        """Returns a Qwen3 policy with heads of 64."""
        heads = self.width // 64
        return PolicyConfig(
            4096, self.width, 3 * self.width, self.layers, heads, max(1, heads // 2), 64, tie_word_embeddings=True
        )


CASES = {
    "width 256, 4 layers, 8 x 256 tokens": Case(),
    "twice the tokens": Case(sequences=16),
    "sequences of twice the length": Case(length=512),
    "twice the width": Case(width=512),
    "twice the layers": Case(layers=8),
    "blocks recomputed": Case(remat="blocks"),
    "bfloat16": Case(dtype="bfloat16"),
    "bfloat16, twice the width": Case(width=512, dtype="bfloat16"),
}


def make_sequences(case: Case) -> list[TrainSequence]:
    """Makes sequences of random tokens; each response has an advantage."""
    rng, length = np.random.default_rng(0), case.length - PROMPT
    return [
        TrainSequence.of(
            rng.integers(0, 4096, PROMPT),
            rng.integers(0, 4096, length),
            {"rollout_logprobs": np.full(length, -8.3)},
            advantage=float(rng.normal()),
        )
        for _ in range(case.sequences)
    ]


def own_step(case: Case) -> Callable[[], float]:
    """Returns a function that makes one step of rljax and returns the norm of the gradient."""
    policy, mesh = case.policy(), make_mesh(MeshConfig(1, 1))
    tx = make_optimizer(OptimizerConfig(learning_rate=RATE, clip_norm=0.0))
    shape = (1, case.sequences, case.length)
    batch = pack(make_sequences(case), row_tokens=case.length, rows_per_micro_batch=case.sequences, micro_batches=1)
    step = TrainStep(
        policy,
        tx,
        mesh,
        precision=PrecisionConfig(compute_dtype=case.dtype, remat=case.remat),  # type: ignore[arg-type]
        objective=Objective(LossConfig(), CorrectionConfig(), case.sequences, case.length - PROMPT),
        batch_shape=shape,
        diagnosis=DiagnosisConfig(),
    )
    state = create_state(init_params(policy, 0), policy, tx, mesh, dynamic_scale=False)

    def run() -> float:
        nonlocal state
        state, row, _ = jax.block_until_ready(step(state, batch, RATE, False))
        return float(row["optimizer/grad_norm"])

    return run


def torch_step(case: Case) -> Callable[[], float]:
    """Returns a function that makes the same step with transformers and torch."""
    policy, sequences = case.policy(), make_sequences(case)
    with tempfile.TemporaryDirectory() as directory:
        save_params(directory, init_params(policy, 0), policy)
        model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    if case.remat == "blocks":
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.999), weight_decay=0.01)
    tokens = torch.from_numpy(np.stack([np.concatenate([s.prompt, s.response]) for s in sequences]).astype(np.int64))
    advantages = torch.tensor([[s.advantage] for s in sequences], dtype=torch.float32)
    count = case.sequences * (case.length - PROMPT)

    def run() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == "bfloat16"):
            logits = model(tokens, use_cache=False).logits
        logits = logits[:, PROMPT - 1 : -1].float()
        chosen = tokens[:, PROMPT:, None]
        logprobs = torch.log_softmax(logits, dim=-1).gather(2, chosen)[..., 0]
        loss = -(advantages * torch.exp(logprobs - logprobs.detach())).sum() / count
        loss.backward()
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]))
        optimizer.step()
        return float(norm)

    return run


def compare(case: Case, rounds: int) -> dict[str, Any]:
    """Measures the median seconds of both sides, which take turns."""
    ways = {"rljax": own_step(case), "torch": torch_step(case)}
    norms = {name: run() for name, run in ways.items()}  # the first run compiles
    if case.dtype == "float32" and abs(norms["rljax"] / norms["torch"] - 1) > 1e-3:
        raise RuntimeError(f"the two sides compute different gradients: norms {norms}")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            begun = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begun)
    ratios = [theirs / own for own, theirs in zip(seconds["rljax"], seconds["torch"], strict=True)]
    return {
        "case": case._asdict(),
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "gradient_norms": norms,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side (7)")
    parser.add_argument("--only", help="text in the names of the cases to run")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    torch.set_num_threads(os.cpu_count() or 1)
    results: dict[str, Any] = {}
    print("| case | rljax ms | torch ms | torch / rljax | from - to | rljax, to the first case |")
    print("|---|---|---|---|---|---|", flush=True)
    for name, case in CASES.items():
        if options.only and options.only not in name:
            continue
        results[name] = one = compare(case, options.rounds)
        own, theirs = (one["seconds"][way] * 1e3 for way in ("rljax", "torch"))
        base = next(iter(results.values()))["seconds"]["rljax"] * 1e3
        low, high = one["ratio_range"]
        print(f"| {name} | {own:.0f} | {theirs:.0f} | {one['ratio']:.2f} | {low:.2f} - {high:.2f} | {own / base:.2f} |")
        sys.stdout.flush()
        if options.json:  # written after each case, because torch takes minutes in bfloat16
            machine = f"{platform.machine()}, {os.cpu_count()} cores; jax {jax.__version__}, torch {torch.__version__}"
            report = {"command": shlex.join(["python", *sys.argv]), "machine": machine, "cases": results}
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
