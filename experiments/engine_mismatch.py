"""Measures the mismatch of one policy by form of the engine, by the policy's sharpness, and by length.

    python experiments/engine_mismatch.py runs/study-base --json benchmarks/engine_mismatch.json

The embedded engine samples responses to the toy task, and the trainer's forward pass scores the same tokens. Nothing is
trained. There are three tables:

engines: One row for each form of the engine.
sharpness: The scale of the final norm is multiplied by a factor, and so is each logit. The same policy is then less or
  more certain of its tokens. The embedding is tied, so it cannot be scaled instead.
length: Only the first tokens count, of responses that are at least as long as the longest cut. The table shows how mean
  and sum over tokens change with the number of tokens alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rljax.data.encoding import prompt_ids
from rljax.data.tokenizer import load_tokenizer
from rljax.data.toy import addition_problems
from rljax.errors import caller_errors, run_cli
from rljax.mismatch import mismatch_metrics
from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.policy.model import Params
from rljax.policy.score import make_scorer
from rljax.rollout.build import make_engine
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.types import RolloutConfig, SamplingParams
from rljax.sharding import MeshConfig, make_mesh

ENGINES: dict[str, tuple[dict[str, Any], str]] = {
    "bfloat16": ({}, "bfloat16"),
    "bfloat16, trainer float32": ({}, "float32"),
    "int8 weights": ({"weight_quantization": "int8"}, "bfloat16"),
    "fp8 weights": ({"weight_quantization": "fp8"}, "bfloat16"),
    "fp8_e4m3 cache": ({"kv_cache_dtype": "fp8_e4m3"}, "bfloat16"),
    "fp8_e5m2 cache": ({"kv_cache_dtype": "fp8_e5m2"}, "bfloat16"),
    "int8 weights, fp8_e4m3 cache": ({"weight_quantization": "int8", "kv_cache_dtype": "fp8_e4m3"}, "bfloat16"),
    "fp8 weights, fp8_e4m3 cache": ({"weight_quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}, "bfloat16"),
    "fp8 weights, fp8_e5m2 cache": ({"weight_quantization": "fp8", "kv_cache_dtype": "fp8_e5m2"}, "bfloat16"),
}
"""The settings of ``rollout`` and the dtype of the trainer, by the name of the engine's form."""

SHARPNESS = (0.5, 1.0, 2.0, 4.0)
SHARPENED = ("bfloat16", "int8 weights", "fp8 weights, fp8_e4m3 cache")
CUTS = (2, 4, 8, 16, 28)
METRICS = ("log_ppl_abs_diff", "log_ppl_abs_diff_sum", "logprob_abs_diff_mean", "k3_kl", "training_log_ppl")

Score = Callable[[Params, Sequence[np.ndarray]], list[np.ndarray]]
Logprobs = tuple[np.ndarray, np.ndarray, np.ndarray]  # trainer, rollout, mask; each is [b, t]


class Toy(NamedTuple):
    """The prompts of the toy task, and the tokens that end a response."""

    prompts: list[np.ndarray]
    stops: tuple[int, ...]


def sample(engine: RolloutEngine, score: Score, params: Params, toy: Toy, options: argparse.Namespace) -> Logprobs:
    """Samples responses with the engine and returns both sides' log-probabilities."""
    limit = options.max_response_tokens
    engine.publish(params, 0)
    sampling = SamplingParams(limit, 1.0, toy.stops)
    responses = list(engine.generate(toy.prompts, options.group_size, sampling, seed=options.seed))
    whole = [np.concatenate([toy.prompts[r.prompt_index], r.token_ids]) for r in responses]
    scored = [vector for i in range(0, len(whole), 512) for vector in score(params, whole[i : i + 512])]
    trainer, rollout = (np.zeros((len(responses), limit)) for _ in range(2))
    mask = np.zeros(trainer.shape, bool)
    for row, (response, logprobs) in enumerate(zip(responses, scored, strict=True)):
        trainer[row, : response.length] = logprobs[-response.length :]
        rollout[row, : response.length] = response.logprobs
        mask[row, : response.length] = True
    return trainer, rollout, mask


def numbers(sampled: Logprobs) -> dict[str, float]:
    """Computes the metrics of a row; ``gap_per_uncertainty`` is the mean absolute difference over the mean of 1 - p."""
    trainer, rollout, mask = sampled
    metrics = mismatch_metrics(trainer, rollout, mask)
    uncertainty = float(np.mean(1.0 - np.exp(trainer[mask])))
    return {name: metrics[name] for name in METRICS} | {
        "uncertainty": uncertainty,
        "gap_per_uncertainty": metrics["logprob_abs_diff_mean"] / uncertainty,
        "responses": metrics["sequence_count"],
        "tokens": metrics["token_count"],
    }


def sharpened(params: Params, factor: float) -> Params:
    """Returns the policy with each logit multiplied by ``factor``."""
    return params | {"final_norm": {"scale": params["final_norm"]["scale"] * factor}}


def first_tokens(sampled: Logprobs, count: int, longest: int) -> Logprobs:
    """Returns the first ``count`` tokens of the responses that have at least ``longest``."""
    trainer, rollout, mask = sampled
    kept = mask.sum(1) >= longest
    return trainer[kept, :count], rollout[kept, :count], mask[kept, :count]


def measure(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Measures the three tables and prints each row when it is ready."""
    policy, tokenizer = read_config(options.path), load_tokenizer(options.path)
    params, mesh = load_params(options.path, policy), make_mesh(MeshConfig())
    prompts = [prompt_ids(problem, tokenizer) for problem in addition_problems("eval", options.problems)]
    toy = Toy(prompts, policy.stop_token_ids or (tokenizer.eos_token_id,))
    longest = max(map(len, prompts))
    scorers = {dtype: make_scorer(policy, dtype) for dtype in ("bfloat16", "float32")}
    tables: dict[str, list[dict[str, Any]]] = {"engines": [], "sharpness": [], "length": []}

    def add(table: str, row: dict[str, Any], sampled: Logprobs) -> None:
        tables[table].append(row | numbers(sampled))
        cells = [f"{v:.3g}" if isinstance(v, float) else str(v) for v in tables[table][-1].values()]
        print(f"| {table} | {' | '.join(cells)} |", flush=True)

    for name, (settings, trainer_dtype) in ENGINES.items():
        config = RolloutConfig(engine="jax", dtype="bfloat16", **settings)
        engine = make_engine(
            config, policy, mesh, max_prompt_tokens=longest, max_tokens=longest + options.max_response_tokens
        )
        sampled = sample(engine, scorers[trainer_dtype], params, toy, options)
        add("engines", {"engine": name}, sampled)
        if name in SHARPENED:
            for cut in CUTS:
                add("length", {"engine": name, "first_tokens": cut}, first_tokens(sampled, cut, CUTS[-1]))
            for factor in SHARPNESS:
                other = sample(engine, scorers[trainer_dtype], sharpened(params, factor), toy, options)
                add("sharpness", {"engine": name, "factor": factor}, other)
        engine.close()
    return tables


def main(argv: Sequence[str]) -> int:
    """Prints the rows and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="directory of a policy of the toy task")
    parser.add_argument("--problems", type=int, default=200, help="prompts (200)")
    parser.add_argument("--group-size", type=int, default=8, help="responses to each prompt (8)")
    parser.add_argument("--max-response-tokens", type=int, default=36, help="longest response, in tokens (36)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (0)")
    parser.add_argument("--json", type=Path, help="JSON file for the tables")
    options = parser.parse_args(argv)
    with caller_errors(RuntimeError):
        tables = measure(options)
    if options.json is not None:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        options.json.write_text(json.dumps({"settings": settings, **tables}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
