"""Checks of the devices of this machine and of what a run computes on them, for ``rljax check``.

These are attention, the head, a sum over all devices, and a training step with a model's shapes. Weights, tokens and
rows are random. Everything else of the step is a run's own: ``rljax.run.training.make_step`` and the plan of the dry
run. Each check returns a dict of plain values for JSON. Its ``says`` is a line about them, ``problems`` has a line for
each fault, and ``skipped`` gives the reason if nothing was checked.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rljax.data.prompts import DataConfig
from rljax.distributed.gpus import unused_gpus
from rljax.errors import ConfigError
from rljax.plan.compile import memory_by_kind
from rljax.plan.dry_run import beside_bytes, in_units, planned_bytes
from rljax.policy.attention import choose_attention, find_implementation
from rljax.policy.attention_errors import MOST_ERROR, RESULTS, gradients, random_heads, reference, relative_error
from rljax.policy.config import AttentionName, PolicyConfig
from rljax.policy.head import token_logprobs
from rljax.policy.model import Remat, init_params, param_shardings
from rljax.rollout.types import RolloutConfig
from rljax.run.config import Config
from rljax.run.packing import make_pack
from rljax.run.training import make_step
from rljax.sharding import make_mesh
from rljax.trainer.packing import PackingConfig, TrainSequence
from rljax.trainer.state import ComputeDtype, PrecisionConfig, TrainState, create_state, make_optimizer

CheckFacts = dict[str, Any]
_SHARES = (0.35, 0.25, 0.2, 0.12, 0.06)  # of a row, the lengths of its sequences; the rest is padding
MOST_LOGPROB_ERROR = 1e-3
_HEAD_ERRORS = (
    *("largest_logprob_error", "largest_entropy_error"),
    *("relative_error_of_d_hidden", "relative_error_of_d_table"),
)
_CALLS = 4
# A GPU then adds in the same order each time. By default cuDNN's backward pass adds in any order. Triton's products are
# switched off, because under the first option XLA chooses no tiling for them.
_FIXED_SUMS: CheckFacts = {"xla_gpu_exclude_nondeterministic_ops": True, "xla_gpu_enable_triton_gemm": False}
WARM_UP = 2  # steps before the timed ones; the first step compiles
_NUMBERS = ("policy/loss", "policy/entropy", "optimizer/grad_norm", "optimizer/skipped_updates")


def said(*words: str) -> str | None:
    """Returns the standard output of a program, or None if it is not installed or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    return None


def nvidia_smi(field: str) -> list[str]:
    """Returns a field of nvidia-smi for each GPU of this machine. The list is empty if nvidia-smi does not answer."""
    return (said("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader") or "").splitlines()


def device_memory() -> int | None:
    """Returns the memory that JAX may use on its first device (bytes), or None if JAX does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def check_devices() -> CheckFacts:
    """Describes the devices, their drivers and the installed packages. GPUs that JAX does not use are a problem."""
    device, memory = jax.devices()[0], device_memory()
    try:
        unused = unused_gpus(jax.local_device_count() if device.platform == "gpu" else 0)
    except ConfigError as error:
        unused = str(error)
    of_memory = in_units(memory) if memory else "memory not said"
    return {
        "says": f"{jax.device_count()} x {device.device_kind}, {of_memory}, jax {jax.__version__}",
        "kind": device.device_kind,
        "platform": device.platform,
        "count": jax.device_count(),
        "memory_bytes": memory,
        "compute_capability": getattr(device, "compute_capability", None),
        "runtime": device.client.platform_version,
        "driver": nvidia_smi("name,driver_version,memory.total"),
        "python": platform.python_version(),
        "packages": {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": said("git", "-C", str(Path(__file__).parents[2]), "rev-parse", "HEAD"),
        "problems": [unused] if unused else [],
    }


def median_ms(run: Callable[[], Any], repeats: int) -> float:
    """Returns the median time of a call that has run before (ms). Four are queued at once to hide the host's time."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(_CALLS)])
        seconds.append((time.perf_counter() - start) / _CALLS)
    return 1000 * statistics.median(seconds)


def check_attention(name: AttentionName, tokens: int, dtype: str, policy: PolicyConfig, repeats: int) -> CheckFacts:
    """Measures attention on a row of ``tokens`` tokens: errors of both passes against float32, time, leaks of segments.

    If ``name`` is auto and auto chooses xla, nothing is measured, because another part checks xla.
    """
    here = (jax.devices()[0], dtype, policy.head_dim)
    picked = find_implementation(name, *here)
    if name != picked == "xla":
        return {"skipped": "auto is xla here"}
    lengths = [int(share * tokens) for share in _SHARES]
    ends = np.zeros((1, tokens), np.int32)
    ends[0, : sum(lengths)] = np.repeat(np.cumsum(lengths), lengths)
    arrays = random_heads(ends, dtype, policy)
    lowered = jax.jit(gradients(choose_attention(name, *here))).lower(*arrays, ends)
    program = lowered.compile()
    results = zip(RESULTS, program(*arrays, ends), reference(*arrays, ends), strict=True)
    errors = {what: float(relative_error(got, expected)) for what, got, expected in results}
    ms, most = median_ms(lambda: program(*arrays, ends), repeats), MOST_ERROR[dtype]
    problems = [f"relative error of {what} is {error:.2g}" for what, error in errors.items() if not error <= most]
    leaks = find_leaks(lowered, arrays, ends)
    return leaks | {
        "says": f"{picked}: error {max(errors.values()):.1e}, {ms:.2f} ms with backward, {leaks['says']}",
        "implementation": picked,
        "segments": lengths,
        "relative_error": errors,
        "forward_and_backward_ms": ms,
        "problems": problems + leaks["problems"],
    }


@jax.jit
def _unequal(x: jax.Array, y: jax.Array, where: jax.Array) -> jax.Array:
    return jnp.sum((x != y) & where[:, :, None, None])


def find_leaks(lowered: jax.stages.Lowered, arrays: Sequence[jax.Array], ends: np.ndarray) -> CheckFacts:
    """Counts the results of attention that change in other segments when the inputs of the second one are changed.

    A segment is one sequence of the row. A result that differs between two equal runs is not judged for leaks.
    """
    changed = ends == np.unique(ends)[2]
    others = [jnp.where(changed[:, :, None, None], x * 3 + 1, x).astype(x.dtype) for x in arrays]
    fixed, on_gpu = True, jax.default_backend() == "gpu"
    try:
        program = lowered.compile(compiler_options=_FIXED_SUMS if on_gpu else None)
    except jax.errors.JaxRuntimeError:  # XLA refuses the fixed order
        fixed, program = False, lowered.compile()
    before, again, after = (program(*x, ends) for x in (arrays, arrays, others))

    def unequal(xs: Any, ys: Any, where: np.ndarray) -> dict[str, int]:
        return {what: int(_unequal(x, y, where)) for what, x, y in zip(RESULTS, xs, ys, strict=True)}

    leaked, unrepeatable = unequal(before, after, (ends > 0) & ~changed), unequal(before, again, ends > 0)
    problems = [f"{leaked[what]} values of {what} leaked" for what in RESULTS if leaked[what] > 0 == unrepeatable[what]]
    problems += [f"{what} differs between equal runs" for what in RESULTS if fixed and unrepeatable[what]]
    own = unequal(before, after, changed)
    problems += [f"{what} of the changed segment did not change" for what in RESULTS if not own[what]]
    order = "" if fixed else ", sums are not in a fixed order"
    return {
        "says": f"{sum(leaked.values())} values of other segments changed{order}",
        "fixed_sums": fixed,
        "leaked_values": leaked,
        "values_that_differ_between_equal_runs": unrepeatable,
        "problems": problems,
    }


def naive_logprobs(hidden: Any, table: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Computes log-probabilities and entropies of tokens [n], as ``token_logprobs`` does, from all logits at once."""
    logits = jnp.einsum("nd,vd->nv", hidden, table, preferred_element_type=jnp.float32)
    logp = jax.nn.log_softmax(logits, axis=-1)
    picked = jnp.take_along_axis(logp, targets[:, None], axis=-1)[:, 0]
    return picked, -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def check_head(tokens: int, dtype: str, policy: PolicyConfig, repeats: int, max_chunk: int) -> CheckFacts:
    """Measures the LM head, which works in chunks: its errors against float32 logits all at once, and its time."""
    rng = np.random.default_rng(0)
    d, v = policy.hidden_size, policy.vocab_size
    hidden = jnp.asarray(rng.standard_normal((tokens, d), np.float32), dtype)
    table = jnp.asarray(rng.standard_normal((v, d), np.float32) * (2 * d**-0.5), dtype)
    targets = jnp.asarray(rng.integers(0, v, tokens), jnp.int32)
    cotangents = tuple(jnp.asarray(rng.standard_normal(tokens, np.float32)) for _ in range(2))

    def with_gradients(head: Callable[..., Any]) -> Callable[..., tuple[jax.Array, ...]]:
        def run(hidden: Any, table: Any) -> tuple[jax.Array, ...]:
            values, pull = jax.vjp(lambda hidden, table: head(hidden, table, targets)[:2], hidden, table)
            return *values, *pull(cotangents)

        return jax.jit(run)

    with jax.default_matmul_precision("highest"):
        wide = hidden.astype(jnp.float32), table.astype(jnp.float32)
        expected = jax.device_get(with_gradients(naive_logprobs)(*wide))
    del wide
    run = with_gradients(functools.partial(token_logprobs, max_chunk=max_chunk))
    errors = {
        name: float(jnp.max(jnp.abs(x - y)) if name.startswith("largest") else relative_error(x, y))
        for name, x, y in zip(_HEAD_ERRORS, run(hidden, table), expected, strict=True)
    }
    ms = median_ms(lambda: run(hidden, table), repeats)
    limits = {name: MOST_LOGPROB_ERROR if name.startswith("largest") else MOST_ERROR[dtype] for name in errors}
    return errors | {
        "says": f"error {errors['largest_logprob_error']:.1e}, {ms:.1f} ms",
        "forward_and_backward_ms": ms,
        "problems": [
            f"{name.replace('_', ' ')} is {error:.2g}" for name, error in errors.items() if not error <= limits[name]
        ],
    }


def check_collective(mebibytes: int, repeats: int) -> CheckFacts:
    """Sums an array over all devices of this process (NCCL on GPUs), checks the sum, and measures the bandwidth.

    The bandwidth is the bus bandwidth of nccl-tests: 2 (n - 1) / n times the bytes on one device, divided by the time.
    """
    devices = np.asarray(jax.local_devices())
    n, size = len(devices), mebibytes * 2**18
    if n < 2:
        return {"skipped": "one device is here, so nothing travels between devices"}
    split, mesh = PartitionSpec("cards"), Mesh(devices, ("cards",))
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "cards"), mesh=mesh, in_specs=split, out_specs=split))
    x = jax.jit(lambda: jnp.arange(n * size) // size + 1.0, out_shardings=NamedSharding(mesh, split))()
    wrong = [part.device for part in total(x).addressable_shards if bool(jnp.any(part.data != n * (n + 1) / 2))]
    ms = median_ms(lambda: total(x), repeats)
    rate = 2 * (n - 1) / n * 4 * size / ms / 1e6
    says = f"{n} devices added {mebibytes} MiB in {ms:.2f} ms, {rate:.1f} GB/s a device"
    problems = [f"the sum is wrong on {device}" for device in wrong]
    return {"devices": n, "ms": ms, "gigabytes_per_second": rate, "says": says, "problems": problems}


@dataclass(frozen=True)
class StepSize:
    """The sizes of a training step. Each device takes one row at a time."""

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


def check_step(
    name: str, policy: PolicyConfig, dtype: ComputeDtype, steps: int, size: StepSize, remat: Remat = "blocks"
) -> CheckFacts:
    """Compiles and times a step of the model ``name``, and compares the planned, compiled and used bytes.

    ``steps`` steps after the warm-up are timed. A step whose planned bytes exceed the memory of a device is skipped.
    """
    mesh, config, limit = make_mesh(Config().mesh), step_config(size, dtype, remat), device_memory()
    planned = sum(part for _, part in planned_bytes(config, policy, mesh).values()) - beside_bytes(config, policy, mesh)
    found: CheckFacts = {"model": name, "devices": mesh.size, "remat": remat}
    if limit is not None and planned > limit:
        return found | {"skipped": f"the plan needs {planned / limit:.0%} of a device's memory"}
    step, sizes = make_step(config, policy, mesh), {"plan": planned}
    start = time.perf_counter()
    compiled = step.lower().compile()
    found["compile_s"] = time.perf_counter() - start
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # some programs from the cache have no analysis
        sizes["compiler"] = memory_by_kind(compiled.memory_analysis())["total"]
    sequences = random_sequences(size, config.num_sequences, policy.vocab_size)
    batch = make_pack(config, policy, config.num_sequences)(sequences)
    state, seconds = random_state(config, policy, mesh), []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        state, numbers, values = step(state, batch, config.optimizer.learning_rate, True)
        jax.block_until_ready((state, numbers, values))
        seconds.append(time.perf_counter() - start)
    row = {key: float(numbers[key]) for key in _NUMBERS}
    if peak := max((each.memory_stats() or {}).get("peak_bytes_in_use", 0) for each in jax.local_devices()):
        sizes["device"] = peak
    median, lengths = statistics.median(seconds[WARM_UP:]), [len(each.ids) for each in sequences]
    rate = sum(lengths) / median / mesh.size  # padding does not count
    problems = [] if step.compilations == 1 else [f"the step was compiled {step.compilations} times"]
    if not_finite := [key for key, value in row.items() if not math.isfinite(value)]:
        problems.append(f"not finite: {not_finite}")
    if row["optimizer/skipped_updates"]:
        problems.append(f"{row['optimizer/skipped_updates']:.0f} updates were skipped")
    bytes_of = ", ".join(f"{what} {in_units(count)}" for what, count in sizes.items())
    times = {"step_s": seconds[WARM_UP:], "median_step_s": median, "tokens_per_second_and_device": rate}
    says = f"{median:.3f} s, {rate:,.0f} tokens/s a device, remat {remat}; {bytes_of}"
    return found | times | {"lengths": lengths, "bytes": sizes, "row": row, "says": says, "problems": problems}
