"""Compares the tokens per second of the embedded engine, transformers' ``generate`` and a vLLM server on the CPU.

    python experiments/bench_decode.py --json benchmarks/decode.json

A random Qwen3 (width 256, 4 layers) in float32 samples 8 or 64 responses at a time. All prompts have one length, and
all responses another; none ends early. Each engine samples once to warm up, then the engines take turns. This program
starts the vLLM server (launch/install_vllm.sh). Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import contextlib
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
from typing import Any

import jax
import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from rljax.policy.config import PolicyConfig
from rljax.policy.hf import save_params
from rljax.policy.model import init_params
from rljax.rollout.build import connect, load_jax_engine
from rljax.rollout.servers.vllm.server import ServerConfig, start, vllm_python
from rljax.rollout.types import SamplingParams

POLICY = PolicyConfig(4096, 256, 768, 4, 4, 2, 64, tie_word_embeddings=True, max_position_embeddings=512)
PROMPT, RESPONSE = 32, 128
BATCHES = (8, 64)
Sample = Callable[[Sequence[np.ndarray]], int]  # prompts -> number of sampled tokens


def by_engine(engine: Any) -> Sample:
    """Returns a function that samples with an engine of rljax."""
    return lambda prompts: sum(
        len(response.token_ids) for response in engine.generate(prompts, 1, SamplingParams(RESPONSE), seed=0)
    )


def by_transformers(directory: str) -> Sample:
    """Returns a function that samples with ``generate`` and computes log-probabilities, as the engines do."""
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    model.eval()

    def sample(prompts: Sequence[np.ndarray]) -> int:
        ids = torch.from_numpy(np.stack(prompts).astype(np.int64))
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=RESPONSE,
                min_new_tokens=RESPONSE,
                return_dict_in_generate=True,
                output_logits=True,
                pad_token_id=0,
            )
        for logits, chosen in zip(out.logits, out.sequences[:, PROMPT:].T, strict=True):
            torch.log_softmax(logits.float(), dim=-1).gather(1, chosen[:, None])
        return int(out.sequences.shape[1] - PROMPT) * len(prompts)

    return sample


def compare(engines: dict[str, Sample], batch: int, rounds: int) -> dict[str, Any]:
    """Measures the median tokens per second of each engine."""
    rng = np.random.default_rng(batch)
    prompts = [rng.integers(2, POLICY.vocab_size, PROMPT).astype(np.int32) for _ in range(batch)]
    for sample in engines.values():
        sample(prompts)
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, sample in engines.items():
            begun = time.perf_counter()
            tokens = sample(prompts)
            rates[name].append(tokens / (time.perf_counter() - begun))
            if tokens != batch * RESPONSE:
                raise RuntimeError(f"{name} sampled {tokens} tokens, expected {batch * RESPONSE}")
    own = rates["rljax"]
    return {
        "tokens_per_second": {name: statistics.median(values) for name, values in rates.items()},
        "ratio": {
            name: statistics.median(a / b for a, b in zip(own, values, strict=True)) for name, values in rates.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each engine (5)")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    torch.set_num_threads(os.cpu_count() or 1)
    batches = {}
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        save_params(directory, init_params(POLICY, 0), POLICY)
        server = start(ServerConfig(directory, python=str(vllm_python()), dtype="float32", max_model_len=256))
        stack.callback(server.stop)
        engines = {
            "rljax": by_engine(load_jax_engine(directory, "float32", PROMPT)),
            "transformers": by_transformers(directory),
            "vLLM": by_engine(stack.enter_context(contextlib.closing(connect([server.url])))),
        }
        names = " | ".join(f"{name} tokens/s" for name in engines)
        print(f"| at a time | {names} | rljax / transformers | rljax / vLLM |")
        print("|---" * (len(engines) + 3) + "|", flush=True)
        for batch in BATCHES:
            batches[str(batch)] = one = compare(engines, batch, options.rounds)
            rates = " | ".join(f"{one['tokens_per_second'][name]:.0f}" for name in engines)
            ratios = " | ".join(f"{one['ratio'][name]:.2f}" for name in ("transformers", "vLLM"))
            print(f"| {batch} | {rates} | {ratios} |", flush=True)
    if options.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores; jax {jax.__version__}, torch {torch.__version__}"
        report = {"command": shlex.join(["python", *sys.argv]), "machine": machine, "batches": batches}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
