"""Compares a training step on rows of trees with the same step on separate rows, as prompts and groups grow.

    python experiments/bench_trees.py --json trees.json

The sequences are groups with random prompts and responses, all of full length. Each side packs them as a run does, with
the row length that the run chooses. Both make the step of a run, with the mismatch, on a random Qwen3 policy. The two
take turns. Prints a Markdown table; a ratio above 1 means that trees are faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rljax.policy.config import PolicyConfig
from rljax.policy.model import init_params
from rljax.run.config import Config
from rljax.run.packing import make_pack, with_separate_rows
from rljax.run.training import make_step
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.packing import PackedBatch, TrainSequence
from rljax.trainer.state import create_state, make_optimizer


class Case(NamedTuple):
    """The sizes of a step."""

    prompt: int  # tokens of each prompt
    group: int  # responses to each prompt
    response: int  # tokens of each response
    groups: int = 1
    dtype: str = "float32"


CASES = [
    Case(64, 4, 64, groups=4),
    Case(64, 16, 64, groups=2),
    Case(512, 4, 64, groups=2),
    Case(512, 16, 64),
    Case(2048, 4, 64),
    Case(2048, 16, 64),
    Case(2048, 8, 256),
    Case(64, 4, 1024),
    Case(512, 4, 1024),
    Case(2048, 4, 1024),
]


def policy_of(width: int) -> PolicyConfig:
    """Returns a random policy of four layers with a vocabulary of 16,384 tokens."""
    return PolicyConfig(16_384, width, 3 * width, 4, width // 32, width // 64, 32, tie_word_embeddings=True)


def config_of(case: Case) -> Config:
    """Returns the configuration of a run with the sizes of the case, which recomputes its blocks."""
    config = Config()
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, batch_size=case.groups, max_prompt_tokens=case.prompt),
        rollout=dataclasses.replace(
            config.rollout, group_size=case.group, max_response_tokens=case.response, dtype=case.dtype
        ),
        packing=dataclasses.replace(config.packing, rows_per_micro_batch=1),
        precision=dataclasses.replace(config.precision, compute_dtype=case.dtype, remat="blocks"),
    )


def sequences_of(case: Case, vocabulary: int) -> list[TrainSequence]:
    """Returns the sequences of all groups, with random tokens, log-probabilities and advantages."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(case.groups):
        prompt = rng.integers(0, vocabulary, case.prompt)
        for _ in range(case.group):
            noise = rng.normal(-9.7, 0.3, case.response)
            arrays = {"rollout_logprobs": noise, "staleness": np.zeros(case.response)}
            response = rng.integers(0, vocabulary, case.response)
            made.append(TrainSequence.of(prompt, response, arrays, advantage=float(rng.normal())))
    return made


class Side:
    """One way to pack and train."""

    def __init__(self, config: Config, policy: PolicyConfig, sequences: Sequence[TrainSequence]):
        """Packs the sequences and prepares the step."""
        mesh, tx = make_mesh(MeshConfig(1, 1)), make_optimizer(config.optimizer)
        self.batch: PackedBatch = make_pack(config, config.num_sequences)(sequences)
        self.step = make_step(config, policy, tx, mesh)
        self.state = create_state(init_params(policy, 0), policy, tx, mesh, dynamic_scale=False)
        self.memory = self.step.lower().compile().memory_analysis().temp_size_in_bytes

    def __call__(self) -> float:
        """Makes a step; returns its seconds."""
        begun = time.perf_counter()
        self.state, row, _ = self.step(self.state, self.batch, 1e-6, True)
        jax.block_until_ready(row)
        return time.perf_counter() - begun

    def describe(self) -> dict[str, Any]:
        """Returns the shape of the computed rows, and the tokens in them."""
        rows = self.batch.tokens if self.batch.trees is None else self.batch.trees.tokens
        ends = self.batch.segment_ids if self.batch.trees is None else self.batch.trees.ends
        return {
            "rows": [int(self.batch.used), *rows.shape[1:]],
            "flat_row_tokens": int(self.batch.tokens.shape[2]),
            "tokens": int(np.count_nonzero(ends)),
            "temporary_bytes": int(self.memory),
        }


def compare(case: Case, width: int, rounds: int) -> dict[str, Any]:
    """Measures the seconds of both sides, which take turns."""
    policy, config = policy_of(width), config_of(case)
    sequences = sequences_of(case, policy.vocab_size)
    sides = {
        "trees": Side(config, policy, sequences),
        "apart": Side(with_separate_rows(config), policy, sequences),
    }
    for side in sides.values():
        side()  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            seconds[name].append(side())
    ratios = [theirs / own for own, theirs in zip(seconds["trees"], seconds["apart"], strict=True)]
    return {
        "case": case._asdict(),
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        **{name: side.describe() for name, side in sides.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and writes the file; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (3)")
    parser.add_argument("--width", type=int, default=256, help="width of the policy (256)")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to run, from 0")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    results = []
    print(
        "| prompt + group x response | groups | tokens: trees, apart | seconds: trees, apart | apart / trees | memory |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    for case in [CASES[i] for i in options.only] if options.only else CASES:
        one = compare(case, options.width, options.rounds)
        results.append(one)
        low, high = one["ratio_range"]
        trees, apart = one["trees"], one["apart"]
        of_trees, of_apart = one["seconds"]["trees"], one["seconds"]["apart"]
        print(
            f"| {case.prompt:,} + {case.group} x {case.response:,} | {case.groups} "
            f"| {trees['tokens']:,}, {apart['tokens']:,} | {of_trees:.2f}, {of_apart:.2f} "
            f"| {one['ratio']:.2f} ({low:.2f} - {high:.2f}) "
            f"| {apart['temporary_bytes'] / trees['temporary_bytes']:.2f} |",
            flush=True,
        )
        if options.json:
            machine = f"{platform.machine()}, {os.cpu_count()} cores; jax {jax.__version__}"
            report = {"command": shlex.join(["python", *sys.argv]), "machine": machine, "cases": results}
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
