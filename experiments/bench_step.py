"""Compares a training step on the CPU with transformers and torch on the same tokens, as model and batch grow.

    python experiments/bench_step.py --json step.json

Both sides make policy-gradient steps of random Qwen3 policies with clipping and AdamW. rljax also measures the
mismatch. The other side is ``Qwen3ForCausalLM`` with autograd, log-softmax of all logits and ``torch.optim.AdamW``. A
step has one micro-batch of sequences of one length, so neither side pads. The two take turns. In bfloat16 torch
computes under autocast on float32 weights. In float32 the norms of the first gradients must agree within 1e-3. Prints a
Markdown table; a ratio above 1 means that rljax is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peer_steps import CLIP, DECAY, EPSILON, RATE, Case, first_weights, policy_of, rljax, sequences_of
from reports import write_report
from transformers import Qwen3ForCausalLM

from rljax.policy.hf import save_params

CASES = {
    "width 256, 4 layers, 8 x 256 tokens": Case(dtype="float32", remat="none"),
    "twice the tokens": Case(dtype="float32", remat="none", sequences=16),
    "sequences of twice the length": Case(dtype="float32", remat="none", tokens=512),
    "twice the width": Case(dtype="float32", remat="none", width=512),
    "twice the layers": Case(dtype="float32", remat="none", layers=8),
    "blocks recomputed": Case(dtype="float32"),
    "bfloat16": Case(remat="none"),
    "bfloat16, twice the width": Case(remat="none", width=512),
}


def torch_step(case: Case) -> Callable[[], float]:
    """Returns a function that makes the step of ``peer_steps.rljax`` with transformers and torch."""
    sequences, prompt = sequences_of(case), case.lengths()[0][0]
    with tempfile.TemporaryDirectory() as directory:
        save_params(directory, first_weights(case), policy_of(case))
        model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    if case.remat == "blocks":
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.999), eps=EPSILON, weight_decay=DECAY)
    tokens = torch.from_numpy(np.stack([np.concatenate(sequence) for sequence in sequences]).astype(np.int64))

    def run() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == "bfloat16"):
            logits = model(tokens, use_cache=False).logits
        logits = logits[:, prompt - 1 : -1].float()
        logprobs = torch.log_softmax(logits, dim=-1).gather(2, tokens[:, prompt:, None])[..., 0]
        (-torch.exp(logprobs - logprobs.detach()).mean()).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return float(norm)

    return run


def compare(case: Case, rounds: int) -> dict[str, Any]:
    """Measures the median seconds of both sides, which take turns."""
    ways = {"rljax": rljax(case).run, "torch": torch_step(case)}
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
    """Prints the table and writes the file; returns the exit status."""
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
        # After each case, because torch takes minutes in bfloat16.
        write_report(options.json, results, f"torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
