"""Measures the gap between a server and the trainer, with rows of trees and with separate rows, on the same rollouts.

    python experiments/tree_gap.py --model.path MODEL --precision.compute-dtype bfloat16 --json gap.json

A vLLM server, which is started for that, samples groups of responses to arithmetic problems. The trainer scores them
with the same weights in rows of trees, in separate rows, and in separate rows of another shape. Both sides have
``precision.compute_dtype``. Further options are keys of a run's configuration.

The gap of a token is the trainer's log-probability less the server's (nats). Prints a Markdown table with means over
the groups and their standard errors. ``in common`` is the intraclass correlation of the responses' mean gaps within a
group. It is 1 if all responses to a prompt have the same mean gap. It is 0 if they have no more in common than
responses to different prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from rljax.data.prompts import prompt_ids
from rljax.data.tokenizer import load_tokenizer
from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.policy.model import param_shardings
from rljax.rollout.build import connect
from rljax.rollout.servers.process import environment_python
from rljax.rollout.servers.vllm import server as vllm
from rljax.rollout.types import SamplingParams
from rljax.run.build import load_problems
from rljax.run.config import Config
from rljax.run.config_file import load_config
from rljax.run.packing import make_pack, other_rows, with_separate_rows
from rljax.run.training import make_forwards, make_step
from rljax.sharding import MeshConfig, fetch, make_mesh
from rljax.trainer.packing import TrainSequence, unpack
from rljax.trainer.update import Pack

SETTINGS = [
    *("--data.task", "reasoning_gym:chain_sum", "--data.task-problems", "2000"),
    *("--data.task-options", "min_terms=2", "max_terms=4", "min_digits=1", "max_digits=2", "--data.task-instruction"),
    "Think step by step in one or two sentences. Give the final answer between <answer> and </answer>.",
    *("--data.batch-size", "12", "--data.max-prompt-tokens", "112", "--rollout.group-size", "5"),
    *("--rollout.max-response-tokens", "32", "--packing.row-tokens", "288", "--packing.rows-per-micro-batch", "1"),
]
"""The problems and the sizes, as options of a run."""
Gaps = list[list[np.ndarray]]  # the gaps of the tokens of each response, float64 [r], by group


def sample(config: Config) -> tuple[list[TrainSequence], str]:
    """Samples a batch, group by group, from a new server; returns it and the server's version."""
    path, rollout = str(config.model.path), config.rollout
    tokenizer, stops = load_tokenizer(path), read_config(path).stop_token_ids
    prompts = [
        prompt_ids(each, tokenizer) for each in load_problems(config, tokenizer).stream.take(config.data.batch_size)
    ]
    serving = vllm.VllmConfig(
        path,
        str(environment_python("vllm")),
        config.precision.compute_dtype,
        max_model_len=config.max_sequence_tokens + 1,
        extra_args=["--block-size", "32"],  # prompts of a group are shared in whole blocks
    )
    sampling = SamplingParams(rollout.max_response_tokens, 1.0, stops)
    with vllm.start(serving) as process, contextlib.closing(connect([process.url])) as served:
        responses = list(served.generate(prompts, rollout.group_size, sampling, seed=config.run.seed))
        version = served.info.version
    responses.sort(key=lambda each: (each.prompt_index, each.sample_index))
    sequences = [
        TrainSequence.of(each.prompt, each.response, {"rollout_logprobs": each["rollout_logprobs"]})
        for each in responses
    ]
    return sequences, version


def score(config: Config, sequences: Sequence[TrainSequence]) -> dict[str, Gaps]:
    """Returns the gaps of the trainer, by the kind of its rows."""
    policy, mesh = read_config(config.model.path), make_mesh(MeshConfig(1, 1))
    params = load_params(config.model.path, policy, param_shardings(policy, mesh))
    apart, count = with_separate_rows(config), config.num_sequences
    packs: dict[str, Pack] = {
        "trees": make_pack(config, policy, count),
        "apart": make_pack(apart, policy, count),
        "apart, another shape": make_pack(apart, policy, count, other_rows(apart)),
    }
    forward, _ = make_forwards(apart, make_step(apart, policy, mesh))
    found = {}
    for name, pack in packs.items():
        batch = pack(sequences)
        values = unpack(fetch(forward(params, batch)[1].logprobs), batch, sequences)
        gaps = [own.astype(np.float64) - s["rollout_logprobs"] for own, s in zip(values, sequences, strict=True)]
        size = config.rollout.group_size
        found[name] = [gaps[at : at + size] for at in range(0, count, size)]
    return found


def over_groups(of_groups: Sequence[float]) -> tuple[float, float]:
    """Returns the mean over the groups and its standard error."""
    return float(np.mean(of_groups)), float(np.std(of_groups, ddof=1) / np.sqrt(len(of_groups)))


def in_common(values: np.ndarray) -> tuple[float, float]:
    """Returns the intraclass correlation of values [groups, n], and its standard error by a jackknife over groups."""

    def correlation(values: np.ndarray) -> float:
        n = values.shape[1]
        between, within = n * values.mean(axis=1).var(ddof=1), values.var(axis=1, ddof=1).mean()
        return float((between - within) / max(between + (n - 1) * within, 1e-30))

    count = len(values)
    without = [correlation(np.delete(values, i, axis=0)) for i in range(count)]
    return correlation(values), float(np.std(without) * np.sqrt(count - 1))


def describe(gaps: Gaps, apart: Gaps) -> dict[str, tuple[float, float]]:
    """Returns the numbers of one kind of rows and their standard errors. ``apart`` are the gaps of separate rows."""
    tokens, others = ([np.concatenate(group) for group in each] for each in (gaps, apart))
    pairs = [*zip(tokens, others, strict=True)]
    return {
        "mean": over_groups([each.mean() for each in tokens]),
        "abs_mean": over_groups([np.abs(each).mean() for each in tokens]),
        "k3_kl": over_groups([np.mean(np.expm1(each) - each) for each in tokens]),
        "in_common": in_common(np.array([[each.mean() for each in group] for group in gaps])),
        "in_common_first_token": in_common(np.array([[each[0] for each in group] for group in gaps])),
        "difference_abs_mean": over_groups([np.abs(a - b).mean() for a, b in pairs]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and writes the file; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options, others = parser.parse_known_args(arguments)
    config = load_config(Config, [*SETTINGS, *others], prog="tree_gap.py", description=__doc__ or "")
    sequences, version = sample(config)
    found = score(config, sequences)
    results = {name: describe(gaps, found["apart"]) for name, gaps in found.items()}
    print("| rows | mean | mean of abs | k3 | in common | in common, first token | mean of abs to separate rows |")
    print("|---|---|---|---|---|---|---|")
    for name, numbers in results.items():
        cells = (f"{mean:.2e} ± {error:.0e}" for mean, error in numbers.values())
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if options.json:
        report = {
            "command": shlex.join(["python", *map(os.path.basename, sys.argv)]),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores; jax {jax.__version__}",
            "model": Path(config.model.path).name,
            "vllm": version,
            "dtype": config.precision.compute_dtype,
            "sizes": {
                "groups": config.data.batch_size,
                "group_size": config.rollout.group_size,
                "prompt_tokens": float(np.mean([s.prompt_length for s in sequences])),
                "response_tokens": float(np.mean([len(s.response) for s in sequences])),
            },
            "rows": results,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
