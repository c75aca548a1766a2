"""Compares three ways to decode 64 responses of mixed lengths with the embedded engine.

    python experiments/bench_places.py --json benchmarks/places.json

at once: all responses are decoded together. places: 16 are decoded together, and a response that ends gives its place
to the next (``rollout.decode_tokens``). parts: 16 are decoded together until the last of them ends, then the next 16.
The policy is a random Qwen3 (width 256, 4 layers) in float32. The three take turns. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rljax.policy.config import PolicyConfig
from rljax.policy.model import init_params
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.types import SamplingParams
from rljax.sharding import MeshConfig, make_mesh

POLICY = PolicyConfig(4096, 256, 768, 4, 4, 2, 64, tie_word_embeddings=True, max_position_embeddings=512)
PROMPT, RESPONSE, RESPONSES, PLACES = 32, 224, 64, 16
STOPS = tuple(range(48))  # A random policy samples one of them after about 85 tokens.


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way (5)")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(64, POLICY.vocab_size, PROMPT).astype(np.int32) for _ in range(RESPONSES)]
    params = init_params(POLICY, 0)

    def engine(decode_tokens: int) -> Callable[[Sequence[np.ndarray]], int]:
        made = JaxEngine(POLICY, jnp.float32, PROMPT, mesh=make_mesh(MeshConfig(1, 1)), decode_tokens=decode_tokens)
        made.publish(params, 0)
        sampling = SamplingParams(RESPONSE, 1.0, STOPS)
        return lambda some: sum(len(response.token_ids) for response in made.generate(some, 1, sampling, seed=0))

    places, whole = engine(PLACES * (PROMPT + RESPONSE)), engine(RESPONSES * (PROMPT + RESPONSE))
    parts = [prompts[first : first + PLACES] for first in range(0, RESPONSES, PLACES)]
    ways: dict[str, Callable[[], int]] = {
        "at once": lambda: whole(prompts),
        "places": lambda: places(prompts),
        "parts": lambda: sum(map(whole, parts)),
    }
    tokens = {name: sample() for name, sample in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, sample in ways.items():
            begun = time.perf_counter()
            sample()
            seconds[name].append(time.perf_counter() - begun)
    rates = {name: statistics.median(tokens[name] / value for value in values) for name, values in seconds.items()}
    ratios = {
        name: statistics.median(
            tokens[name] / tokens["at once"] * a / b for a, b in zip(seconds["at once"], values, strict=True)
        )
        for name, values in seconds.items()
    }
    print("| way | responses in the cache | tokens | tokens/s | rate / rate at once |\n|---|---|---|---|---|")
    for name in ways:
        held = RESPONSES if name == "at once" else PLACES
        print(f"| {name} | {held} | {tokens[name]} | {rates[name]:.0f} | {ratios[name]:.2f} |")
    if options.json:
        report = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": f"{platform.machine()}; jax {jax.__version__}",
            **{"tokens": tokens, "tokens_per_second": rates, "rate_over_at_once": ratios, "seconds": seconds},
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
