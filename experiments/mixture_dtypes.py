"""Measures the mismatch of each family of policies with a real vLLM server, for each pair of dtypes.

    python experiments/mixture_dtypes.py benchmarks/mixture_dtypes.json

The policies of the three families are tiny and random (two blocks, width 64; the mixture has 16 experts, 4 per token).
All servers of a family have the same float32 weights and sample responses to the same prompts. The trainer's forward
pass scores the same tokens in each 16-bit dtype and in float32. Nine servers start one after another; each takes about
half a minute on a CPU.

The width of the band of a verification follows from the same tokens, if both sides have one dtype. It is the mean of
|server - trainer| over the probes of a round (``VerifyConfig``), drawn 20,000 times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
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
from rljax.rollout.publish_config import VerifyConfig
from rljax.rollout.servers.verify import LOOKS
from rljax.rollout.servers.vllm.server import ServerConfig, start, vllm_python
from rljax.rollout.types import SamplingParams

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
ROUNDS = 20_000


def policy(config: PolicyConfig) -> Params:
    """Makes random weights; norms and biases are random, too."""
    params = init_params(config, 0)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [leaf + 0.05 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, moved)


def measure(config: PolicyConfig, params: Params, model: Path, dtype: str) -> dict[str, dict[str, float]]:
    """Measures the mismatch with a server of ``model`` in ``dtype``, by the trainer's dtype."""
    prompts = [np.random.default_rng(i).integers(2, 256, PROMPT_TOKENS).astype(np.int32) for i in range(PROMPTS)]
    server = start(ServerConfig(str(model), python=str(vllm_python()), dtype=dtype, max_model_len=256))  # type: ignore[arg-type]
    try:
        with contextlib.closing(connect([server.url])) as engine:
            sampled = list(engine.generate(prompts, 1, SamplingParams(RESPONSE_TOKENS), seed=0))
    finally:
        server.stop()
    rollout = np.stack([response.logprobs for response in sampled])
    whole = [np.concatenate([prompts[response.prompt_index], response.token_ids]) for response in sampled]
    by_dtype = {}
    for ours in DTYPES:
        scored = make_scorer(config, ours)(params, whole)
        trainer = np.stack([each[PROMPT_TOKENS:] for each in scored])
        metrics = mismatch_metrics(trainer, rollout, np.ones(rollout.shape, bool))
        by_dtype[ours] = {name: float(metrics[name]) for name in METRICS}
        if ours == dtype:
            by_dtype[ours] |= probe_rounds(np.abs(trainer - rollout), dtype, mixture=config.num_experts > 0)
    return by_dtype


def probe_rounds(gaps: np.ndarray, dtype: str, *, mixture: bool) -> dict[str, float]:
    """Draws many rounds from |server - trainer| [responses, tokens] and counts how often a correct server fails.

    The means are in nats. Earlier rounds set the band that judges the rounds of a publish.
    """
    probes, rng = VerifyConfig(), np.random.default_rng(0)
    size = (ROUNDS, LOOKS + probes.rounds, probes.prompts)
    prompts = rng.integers(0, len(gaps), size)
    first = rng.integers(0, gaps.shape[1] - probes.tokens + 1, size)
    means = gaps[prompts[..., None], first[..., None] + np.arange(probes.tokens)].mean(axis=(2, 3))
    judged, calibration = means[:, :LOOKS].min(axis=1), means[:, LOOKS:].max(axis=1)
    floor, ceiling = probes.limits(dtype, mixture=mixture)
    bands = np.clip(probes.factor * calibration, floor, ceiling)
    return {
        "probe_round_median": float(np.median(means)),
        "probe_round_largest": float(means.max()),
        "sound_calibrations_refused": float(np.mean(calibration > ceiling)),
        "sound_publishes_refused": float(np.mean(judged > bands)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    result: dict[str, Any] = {"command": "python experiments/mixture_dtypes.py", "tokens": PROMPTS * RESPONSE_TOKENS}
    for name, config in FAMILIES.items():
        params = policy(config)
        with tempfile.TemporaryDirectory() as directory:
            save_params(directory, params, config)
            result[name] = {dtype: measure(config, params, Path(directory), dtype) for dtype in DTYPES}
        for dtype, of_trainer in result[name].items():
            shown = [f"{of_trainer[ours]['logprob_abs_diff_mean']:.2e}" for ours in DTYPES]
            rounds = [f"{of_trainer[dtype][f'probe_round_{which}']:.2e}" for which in ("median", "largest")]
            rounds.append(f"{of_trainer[dtype]['sound_publishes_refused']:.2%}")
            print(f"| {name} | {dtype} | {' | '.join(shown)} | {' | '.join(rounds)} |", flush=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
