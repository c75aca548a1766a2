"""Checks of the parts of a run with the toy base, for ``rljax check``: embedded engine, checkpoint, vLLM server.

Each function returns plain values for JSON, in the form of ``rljax.commands.check_machine``.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rljax import train
from rljax.commands import check_step as training
from rljax.commands.check_machine import nvidia_smi
from rljax.errors import ServerFailedError
from rljax.policy.config import PolicyConfig
from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.policy.hub import CONFIGS
from rljax.policy.score import make_scorer
from rljax.record.rows import read_rows
from rljax.rollout.build import load_jax_engine
from rljax.rollout.servers.verify import limits, random_prompts
from rljax.rollout.servers.vllm.server import ServerConfig, start, vllm_python
from rljax.rollout.types import SamplingParams
from rljax.run.checkpoint import Checkpointer
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.precision import Dtype

Found = dict[str, Any]
BASE = CONFIGS / "toy-base"
STEPS = 2
DTYPE: Dtype = "bfloat16"
_WORDS = (
    *(str(CONFIGS / "quickstart.yaml"), "--model.path", str(BASE), "--run.steps", str(STEPS)),
    *("--rollout.engine", "vllm", "--rollout.dtype", DTYPE),
    *("--data.batch-size", "2", "--rollout.group-size", "4", "--rollout.max-response-tokens", "12"),
    *("--packing.row-tokens", "64", "--packing.rows-per-micro-batch", "2", "--diagnosis.grad-noise-every", "0"),
    *("--eval.every", "0", "--checkpoint.every", "0", "--run.processes", "1"),
)


def check_engine() -> Found:
    """Generates with the embedded engine twice, and compares its log-probabilities with the trainer's."""
    policy = read_config(BASE)
    engine = load_jax_engine(BASE, DTYPE, 8)
    prompts, sampling = random_prompts((8, 8), policy.vocab_size), SamplingParams(32)
    responses = list(engine.generate(prompts, 2, sampling, seed=0))
    began = time.perf_counter()
    again = list(engine.generate(prompts, 2, sampling, seed=0))
    seconds, tokens = time.perf_counter() - began, sum(one.length for one in again)
    sequences = [np.concatenate([prompts[one.prompt_index], one.token_ids]) for one in responses]
    scored = make_scorer(policy, DTYPE)(load_params(BASE, policy), sequences)
    gaps = [np.abs(one.logprobs - logprobs[-one.length :]) for one, logprobs in zip(responses, scored, strict=True)]
    mean, limit = float(np.concatenate(gaps).mean()), limits(DTYPE)[1]
    same = all(np.array_equal(x.token_ids, y.token_ids) for x, y in zip(responses, again, strict=True))
    problems = [] if mean <= limit else [f"mean |engine - trainer| is {mean:.3g} nats, the ceiling is {limit:.3g}"]
    if not same:
        problems.append("the same seed gave other tokens")
    says = f"{tokens} tokens in {seconds:.2f} s, mean |engine - trainer| {mean:.2g} nats (limit {limit:.2g})"
    numbers = {"tokens": tokens, "tokens_per_second": tokens / seconds, "mean_abs_difference": mean}
    return numbers | {"says": says, "problems": problems}


def check_checkpoint(policy: PolicyConfig) -> Found:
    """Saves a random state with orbax, reads it back onto all devices, and compares the bits."""
    state = training.random_state(training.step_config(training.TINY, DTYPE, "none"), policy, make_mesh(MeshConfig()))
    form = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Checkpointer(folder)) as checkpoints:
        checkpoints.save(1, state, {"step": 1})
        checkpoints.wait()
        restored, _ = checkpoints.restore(1, form)
    seconds = time.perf_counter() - began
    pairs = list(zip(*(jax.tree.leaves(jax.device_get(one)) for one in (state, restored)), strict=True))
    differ = sum(np.asarray(x).tobytes() != np.asarray(y).tobytes() for x, y in pairs)
    says = f"{len(pairs)} arrays saved and restored with equal bits in {seconds:.2f} s"
    problems = [f"{differ} of {len(pairs)} arrays were restored with other bits"] if differ else []
    return {"arrays": len(pairs), "says": says, "problems": problems}


def check_vllm(wait_s: float) -> Found:
    """Starts a vLLM server and trains two steps with its rollouts.

    The server must be ready within ``wait_s`` seconds. It has the last visible GPU, and the trainer the first one.
    """
    try:
        python = str(vllm_python())
    except RuntimeError as error:
        return {"skipped": str(error)}
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = nvidia_smi("index") if given is None else [card for card in given.split(",") if card]
    more: Found = {}
    if cards:
        os.environ |= {"CUDA_VISIBLE_DEVICES": cards[0], "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        share = ("--gpu-memory-utilization", "0.3")
        more = {"extra_env": {"CUDA_VISIBLE_DEVICES": cards[-1]}, "extra_args": share}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "server.log")
        config = ServerConfig(str(BASE), python, DTYPE, max_model_len=512, log_path=log, **more)
        began = time.perf_counter()
        try:
            with start(config, wait_s) as server:
                ready = time.perf_counter()
                status = train.main([*_WORDS, "--rollout.urls", server.url, "--run.dir", f"{folder}/run"])
        except ServerFailedError as error:
            return {"problems": [_reason(str(error))], "log": str(error)[-4000:]}
        trained = time.perf_counter() - ready
        rows = read_rows(f"{folder}/run/metrics.jsonl")
    names = ("verified_tensors", "verify_abs_diff_mean", "verify_band")
    publishes = [{name: row.get(f"publish/{name}") for name in names} for row in rows]
    found: Found = {"server_s": round(ready - began, 2), "run_s": round(trained, 2), "publishes": publishes}
    problems = judge_publishes(status, publishes)
    if problems:
        return found | {"problems": problems}
    tensors, mean, band = publishes[-1].values()
    proven = f"bits of {tensors:.0f} tensors equal, mean |server - trainer| {mean:.2g} nats (band {band:.2g})"
    return found | {"says": f"ready in {ready - began:.0f} s, {len(rows)} steps in {trained:.0f} s; {proven}"}


def judge_publishes(status: int, publishes: Sequence[Found]) -> list[str]:
    """Returns the problems of a run of ``STEPS`` steps, from its exit status and its recorded publishes."""
    problems = [f"rljax train ended with status {status}"] if status else []
    if len(publishes) != STEPS:
        problems.append(f"{len(publishes)} of {STEPS} steps were recorded")
    for step, (tensors, mean, band) in enumerate(map(dict.values, publishes), 1):
        if not tensors:
            problems.append(f"step {step}: the bits of no tensor were verified")
        if None in (mean, band) or not mean <= band:
            problems.append(f"step {step}: mean |server - trainer| is {mean} nats, the band is {band}")
    return problems


def _reason(said: str) -> str:
    """Returns why a server failed, in one line: the last error in the end of its log."""
    first, *log = said.splitlines()
    named = [line.strip() for line in log if "error:" in line.lower()] or log
    return f"{first.partition(';')[0]}: {''.join(named[-1:])[:160]}"
