"""Measures how often the verification by probes would refuse a sound vLLM server.

    python experiments/verify_rounds.py --output benchmarks/verify_rounds.json

A real server holds the trainer's weights. Many verifiers, each with probes of its own, take looks at it. The means of
these looks give the chance that one look is out of band, by an exponential tail above their 95% quantile. A run is
refused where two looks in a row are out of band. The band comes from the worst of three looks, drawn many times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from rljax.data.tokenizer import load_tokenizer
from rljax.data.toy import addition_problems
from rljax.errors import run_cli
from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.policy.score import make_scorer
from rljax.rollout.servers.client import ServerClient
from rljax.rollout.servers.verify import LOOKS, Verifier
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.servers.vllm.server import ServerConfig, start, vllm_python
from rljax.rollout.types import VerifyConfig

SIDE_BY_SIDE = 8  # verifiers that ask the server at a time
BANDS = 100_000
PUBLISHES, SERVERS = 600, 8  # of the run for which refusals are counted


def measure(client: ServerClient, options: argparse.Namespace, kind: str) -> np.ndarray:
    """Returns the mean |server - trainer| of each look, float64 [verifier, look]."""
    policy, tokenizer = read_config(options.path), load_tokenizer(options.path)
    params, score = load_params(options.path, policy), make_scorer(policy, options.dtype)
    (url,) = client.urls
    info = VllmBackend().describe(client, url)
    prompts = [tokenizer.encode(problem["prompt"]) for problem in addition_problems("train", 64)]

    def looks_of(seed: int) -> list[Any]:
        config = VerifyConfig(rounds=options.looks, seed=seed)
        of_run = prompts if kind == "prompts of the run" else ()
        verifier = Verifier(config, score, info, dtype=options.dtype, prompts=of_run)
        return [verifier, verifier.sample(client, url)]

    means = []
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        for verifier, looks in threads.map(looks_of, range(options.verifiers)):
            means.append([verifier.difference(look, params).mean for look in looks])
    return np.array(means)


def refusals(means: np.ndarray, dtype: str) -> dict[str, float]:
    """Returns the figures of the looks and the chance that a run refuses a sound server.

    ``means`` are those of :func:`measure`.
    """
    config, rng, flat = VerifyConfig(), np.random.default_rng(0), means.ravel()
    floor, ceiling = config.limits(dtype, mixture=False)
    calibration = rng.choice(flat, (BANDS, config.rounds)).max(axis=1)
    bands = np.clip(config.factor * calibration, floor, ceiling)
    start_of_tail = np.quantile(flat, 0.95)
    excess = flat[flat > start_of_tail] - start_of_tail

    def beyond(limit: np.ndarray) -> np.ndarray:
        """The chance that one look is above ``limit``."""
        return np.minimum(1.0, 0.05 * np.exp(-(limit - start_of_tail) / excess.mean()))

    def of_run(chance: np.ndarray) -> float:
        return float(np.mean(-np.expm1(PUBLISHES * SERVERS * np.log1p(-chance))))

    return {
        "looks": flat.size,
        "mean": float(flat.mean()),
        "standard_deviation": float(flat.std()),
        "largest": float(flat.max()),
        "tail_starts": float(start_of_tail),
        "tail_mean_excess": float(excess.mean()),
        "correlation_of_looks": float(np.corrcoef(means[:, :-1].ravel(), means[:, 1:].ravel())[0, 1]),
        "band_smallest": float(bands.min()),
        "band_median": float(np.median(bands)),
        "looks_out_of_smallest_band": int((flat > bands.min()).sum()),
        "run_refused_one_look": of_run(beyond(bands)),
        "run_refused": of_run(beyond(bands) ** LOOKS),
        "first_publish_refused": float((1 - (1 - beyond(np.array(ceiling))) ** config.rounds) ** LOOKS),
    }


def main(argv: Sequence[str]) -> int:
    """Prints a line for each kind of probes and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default="configs/toy-base", help="directory of the policy")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of server and trainer")
    parser.add_argument("--verifiers", type=int, default=128, help="verifiers, each with probes of its own (128)")
    parser.add_argument("--looks", type=int, default=8, help="looks of each verifier (8)")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args(argv)
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    result: dict[str, Any] = {"settings": settings, "publishes": PUBLISHES, "servers": SERVERS, "kinds": {}}
    # vLLM 0.32 ends on a CPU where it computes the prompt of a seeded request in several pieces.
    whole = ("--max-num-batched-tokens", "65536")
    server_config = ServerConfig(options.path, str(vllm_python()), options.dtype, max_model_len=512, extra_args=whole)
    with start(server_config) as server, contextlib.closing(ServerClient([server.url], VllmBackend())) as client:
        for kind in ("random tokens", "prompts of the run"):
            result["kinds"][kind] = refusals(measure(client, options, kind), options.dtype)
            print(kind, json.dumps(result["kinds"][kind]), flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
