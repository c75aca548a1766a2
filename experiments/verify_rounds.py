"""Measures how often the verification by probes would refuse a sound server.

    python experiments/verify_rounds.py --engine embedded --output benchmarks/verify_rounds.json
    python experiments/verify_rounds.py --engine vllm --output FILE.json [--kv-cache-dtype fp8_e4m3]

A vLLM server, or the embedded engine in its place, holds the trainer's weights. Many verifiers take looks at it, each
with probes of its own. The probes are independent of each other, so many more looks are drawn from the measured ones.
The chance that one look is out of band comes from an exponential tail above the 99.9% quantile of these draws. A run is
refused where two looks in a row are out of band. The band comes from the worst of three looks, drawn many times, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
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
from rljax.rollout.build import load_jax_engine
from rljax.rollout.publish_config import VerifyConfig
from rljax.rollout.servers.client import ServerClient
from rljax.rollout.servers.verify import LOOKS, Verifier
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.servers.vllm.server import ServerConfig, start, vllm_python
from rljax.rollout.servers.wire import Completion, Request, ServerInfo

BLOCK_SIZE = 128  # of vLLM's prefix cache on a CPU
SIDE_BY_SIDE = 8  # verifiers that ask the server at a time
DRAWS = 300_000
TAIL = 1e-3  # the share of the draws that the exponential tail is fitted to
CASES = [(2, 4.0), (4, 4.0), (8, 2.5), (16, 2.5), (16, 2.0)]  # (prompts of a look, factor of the band)
PUBLISHES, SERVERS = 600, 8  # of the run for which refusals are counted


class EmbeddedServer:
    """The embedded engine in the place of a client of one server."""

    urls = ("embedded",)

    def __init__(self, path: str, dtype: str) -> None:
        """Loads the policy of the directory ``path``."""
        self._engine = load_jax_engine(path, dtype, 512)
        self._one = threading.Lock()

    def sample(self, url: str, requests: Sequence[Request]) -> list[Completion]:
        """Returns one completion for each request."""
        del url
        prompts, sampling = [request.prompt for request in requests], requests[0].sampling
        with self._one:
            responses = list(self._engine.generate(prompts, 1, sampling, seed=requests[0].seed or 0))
        responses.sort(key=lambda response: response.prompt_index)
        return [Completion(each.token_ids, each.logprobs, "length", None) for each in responses]


def measure(client: Any, options: argparse.Namespace, kind: str) -> np.ndarray:
    """Returns the mean |server - trainer| of each probe, float64 [verifier, look, prompt]."""
    policy, tokenizer = read_config(options.path), load_tokenizer(options.path)
    params, score = load_params(options.path, policy), make_scorer(policy, options.dtype)
    (url,) = client.urls
    info = ServerInfo(url, vocab_size=policy.vocab_size, block_size=BLOCK_SIZE)
    prompts = [tokenizer.encode(problem["prompt"]) for problem in addition_problems("train", 64)]

    def looks_of(seed: int) -> list[Any]:
        config = VerifyConfig(prompts=options.prompts, rounds=options.looks, seed=seed)
        of_run = prompts if kind == "prompts of the run" else ()
        verifier = Verifier(config, score, info, dtype=options.dtype, prompts=of_run)
        return [verifier, verifier.sample(client, url)]

    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        taken = list(threads.map(looks_of, range(options.verifiers)))
    return np.array([[verifier.difference(look, params).per_prompt for look in looks] for verifier, looks in taken])


def refusals(measured: np.ndarray, dtype: str, prompts: int, factor: float, *, rounded: bool) -> dict[str, float]:
    """Returns the figures of looks of so many ``prompts``, and the chance that a run refuses a sound server.

    ``measured`` is what :func:`measure` returns. The band is ``factor`` times the worst look of the calibration.
    ``rounded``: Whether the server has a cache of 8 bits.
    """
    config, rng, each = VerifyConfig(), np.random.default_rng(0), measured.ravel()
    floor, ceiling = config.limits(dtype, mixture=False, rounded=rounded)
    looks = np.zeros(DRAWS)
    for _ in range(prompts):
        looks += rng.choice(each, DRAWS) / prompts
    calibration = looks[: DRAWS // config.rounds * config.rounds].reshape(-1, config.rounds).max(axis=1)
    bands = np.clip(factor * calibration, floor, ceiling)
    start_of_tail = np.quantile(looks, 1 - TAIL)
    excess = float(np.mean(looks[looks > start_of_tail] - start_of_tail))

    def beyond(limit: np.ndarray) -> np.ndarray:
        """The chance that one look is above ``limit``."""
        within = 1 - np.searchsorted(np.sort(looks), limit) / DRAWS
        return np.where(limit > start_of_tail, TAIL * np.exp(-(limit - start_of_tail) / excess), within)

    def of_run(chance: np.ndarray) -> float:
        return float(np.mean(-np.expm1(PUBLISHES * SERVERS * np.log1p(-np.minimum(chance, 1 - 1e-12)))))

    out = beyond(bands)
    return {
        "prompts_of_a_look": prompts,
        "factor": factor,
        "mean": float(looks.mean()),
        "standard_deviation": float(looks.std()),
        "largest": float(looks.max()),
        "tail_mean_excess": excess,
        "band_smallest": float(bands.min()),
        "band_median": float(np.median(bands)),
        "run_refused_by_one_look": of_run(out),
        "run_refused": of_run(out**LOOKS),
    }


def opened(options: argparse.Namespace, stack: contextlib.ExitStack) -> ServerClient | EmbeddedServer:
    """Returns a client of the engine that the options name."""
    if options.engine == "embedded":
        return EmbeddedServer(options.path, options.dtype)
    cache = ("--kv-cache-dtype", options.kv_cache_dtype)
    config = ServerConfig(options.path, str(vllm_python()), options.dtype, max_model_len=512, extra_args=cache)
    server = stack.enter_context(start(config))
    client = stack.enter_context(contextlib.closing(ServerClient([server.url], VllmBackend())))
    VllmBackend().describe(client, server.url)  # sets the route
    return client


def main(argv: Sequence[str]) -> int:
    """Prints a line for each kind of probes and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default="configs/toy-base", help="directory of the policy")
    parser.add_argument("--engine", choices=["vllm", "embedded"], default="vllm", help="the engine (vllm)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of server and trainer")
    caches = ["auto", "fp8_e4m3", "fp8_e5m2"]
    parser.add_argument("--kv-cache-dtype", choices=caches, default="auto", help="the cache of a vLLM server (auto)")
    parser.add_argument("--verifiers", type=int, default=2, help="verifiers, each with probes of its own (2)")
    parser.add_argument("--prompts", type=int, default=32, help="probes of a measured look (32)")
    parser.add_argument("--looks", type=int, default=4, help="looks of each verifier (4)")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args(argv)
    rounded = options.kv_cache_dtype != "auto"
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    result: dict[str, Any] = {"settings": settings, "publishes": PUBLISHES, "servers": SERVERS, "kinds": {}}
    with contextlib.ExitStack() as stack:
        client: Any = opened(options, stack)
        for kind in ("prompts of the run", "random tokens"):
            measured = measure(client, options, kind)
            of_kind = result["kinds"][kind] = {
                "measured_probes": measured.size,
                "largest_measured_probe": float(measured.max()),
                "cases": [refusals(measured, options.dtype, *case, rounded=rounded) for case in CASES],
            }
            print(kind, json.dumps(of_kind), flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
