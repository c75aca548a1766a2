"""Compares a training step on rows of trees with the same step on separate rows, as prompts and groups grow.

    python experiments/bench_trees.py --json trees.json

The sequences are groups with random prompts and responses, all of full length. Each side packs them with the row length
that a run chooses, and at its best: the fastest of this length, one for a single sequence, and the one that leaves the
fewest places to compute. The step is that of a run, with the mismatch, on a random Qwen3 policy. All take turns.
Prints a Markdown table; above a ratio of 1 trees are faster. With PROCESSOR_TIME=1 seconds are those of processors.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from reports import write_report

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


CLOCK = time.process_time if os.environ.get("PROCESSOR_TIME") else time.perf_counter
GROUPS = {(64, 4, 64): 4, (64, 16, 64): 2, (512, 4, 64): 2}  # 1 for others
SIZES = [*itertools.product((64, 512, 2048), (4, 16), (64, 1024)), (2048, 8, 256)]
CASES = [Case(*sizes, groups=GROUPS.get(sizes, 1)) for sizes in SIZES]


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


def row_lengths(case: Case, config: Config, policy: PolicyConfig, sequences: Sequence[TrainSequence]) -> list[Config]:
    """Returns the configuration, and it with rows of the longest sequence and with rows of the fewest places in all."""

    def places(each: Config) -> int:
        batch = make_pack(each, policy, each.num_sequences)(sequences)
        return int(batch.used) * (batch if batch.trees is None else batch.trees).tokens[0].size

    lengths = [case.prompt + n * case.response for n in range(1, case.group + 1)]
    packed = [dataclasses.replace(config, packing=dataclasses.replace(config.packing, row_tokens=n)) for n in lengths]
    found: dict[int, Config] = {}
    for each in (config, packed[0], min(packed, key=places)):
        found.setdefault(places(each), each)
    return [*found.values()]


class Side:
    """One way to pack and train."""

    def __init__(self, config: Config, policy: PolicyConfig, sequences: Sequence[TrainSequence]):
        """Packs the sequences, compiles the step, and makes one."""
        mesh, tx = make_mesh(MeshConfig(1, 1)), make_optimizer(config.optimizer)
        self.batch: PackedBatch = make_pack(config, policy, config.num_sequences)(sequences)
        self.step = make_step(config, policy, mesh)
        self.state = create_state(init_params(policy, 0), policy, tx, mesh, dynamic_scale=False)
        trees = self.batch.trees
        ends = self.batch.segment_ids if trees is None else trees.ends
        self.facts: dict[str, Any] = {
            "rows": [int(self.batch.used), *ends.shape[1:]],
            "flat_row_tokens": int(self.batch.tokens.shape[2]),
            "tokens": int(np.count_nonzero(ends)),
            "temporary_bytes": int(self.step.lower().compile().memory_analysis().temp_size_in_bytes),
        }
        self.seconds: list[float] = []
        self.make_step()

    def make_step(self) -> float:
        """Makes a step; returns its seconds."""
        begun = CLOCK()
        self.state, row, _ = self.step(self.state, self.batch, 1e-6, True)
        jax.block_until_ready(row)
        return CLOCK() - begun

    def median(self) -> float:
        """Returns the median of the seconds."""
        return statistics.median(self.seconds)

    def describe(self) -> dict[str, Any]:
        """Returns the shape of the computed rows, the tokens in them, the memory and the time."""
        return self.facts | {"seconds": self.median()}


def compare(case: Case, width: int, rounds: int) -> dict[str, Any]:
    """Measures the seconds of both sides at both row lengths, which take turns."""
    policy, config = policy_of(width), config_of(case)
    sequences = sequences_of(case, policy.vocab_size)
    sides = {
        name: [Side(one, policy, sequences) for one in row_lengths(case, each, policy, sequences)]
        for name, each in {"trees": config, "apart": with_separate_rows(config)}.items()
    }
    for side in (side for _ in range(rounds) for each in sides.values() for side in each):
        side.seconds.append(side.make_step())
    found: dict[str, Any] = {"case": case._asdict()}
    for length in ("run", "best"):
        trees, apart = (min(each[: None if length == "best" else 1], key=Side.median) for each in sides.values())
        ratios = [theirs / own for own, theirs in zip(trees.seconds, apart.seconds, strict=True)]
        found[length] = {
            **{"ratio": apart.median() / trees.median(), "ratio_range": [min(ratios), max(ratios)]},
            **{"trees": trees.describe(), "apart": apart.describe()},
        }
    return found


def row_of(case: Case, found: dict[str, Any]) -> str:
    """Returns the row of the table of a case."""
    cells = [f"{case.prompt:,} + {case.group} x {case.response:,}", str(case.groups)]
    for length in ("run", "best"):
        one = found[length]
        trees, apart, (low, high) = one["trees"], one["apart"], one["ratio_range"]
        rows = (f"{each['rows'][0] * each['rows'][1]} x {each['rows'][2]:,}" for each in (trees, apart))
        cells += [", ".join(rows), f"{trees['seconds']:.2f}, {apart['seconds']:.2f}"]
        cells.append(f"{one['ratio']:.2f} ({low:.2f}-{high:.2f})")
    memory = found["run"]["apart"]["temporary_bytes"] / found["run"]["trees"]["temporary_bytes"]
    return f"| {' | '.join(cells)} | {memory:.2f} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and writes the file; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (3)")
    parser.add_argument("--width", type=int, default=256, help="width of the policy (256)")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to run, from 0")
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    compiled = tempfile.TemporaryDirectory()  # so that a step whose memory is analysed is not compiled twice
    jax.config.update("jax_compilation_cache_dir", compiled.name)
    results = []
    of_length = "rows: trees, apart | seconds | apart / trees"
    print(
        f"| prompt + group x response | groups | {of_length} | at best: {of_length} | memory |\n|{'---|' * 9}",
        flush=True,
    )
    for case in [CASES[i] for i in options.only] if options.only else CASES:
        results.append(compare(case, options.width, options.rounds))
        print(row_of(case, results[-1]), flush=True)
        write_report(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
