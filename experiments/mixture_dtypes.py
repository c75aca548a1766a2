"""Measures the mismatch of each family of policies with a real vLLM server, for each pair of dtypes.

    python experiments/mixture_dtypes.py benchmarks/mixture_dtypes.json

The policies of the three families are tiny and random (two blocks, width 64; the mixture has 16 experts, 4 per token).
All servers of a family have the same float32 weights and sample responses to the same prompts. The trainer's forward
pass scores the same tokens in each 16-bit dtype and in float32. Nine servers start one after another; each takes about
half a minute on a CPU.

The width of the band of a verification is measured where both sides have one dtype. Verifiers take looks at the server
as a publish does, with probes made of the prompts. Many more looks of a run's size are drawn from the measured probes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rljax.mismatch import mismatch_metrics
from rljax.policy.config import PolicyConfig
from rljax.policy.hf import save_params
from rljax.policy.model import Params, init_params
from rljax.policy.score import make_scorer
from rljax.rollout.build import connect
from rljax.rollout.servers.client import ServerClient
from rljax.rollout.servers.verify import LOOKS, ROUNDS, TAIL_PROMPTS, Verifier, limits
from rljax.rollout.servers.vllm.client import VllmBackend
from rljax.rollout.servers.vllm.server import ServerConfig, start, vllm_python
from rljax.rollout.types import SamplingParams
from rljax.rollout.verify_config import VerifyConfig

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.15,
    "max_position_embeddings": 512,
}
FAMILIES = {
    "Qwen3": PolicyConfig(**SIZES),
    "Qwen2": PolicyConfig(**SIZES, family="qwen2"),
    "Qwen3-MoE": PolicyConfig(
        **SIZES, family="qwen3_moe", num_experts=16, experts_per_token=4, expert_size=64, normalize_gates=True
    ),
}
DTYPES = ("bfloat16", "float16", "float32")
PROMPTS, PROMPT_TOKENS, RESPONSE_TOKENS = 48, 16, 64
METRICS = ("logprob_abs_diff_mean", "k3_kl")
VERIFIERS = 8  # each has its own probes
MEASURED = VerifyConfig(prompts=32)  # one look of a verifier
MEASURED_LOOKS = 4  # of each verifier
DRAWN = 200_000  # the number of drawn looks, and of runs
RUN = 600 * 8  # the number of publishes to eight servers


def policy(config: PolicyConfig) -> Params:
    """Makes random weights; norms and biases are random, too."""
    params = init_params(config, 0)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [leaf + 0.05 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, moved)


def measure(config: PolicyConfig, params: Params, model: Path, dtype: str) -> dict[str, dict[str, Any]]:
    """Measures the mismatch with a server of ``model`` in ``dtype``, by the trainer's dtype."""
    prompts = [np.random.default_rng(i).integers(2, 256, PROMPT_TOKENS).astype(np.int32) for i in range(PROMPTS)]
    score = make_scorer(config, dtype)
    server = start(ServerConfig(str(model), python=str(vllm_python()), dtype=dtype, max_model_len=512))  # type: ignore[arg-type]
    try:
        with contextlib.closing(connect([server.url])) as engine:
            sampled = list(engine.generate(prompts, 1, SamplingParams(RESPONSE_TOKENS), seed=0))
        with contextlib.closing(ServerClient([server.url], VllmBackend())) as client:
            info = VllmBackend().describe(client, server.url)
            how = {"dtype": dtype, "prompts": prompts}
            verifiers = [Verifier(MEASURED, score, info, **how, seed=seed) for seed in range(VERIFIERS)]
            with ThreadPoolExecutor(VERIFIERS) as threads:
                looks = list(threads.map(lambda each: each.look(client, server.url), verifiers * MEASURED_LOOKS))
    finally:
        server.stop()
    differences = [verifiers[0].difference(look, params) for look in looks]
    probes = np.concatenate([difference.per_prompt for difference in differences])
    rollout = np.stack([response.logprobs for response in sampled])
    whole = [np.concatenate([prompts[response.prompt_index], response.token_ids]) for response in sampled]
    by_dtype: dict[str, dict[str, Any]] = {}
    for ours in DTYPES:
        scored = make_scorer(config, ours)(params, whole)
        trainer = np.stack([each[PROMPT_TOKENS:] for each in scored])
        metrics = mismatch_metrics(trainer, rollout, np.ones(rollout.shape, bool))
        by_dtype[ours] = {name: float(metrics[name]) for name in METRICS}
    by_dtype[dtype]["probes"] = [float(f"{mean:.4g}") for mean in probes]
    return by_dtype


def drawn_looks(probes: np.ndarray, dtype: str, *, mixture: bool, count: int) -> dict[str, float]:
    """Draws the looks of many runs from the mean |server - trainer| of each probe, and counts refusals.

    The means are in nats. The looks at the first version set the band of a run. A publish is refused if two looks are
    outside the band. A run has ``RUN`` publishes, each to one server. A look has ``count`` probes.
    """
    config, rng = VerifyConfig(), np.random.default_rng(0)
    size = (DRAWN, count)
    looks = np.sort(np.concatenate([probes[rng.integers(0, len(probes), size)].mean(axis=1) for _ in range(20)]))
    floor, ceiling = limits(dtype, mixture=mixture)
    calibration = rng.choice(looks, (DRAWN, ROUNDS)).max(axis=1)
    bands = np.clip(config.factor * calibration, floor, ceiling)
    # The probability for one look, for each band.
    outside = 1 - np.searchsorted(looks, bands, side="right") / len(looks)
    return {
        "look_median": float(np.median(looks)),
        "look_largest": float(looks[-1]),
        "band_smallest": float(bands.min()),
        "looks_at_the_first_version_above_the_ceiling": float(np.mean(calibration > ceiling)),
        "looks_out_of_band": float(outside.mean()),
        "runs_refused": float(np.mean(1 - (1 - outside**LOOKS) ** RUN)),
    }


def judge(config: PolicyConfig, dtype: str, own: dict[str, Any]) -> None:
    """Adds the results that follow from the probes, with looks of the size of a run's and of a dense policy's."""
    probes, mixture, sizes = np.asarray(own["probes"]), config.num_experts > 0, VerifyConfig()
    count = TAIL_PROMPTS if mixture else sizes.prompts
    own |= drawn_looks(probes, dtype, mixture=mixture, count=count)
    few = drawn_looks(probes, dtype, mixture=mixture, count=sizes.prompts)
    own["runs_refused_with_4_probes"] = few["runs_refused"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON file for the result; the probes that it has are judged again")
    options = parser.parse_args()
    result: dict[str, Any] = {"command": f"python experiments/mixture_dtypes.py {options.out}"}
    result |= {"tokens": PROMPTS * RESPONSE_TOKENS, "probes": VERIFIERS * MEASURED.prompts * MEASURED_LOOKS}
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name, config in FAMILIES.items():
        if name not in known:
            params = policy(config)
            with tempfile.TemporaryDirectory() as directory:
                save_params(directory, params, config)
                known[name] = {dtype: measure(config, params, Path(directory), dtype) for dtype in DTYPES}
        result[name] = known[name]
        for dtype, of_trainer in result[name].items():
            own = of_trainer[dtype]
            judge(config, dtype, own)
            shown = [f"{of_trainer[ours]['logprob_abs_diff_mean']:.2e}" for ours in DTYPES]
            shown += [f"{own[key]:.2e}" for key in ("look_median", "look_largest", "band_smallest")]
            shown += [f"{own[key]:.0e}" for key in ("runs_refused_with_4_probes", "runs_refused")]
            print(f"| {name} | {dtype} | {' | '.join(shown)} |", flush=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
