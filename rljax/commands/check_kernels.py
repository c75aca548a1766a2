"""Checks of attention, of the head and of a sum over all devices of this machine, for ``rljax check``.

They measure errors, leaks between segments, times and memory. Each function returns plain values for JSON, with a line
for each fault under ``problems``.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rljax.plan.flops import attention_flops
from rljax.policy.attention import PackedAttention, choose_attention, find_implementation
from rljax.policy.attention_errors import MOST_ERROR, RESULTS, gradients, random_heads, reference, relative_error
from rljax.policy.config import AttentionName, PolicyConfig
from rljax.policy.head import token_logprobs

CheckFacts = dict[str, Any]
_SHARES = (0.35, 0.25, 0.2, 0.12, 0.06)
MOST_LOGPROB_ERROR = 1e-3
_HEAD_ERRORS = (
    *("largest_logprob_error", "largest_entropy_error"),
    *("relative_error_of_d_hidden", "relative_error_of_d_table"),
)
_CALLS = 4
# Triton's products are switched off, because under the first option XLA chooses no tiling for them.
_FIXED_SUMS: CheckFacts = {"xla_gpu_exclude_nondeterministic_ops": True, "xla_gpu_enable_triton_gemm": False}


def median_ms(run: Callable[[], Any], repeats: int) -> float:
    """Returns the median time of a call that has run before (ms). Calls are queued by fours to hide the host's time."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(_CALLS)])
        seconds.append((time.perf_counter() - start) / _CALLS)
    return 1000 * statistics.median(seconds)


def packed_row(tokens: int, dtype: str, policy: PolicyConfig) -> tuple[list[jax.Array], np.ndarray, list[int]]:
    """Returns one row of five random sequences and padding: its arrays, its ends [1, t], and the lengths.

    The arrays are q, k, v, and a cotangent of the output, which is 0 on padding, as after a loss.
    """
    lengths = [int(share * tokens) for share in _SHARES]
    ends = np.zeros((1, tokens), np.int32)
    ends[0, : sum(lengths)] = np.repeat(np.cumsum(lengths), lengths)
    return random_heads(ends, dtype, policy), ends, lengths


def on_named(
    check: Callable[..., CheckFacts], name: AttentionName, tokens: int, dtype: str, policy: PolicyConfig, *rest: Any
) -> CheckFacts:
    """Runs a check of one attention implementation. If auto means xla, it is skipped, because xla is checked anyway."""
    here = (jax.devices()[0], dtype, policy.head_dim)
    picked = find_implementation(name, *here)
    if name != picked == "xla":
        return {"skipped": "auto is xla here"}
    found = check(choose_attention(name, *here), tokens, dtype, policy, *rest)
    return found | {"implementation": picked, "says": f"{picked}: {found['says']}"}


def check_attention(
    attention: PackedAttention, tokens: int, dtype: str, policy: PolicyConfig, repeats: int
) -> CheckFacts:
    """Measures one row's forward and backward pass: its errors against float32, times, and operations a second."""
    arrays, ends, lengths = packed_row(tokens, dtype, policy)
    both, alone = jax.jit(gradients(attention)), jax.jit(attention)
    got, expected = both(*arrays, ends), reference(*arrays, ends)
    errors = {what: float(relative_error(x, y)) for what, x, y in zip(RESULTS, got, expected, strict=True)}
    del got, expected
    most = MOST_ERROR[dtype]
    q, k, v, _ = arrays
    jax.block_until_ready(alone(q, k, v, ends))
    forward_ms = median_ms(lambda: alone(q, k, v, ends), repeats)
    both_ms = median_ms(lambda: both(*arrays, ends), repeats)
    flops = attention_flops(lengths, num_heads=policy.num_heads, head_dim=policy.head_dim)
    forward_rate, both_rate = flops.forward / forward_ms / 1e9, sum(flops) / both_ms / 1e9
    return {
        "says": f"error {max(errors.values()):.1e}, forward {forward_ms:.2f} ms ({forward_rate:.1f} TFLOP/s), "
        f"with backward {both_ms:.2f} ms ({both_rate:.1f} TFLOP/s)",
        "segments": lengths,
        "relative_error": errors,
        "forward_ms": forward_ms,
        "forward_and_backward_ms": both_ms,
        "forward_tflops_per_s": forward_rate,
        "forward_and_backward_tflops_per_s": both_rate,
        "problems": [f"relative error of {what} is {error:.2g}" for what, error in errors.items() if not error <= most],
    }


@jax.jit
def _unequal(x: jax.Array, y: jax.Array, where: jax.Array) -> jax.Array:
    return jnp.sum((x != y) & where[:, :, None, None])


def compile_with_fixed_sums(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, bool]:
    """Compiles a program so that a GPU adds in the same order each time. Returns it, and whether the order is fixed.

    By default cuDNN's backward pass adds in any order. If XLA refuses the fixed order, the default is compiled.
    """
    if jax.default_backend() != "gpu":
        return lowered.compile(), True
    try:
        return lowered.compile(compiler_options=_FIXED_SUMS), True
    except jax.errors.JaxRuntimeError:
        return lowered.compile(), False


def check_leak(attention: PackedAttention, tokens: int, dtype: str, policy: PolicyConfig) -> CheckFacts:
    """Counts the values in other segments that change when one whole segment is changed.

    If the order of sums is not fixed, results that differ between two equal runs are not judged.
    """
    arrays, ends, lengths = packed_row(tokens, dtype, policy)
    changed = ends == sum(lengths[:2])
    others = [jnp.where(changed[:, :, None, None], x * 3 + 1, x).astype(x.dtype) for x in arrays]
    program, fixed = compile_with_fixed_sums(jax.jit(gradients(attention)).lower(*arrays, ends))
    before, again, after = (program(*x, ends) for x in (arrays, arrays, others))

    def unequal(xs: Any, ys: Any, where: np.ndarray) -> dict[str, int]:
        return {what: int(_unequal(x, y, where)) for what, x, y in zip(RESULTS, xs, ys, strict=True)}

    leaked = unequal(before, after, (ends > 0) & ~changed)
    unrepeatable = unequal(before, again, ends > 0)
    own = unequal(before, after, changed)
    judged = [what for what, count in unrepeatable.items() if not count]
    problems = [f"{leaked[what]} values of {what} leaked" for what in judged if leaked[what]]
    if fixed:
        problems += [f"{what} differs between equal runs" for what in RESULTS if what not in judged]
    problems += [f"{what} of the changed segment did not change" for what, count in own.items() if not count]
    order = "" if fixed else ", sums are not in a fixed order"
    return {
        "says": f"{sum(leaked.values())} values of other segments changed{order}",
        "fixed_sums": fixed,
        "leaked_values": leaked,
        "values_that_differ_between_equal_runs": unrepeatable,
        "values_that_changed_in_the_changed_segment": own,
        "problems": problems,
    }


def naive_logprobs(hidden: Any, table: Any, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Computes the results of ``token_logprobs`` from all logits at once."""
    logits = jnp.einsum("nd,vd->nv", hidden, table, preferred_element_type=jnp.float32)
    logp = jax.nn.log_softmax(logits, axis=-1)
    picked = jnp.take_along_axis(logp, targets[:, None], axis=-1)[:, 0]
    return picked, -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def check_head(tokens: int, dtype: str, policy: PolicyConfig, repeats: int, max_chunk: int) -> CheckFacts:
    """Measures the head in chunks: its errors against all logits at once in float32, its time, and temporaries."""
    rng = np.random.default_rng(0)
    d, v = policy.hidden_size, policy.vocab_size
    hidden = jnp.asarray(rng.standard_normal((tokens, d), np.float32), dtype)
    table = jnp.asarray(rng.standard_normal((v, d), np.float32) * (2 * d**-0.5), dtype)
    targets = jnp.asarray(rng.integers(0, v, tokens), jnp.int32)
    cotangents = tuple(jnp.asarray(rng.standard_normal(tokens, np.float32)) for _ in range(2))

    def compiled(head: Callable[..., Any], *arrays: jax.Array) -> jax.stages.Compiled:
        def run(hidden: Any, table: Any) -> tuple[jax.Array, ...]:
            values, pull = jax.vjp(lambda hidden, table: head(hidden, table, targets)[:2], hidden, table)
            return *values, *pull(cotangents)

        return jax.jit(run).lower(*arrays).compile()

    wide = hidden.astype(jnp.float32), table.astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        expected = jax.device_get(compiled(naive_logprobs, *wide)(*wide))
    del wide
    program = compiled(functools.partial(token_logprobs, max_chunk=max_chunk), hidden, table)
    got = program(hidden, table)
    errors = {
        name: float(jnp.max(jnp.abs(x - y)) if name.startswith("largest") else relative_error(x, y))
        for name, x, y in zip(_HEAD_ERRORS, got, expected, strict=True)
    }
    del got, expected
    analysis, ms = memory_analysis(program), median_ms(lambda: program(hidden, table), repeats)
    limits = {name: MOST_LOGPROB_ERROR if name.startswith("largest") else MOST_ERROR[dtype] for name in errors}
    return errors | {
        "says": f"error {errors['largest_logprob_error']:.1e}, {ms:.1f} ms",
        "forward_and_backward_ms": ms,
        "temporary_bytes": None if analysis is None else int(analysis.temp_size_in_bytes),
        "problems": [
            f"{name.replace('_', ' ')} is {error:.2g}" for name, error in errors.items() if not error <= limits[name]
        ],
    }


def memory_analysis(compiled: jax.stages.Compiled) -> Any:
    """Returns the compiler's plan of memory, or None if the backend has none, as for some programs from the cache."""
    try:
        return compiled.memory_analysis()
    except jax.errors.JaxRuntimeError:
        return None


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
