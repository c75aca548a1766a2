"""Measures how often the verification by probes would refuse a sound server, or miss a cache of older weights.

    python experiments/verify_rounds.py --engine embedded --output benchmarks/verify_rounds.json
    python experiments/verify_rounds.py --engine vllm --output FILE.json
    python experiments/verify_rounds.py --engine vllm --output FILE.json --kv-cache-dtype fp8_e5m2 [--alone]

A vLLM server, or the embedded engine in its place, holds the trainer's weights. Many verifiers take looks at it, each
with its own probes. The probes are independent of each other, so many more looks are drawn from the measured ones. The
chance that one look is out of band comes from an exponential tail above the 99.9% quantile of these draws. A run is
refused if two looks in a row are out of band. The band comes from the worst of three looks, which are also drawn many
times.

Other weights are then published to a server without a reset of its prefix cache. The chance that one of two looks
misses this is a power law below the 0.1% quantile of the looks. A server with a cache of 8 bits also scores its own
tokens again, without its cache. The looks at that difference are counted in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rljax.data.prompts import prompt_ids
from rljax.data.tokenizer import load_tokenizer
from rljax.data.toy import addition_problems
from rljax.errors import VerificationError, run_cli
from rljax.policy.families import config_to_hf, read_config
from rljax.policy.hf import load_params
from rljax.policy.score import make_scorer
from rljax.rollout.build import load_jax_engine, policy_functions
from rljax.rollout.form import ServerForm
from rljax.rollout.servers.dispatch import LoopThread
from rljax.rollout.servers.engine import ServedEngine
from rljax.rollout.servers.requests import Completion, Remote, Request, ServerInfo
from rljax.rollout.servers.verify import LOOKS, OWN_FLOOR, ROUNDED_BAND, ROUNDS, TAIL_PROMPTS, Look, Verifier, limits
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.servers.vllm.server import VllmConfig, start, vllm_python
from rljax.rollout.types import InFlight, RolloutConfig, VerifyConfig
from rljax.weights.store import WeightVersion

BLOCK_SIZE = 128  # the block size of vLLM's prefix cache on a CPU
SIDE_BY_SIDE = 8  # the number of verifiers that ask the server at a time
DRAWS = 300_000
TAIL = 1e-3  # the share of the draws to which the exponential tail is fitted
CASES = [(1, 2, 4.0), (2, 4, 4.0), (4, 4, 4.0), (16, 16, 4.0), (16, 16, 2.5)]  # (prompts of both looks, band's factor)
SCALES = (0.3, 0.1, 0.03)  # sizes of the weight changes that are published without a reset of the cache
PUBLISHES, SERVERS = 600, 8  # of the run for which refusals are counted


class EmbeddedServer:
    """The embedded engine in the place of a server."""

    url = "embedded"

    def __init__(self, path: str, dtype: str) -> None:
        """Loads the policy of the directory ``path``."""
        self._engine = load_jax_engine(path, dtype, 512)

    async def sample(self, requests: Sequence[Request]) -> list[Completion]:
        """Returns one completion for each request."""
        prompts, sampling = [request.prompt for request in requests], requests[0].sampling
        responses = list(self._engine.generate(prompts, 1, sampling, seed=requests[0].seed or 0))
        responses.sort(key=lambda response: response.prompt_index)
        return [Completion(each.ids, each.prompt_length, each.columns, "length") for each in responses]


class OneByOne:
    """A server that gets one request at a time.

    A server may then decode with another kernel than in its prefill.
    """

    def __init__(self, server: Any) -> None:
        """Wraps a server."""
        self.url, self._server = server.url, server

    async def sample(self, requests: Sequence[Request]) -> list[Completion]:
        """Returns one completion for each request."""
        return [completion for request in requests for completion in await self._server.sample([request])]


class KeptCache:
    """A server that keeps its prefix cache during an update."""

    def __init__(self, server: Remote) -> None:
        """Wraps a server."""
        self.url, self._server = server.url, server

    async def call(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        """Sends a request, unless it resets the cache."""
        if path == "/reset_prefix_cache":
            return {"success": True}
        if path == "/pause":
            content["params"] = {"mode": "wait", "clear_cache": "false"}
        return await self._server.call(method, path, **content)


class FaultyBackend(VllmBackend):
    """A vLLM backend whose update may keep the prefix cache."""

    keeps_cache = False

    async def push(self, server: Remote, version: WeightVersion, in_flight: InFlight = "wait") -> None:
        """Updates the weights."""
        kept: Any = KeptCache(server)
        await super().push(kept if self.keeps_cache else server, version, in_flight)


class Probes:
    """A group of verifiers, each with its own probes."""

    def __init__(self, loop: LoopThread, server: Any, options: argparse.Namespace, kind: str) -> None:
        """Makes ``options.verifiers`` verifiers of a server, which is used on ``loop``, with probes of a ``kind``."""
        policy, tokenizer = read_config(options.path), load_tokenizer(options.path)
        self._loop, self._server = loop, OneByOne(server) if options.alone else server
        form = ServerForm(kv_cache=options.kv_cache_dtype)
        info = ServerInfo(server.url, vocab_size=policy.vocab_size, block_size=BLOCK_SIZE, form=form)
        prompts = [prompt_ids(problem, tokenizer) for problem in addition_problems("train", 64)]
        of_run = prompts if kind == "prompts of the run" else ()
        config, score = VerifyConfig(options.prompts, options.tokens), make_scorer(policy, options.dtype)
        how = {"dtype": options.dtype, "prompts": of_run}
        self._verifiers = [Verifier(config, score, info, **how, seed=seed) for seed in range(options.verifiers)]
        self._threads = 1 if options.alone else SIDE_BY_SIDE

    def warm(self) -> None:
        """Makes the server cache the keys and values of all probes."""
        for verifier in self._verifiers:
            self._loop.wait(verifier.warm(self._server))

    def measure(self, params: Any, looks: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the mean |server - trainer| of each probe, and the mean |server - server|, float64 [probes].

        They are from ``looks`` of each verifier.
        """

        def taken(verifier: Verifier) -> list[Look]:
            return [self._loop.wait(verifier.look(self._server)) for _ in range(looks)]

        with ThreadPoolExecutor(self._threads) as threads:
            pairs = zip(self._verifiers, threads.map(taken, self._verifiers), strict=True)
            found = [verifier.difference(look, params) for verifier, sampled in pairs for look in sampled]
        to_trainer, own = [each.per_prompt for each in found], [each.own_per_prompt for each in found]
        return np.concatenate(to_trainer), np.concatenate(own)


def drawn(each: np.ndarray, prompts: int, *, own: bool = False) -> np.ndarray:
    """Draws many looks of ``prompts`` probes from the numbers of single probes: their means, or their lower thirds."""
    looks = np.random.default_rng(0).choice(each, (DRAWS, prompts))
    return np.sort(looks)[:, prompts // 3] if own else looks.mean(axis=1)


def bands_of(looks: np.ndarray, factor: float, between: tuple[float, float]) -> np.ndarray:
    """Returns the bands that calibrations of drawn looks give, between the lowest and the highest one."""
    calibration = looks[: DRAWS // ROUNDS * ROUNDS].reshape(-1, ROUNDS).max(axis=1)
    return np.clip(factor * calibration, *between)


def beyond(numbers: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Returns the chance of a number above each of ``bounds``, which may lie beyond all drawn ``numbers``."""
    start_of_tail = np.quantile(numbers, 1 - TAIL)
    above = numbers[numbers > start_of_tail]
    excess = max(float(np.mean(above - start_of_tail)), 1e-12) if len(above) else 1e-12  # all may be equal
    within = 1 - np.searchsorted(np.sort(numbers), bounds) / DRAWS
    return np.where(bounds > start_of_tail, TAIL * np.exp(-(bounds - start_of_tail) / excess), within)


def missed(
    sound: np.ndarray, stale: np.ndarray, first: int, prompts: int, between: tuple[float, float], *, own: bool = False
) -> dict[str, float]:
    """Returns the chance that one of two looks at an old cache, of ``first`` and ``prompts`` probes, is in the band."""
    bands = bands_of(drawn(sound, prompts, own=own), VerifyConfig().factor, between)
    looks = [drawn(stale, count, own=own) for count in (first, prompts)]
    seen = [1 - beyond(-np.log(np.maximum(each, 1e-12)), -np.log(bands)) for each in looks]
    return {
        "mean": float(stale.mean()),
        "smallest_probe": float(stale.min()),
        "smallest_look": float(looks[1].min()),
        "missed": float(np.mean(1 - seen[0] * seen[1])),
    }


def refusals(
    each: np.ndarray, first: int, prompts: int, factor: float, between: tuple[float, float], *, own: bool = False
) -> dict[str, float]:
    """Returns the figures of looks of ``prompts`` probes, and the chance that a run refuses a sound server.

    Args:
      each: The differences of single probes.
      first: The number of probes of a publish's first look.
      prompts: The number of probes of other looks.
      factor: The band is this many times the worst look of the calibration.
      between: The lowest and the highest band.
      own: Whether a look is the lower third of its probes, and not their mean.
    """
    looks = drawn(each, prompts, own=own)
    bands = bands_of(looks, factor, between)
    out, out_first = (np.minimum(beyond(each, bands), 1 - 1e-12) for each in (looks, drawn(each, first, own=own)))

    def of_run(chance: np.ndarray) -> float:
        return float(np.mean(-np.expm1(PUBLISHES * SERVERS * np.log1p(-chance))))

    return {
        "prompts_of_a_look": prompts,
        "prompts_of_a_first_look": first,
        "factor": factor,
        "mean": float(looks.mean()),
        "standard_deviation": float(looks.std()),
        "largest": float(looks.max()),
        "band_smallest": float(bands.min()),
        "band_median": float(np.median(bands)),
        "run_refused_by_one_look": of_run(out_first),
        "run_refused": of_run(out_first * out),
    }


def moved(params: Any, scale: float, seed: int) -> Any:
    """Returns other weights: each tensor is moved by ``scale`` of its own spread."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    pairs = zip(keys, leaves, strict=True)
    return jax.tree.unflatten(tree, [x + scale * x.std() * jax.random.normal(key, x.shape) for key, x in pairs])


def with_old_caches(engine: ServedEngine, backend: FaultyBackend, probes: Probes, params: Any) -> Iterator[Any]:
    """Publishes moved weights without a reset of the cache. Yields (scale, differences to trainer, to itself)."""
    for number, scale in enumerate(SCALES):
        backend.keeps_cache = False
        engine.publish(params, 2 * number + 1)
        probes.warm()
        backend.keeps_cache = True
        weights = moved(params, scale, number)
        with contextlib.suppress(VerificationError):  # the run would end here
            engine.publish(weights, 2 * number + 2)
        yield scale, *probes.measure(weights, LOOKS)
    backend.keeps_cache = False
    engine.publish(params, 2 * len(SCALES) + 1)


def opened(
    options: argparse.Namespace, stack: contextlib.ExitStack
) -> tuple[LoopThread, Any, ServedEngine | None, FaultyBackend]:
    """Returns the event loop, the server that the options name, the engine over it if it is one, and its backend."""
    backend = FaultyBackend()
    if options.engine == "embedded":
        return LoopThread("embedded"), EmbeddedServer(options.path, options.dtype), None, backend
    cache, policy = ("--kv-cache-dtype", options.kv_cache_dtype), read_config(options.path)
    config = VllmConfig(options.path, str(vllm_python()), options.dtype, max_model_len=512, extra_args=cache)
    server = stack.enter_context(start(config, timeout_s=600))
    rollout = RolloutConfig(
        engine="vllm", urls=(server.url,), dtype=options.dtype, server_form=ServerForm(kv_cache=options.kv_cache_dtype)
    )
    functions, hf_config = policy_functions(policy, options.dtype), config_to_hf(policy, options.dtype)
    engine = ServedEngine(rollout, backend, functions, hf_config=hf_config, max_tokens=512)
    stack.callback(engine.close)
    engine.publish(load_params(options.path, policy), 0)
    return engine.fleet, engine.fleet.servers[0], engine, backend


def main(argv: Sequence[str]) -> int:
    """Prints a line for each kind of probes and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default="configs/toy-base", help="directory of the policy")
    parser.add_argument("--engine", choices=["vllm", "embedded"], default="vllm", help="the engine (vllm)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of server and trainer")
    caches = ["auto", "fp8_e4m3", "fp8_e5m2"]
    parser.add_argument("--kv-cache-dtype", choices=caches, default="auto", help="the cache of a vLLM server (auto)")
    parser.add_argument("--alone", action="store_true", help="send one probe at a time")
    parser.add_argument("--verifiers", type=int, default=2, help="verifiers, each with probes of its own (2)")
    parser.add_argument("--prompts", type=int, default=32, help="probes of a measured look (32)")
    parser.add_argument("--tokens", type=int, default=VerifyConfig().tokens, help="generated tokens of each probe")
    parser.add_argument("--looks", type=int, default=4, help="looks of each verifier (4)")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args(argv)
    rounded, factor = options.kv_cache_dtype != "auto", VerifyConfig().factor
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    result: dict[str, Any] = {"settings": settings, "publishes": PUBLISHES, "servers": SERVERS, "kinds": {}}
    params = load_params(options.path, read_config(options.path))
    between, own_between = limits(options.dtype, rounded=rounded), (OWN_FLOOR, ROUNDED_BAND[1])
    with contextlib.ExitStack() as stack:
        loop, server, engine, backend = opened(options, stack)
        for kind in ("prompts of the run", "random tokens"):
            probes = Probes(loop, server, options, kind)
            of_run = kind == "prompts of the run" and not rounded
            count = VerifyConfig().prompts if of_run else TAIL_PROMPTS
            first = -(-count // 2) if of_run else count
            measured, own = probes.measure(params, options.looks)
            of_kind = result["kinds"][kind] = {
                "measured_probes": measured.size,
                "largest_measured_probe": float(measured.max()),
                "cases": [refusals(measured, *case, between) for case in CASES],
            }
            if rounded:
                of_kind["own"] = refusals(own, count, count, factor, own_between, own=True)
            of_kind["old_caches"] = {}
            for scale, stale, own_stale in with_old_caches(engine, backend, probes, params) if engine else ():
                found = of_kind["old_caches"][scale] = {"to_trainer": missed(measured, stale, first, count, between)}
                if rounded:
                    found["own"] = missed(own, own_stale, count, count, own_between, own=True)
            print(kind, json.dumps(of_kind), flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
