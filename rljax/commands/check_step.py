"""A check of a training step with a model's shapes on the devices of this machine, for ``rljax check``.

Weights and rows are random. Everything else is a run's own: the step of ``rljax.run.training.make_step``, the plan of
the dry run, the floating-point operations of ``--compile``.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rljax.commands.check_kernels import CheckFacts, memory_analysis
from rljax.commands.check_machine import device_memory
from rljax.data.prompts import DataConfig
from rljax.plan.compile import memory_by_kind
from rljax.plan.dry_run import beside_bytes, in_units, planned_bytes
from rljax.plan.flops import model_flops
from rljax.plan.machines import card_of_kind
from rljax.policy.config import PolicyConfig
from rljax.policy.model import Remat, init_params, param_shardings
from rljax.rollout.types import RolloutConfig
from rljax.run.config import Config
from rljax.run.packing import make_pack
from rljax.run.training import make_step
from rljax.sharding import make_mesh
from rljax.trainer.packing import PackingConfig, TrainSequence
from rljax.trainer.state import ComputeDtype, PrecisionConfig, TrainState, create_state, make_optimizer

WARM_UP = 2  # steps before the timed ones; the first step compiles
# Compiled for an H100, Qwen3-0.6B's step in bfloat16 with remat none takes 45.8 GiB, and the plan says 39.4.
FULL = 0.8  # the share of a device's memory that the plan may fill when the check chooses remat
_REMATS: tuple[Remat, ...] = ("none", "dots", "blocks")


@dataclass(frozen=True)
class StepSize:
    """The sizes of a step. Each device takes one row at a time."""

    row_tokens: int = 9216
    max_prompt_tokens: int = 1024
    max_response_tokens: int = 8192
    sequences_per_device: int = 16


TINY = StepSize(row_tokens=64, max_prompt_tokens=16, max_response_tokens=48, sequences_per_device=4)


def step_config(size: StepSize, dtype: ComputeDtype, remat: Remat) -> Config:
    """Returns the configuration of a run whose steps have this size on all devices."""
    return Config(
        data=DataConfig(batch_size=jax.device_count(), max_prompt_tokens=size.max_prompt_tokens),
        rollout=RolloutConfig(group_size=size.sequences_per_device, max_response_tokens=size.max_response_tokens),
        precision=PrecisionConfig(compute_dtype=dtype, remat=remat),
        # Random sequences share nothing.
        packing=PackingConfig(size.row_tokens, tokens_per_device=size.row_tokens, share_prefixes=False),
    )


def random_sequences(size: StepSize, count: int, vocab_size: int) -> list[TrainSequence]:
    """Returns sequences of random tokens. Responses have up to half the longest length, and uniform probabilities."""
    rng = np.random.default_rng(0)
    sequences = []
    for index in range(count):
        prompt = int(rng.integers(size.max_prompt_tokens // 16, size.max_prompt_tokens + 1))
        response = int(rng.integers(size.max_response_tokens // 16, size.max_response_tokens // 2 + 1))
        before, after = (rng.integers(0, vocab_size, length, dtype=np.int32) for length in (prompt, response))
        logprobs = np.full(response, -math.log(vocab_size), np.float32)
        sign = 1.0 if index % 2 else -1.0
        sequences.append(TrainSequence.of(before, after, {"rollout_logprobs": logprobs}, advantage=sign))
    return sequences


def random_state(config: Config, policy: PolicyConfig, mesh: Mesh) -> TrainState:
    """Returns a new training state, made directly on the devices of the mesh."""
    params = jax.jit(lambda: init_params(policy, 0), out_shardings=param_shardings(policy, mesh))()
    dynamic = config.precision.compute_dtype == "float16"
    return create_state(params, policy, make_optimizer(config.optimizer), mesh, dynamic_scale=dynamic)


def plan(config: Config, policy: PolicyConfig, mesh: Mesh) -> int:
    """Returns the bytes on a device that the dry run plans for the step without the rest of the run."""
    whole = sum(part for _, part in planned_bytes(config, policy, mesh).values())
    return whole - beside_bytes(config, policy, mesh)


def choose_remat(size: StepSize, dtype: ComputeDtype, policy: PolicyConfig, mesh: Mesh, limit: int | None) -> Config:
    """Returns the configuration with the least recomputation whose plan fits, or else with the most recomputation.

    A plan fits if it takes at most ``FULL`` of ``limit`` (bytes). Every plan fits if ``limit`` is None.
    """
    configs = [step_config(size, dtype, remat) for remat in _REMATS]
    return next((one for one in configs if limit is None or plan(one, policy, mesh) <= FULL * limit), configs[-1])


def check_step(
    name: str, policy: PolicyConfig, dtype: ComputeDtype, steps: int, size: StepSize, remat: Remat | None = None
) -> CheckFacts:
    """Compiles and times a step of the model ``name``, and compares the planned, compiled and used bytes.

    ``steps`` steps after the warm-up are timed. None for ``remat`` means the first of ``_REMATS`` whose plan fits.
    """
    mesh, device = make_mesh(Config().mesh), jax.devices()[0]
    limit = device_memory()
    config = step_config(size, dtype, remat) if remat else choose_remat(size, dtype, policy, mesh, limit)
    planned = plan(config, policy, mesh)
    found: CheckFacts = {"model": name, "devices": mesh.size, "remat": config.precision.remat}
    if limit is not None and planned > limit:
        return found | {"skipped": f"the plan needs {planned / limit:.0%} of a device's memory"}
    step = make_step(config, policy, make_optimizer(config.optimizer), mesh)
    start = time.perf_counter()
    analysis = memory_analysis(step.lower().compile())
    found["compile_s"] = time.perf_counter() - start
    sequences = random_sequences(size, config.num_sequences, policy.vocab_size)
    batch = make_pack(config, policy, config.num_sequences)(sequences)
    state, seconds = random_state(config, policy, mesh), []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        state, numbers, values = step(state, batch, config.optimizer.learning_rate, True)
        jax.block_until_ready((state, numbers, values))
        seconds.append(time.perf_counter() - start)
    wanted = ("policy/loss", "policy/entropy", "optimizer/grad_norm", "optimizer/skipped_updates")
    row = {key: float(numbers[key]) for key in wanted}
    peaks = [(each.memory_stats() or {}).get("peak_bytes_in_use", 0) for each in jax.local_devices()]
    found["bytes"] = {
        "plan": planned,
        "compiler": None if analysis is None else memory_by_kind(analysis)["total"],
        "device": max(peaks) or None,
    }
    rates = speeds(policy, [len(each.ids) for each in sequences], seconds[WARM_UP:], dtype, mesh.size, device)
    problems = [] if step.compilations == 1 else [f"the step was compiled {step.compilations} times"]
    if not_finite := [key for key, value in row.items() if not math.isfinite(value)]:
        problems.append(f"not finite: {not_finite}")
    if row["optimizer/skipped_updates"]:
        problems.append(f"{row['optimizer/skipped_updates']:.0f} updates were skipped")
    share = rates["model_flops_utilisation"]
    says = (
        f"{rates['median_step_s']:.3f} s, {rates['tokens_per_second_and_device']:,.0f} tokens/s a device, "
        f"MFU {'not known' if share is None else f'{share:.1%}'}, remat {config.precision.remat}; "
        + ", ".join(f"{what} {'not known' if n is None else in_units(n)}" for what, n in found["bytes"].items())
    )
    return found | rates | {"row": row, "says": says, "problems": problems}


def speeds(
    policy: PolicyConfig, lengths: list[int], seconds: list[float], dtype: ComputeDtype, devices: int, device: Any
) -> CheckFacts:
    """Returns tokens per second and device, and model-FLOPs utilisation. Padding counts in neither.

    ``lengths`` are the lengths of a step's sequences (tokens), ``seconds`` the times of the steps. The utilisation is
    None if the peak rate of ``device`` is not known.
    """
    median, flops, card = statistics.median(seconds), model_flops(policy, 1, lengths), card_of_kind(device.device_kind)
    return {
        "step_s": seconds,
        "median_step_s": median,
        "tokens_per_second_and_device": sum(lengths) / median / devices,
        "model_flops": flops,
        "model_flops_utilisation": card and flops / (median * devices * card.product_rate(dtype, "default")),
    }
