"""A plugin of vLLM that lets tpu-inference run where JAX has only a CPU, and plants faults that a check must notice.

``tpu_plugins`` beside it has the entry point. :data:`REPLACED` lists what is replaced in tpu-inference 0.32.0; a name
that is not there any more ends the server's start. The mesh needs no replacement if device indexes are given
(:func:`options`): only without them devices are sorted by coordinates, which a CPU does not have.
"""

import importlib
import inspect
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent
FAULT, COMPILED = "RLJAX_TEST_FAULT", "RLJAX_TEST_COMPILED"
"""The variables that name a file with the fault of updates, and a file that gets a byte for each compilation."""


def options(workers: int = 1) -> tuple[str, ...]:
    """Returns the further arguments of ``vllm serve`` for ``workers`` simulated devices."""
    sharding = f'{{"sharding":{{"sharding_strategy":{{"device_indexes":{list(range(workers))}}}}}}}'
    sizes = f"--max-num-batched-tokens 256 --num-gpu-blocks-override 256 --tensor-parallel-size {workers}".split()
    return (*sizes, "--additional-config", sharding)


def environment(directory: Path, workers: int = 1) -> dict[str, str]:
    """Returns the variables of a server whose files for :data:`FAULT` and :data:`COMPILED` are in ``directory``."""
    files = {FAULT: str(directory / "fault"), COMPILED: str(directory / "compiled")}
    for path in files.values():
        Path(path).touch()
    paths = os.pathsep.join(map(str, (SUPPORT / "tpu_plugins", SUPPORT, SUPPORT.parents[1])))
    machine = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v6e-1", "TPU_NAME": "none", "TPU_WORKER_ID": "0"}
    devices = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={workers}"}
    quick = {"SKIP_JAX_PRECOMPILE": "1", "VLLM_DISABLE_COMPILE_CACHE": "1", "OMP_NUM_THREADS": "1"}
    other = {"CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0", "JAX_NUMPY_RANK_PROMOTION": "allow"}
    other["PYTHONDONTWRITEBYTECODE"] = ""
    return {"PYTHONPATH": paths, **machine, **devices, **quick, **other, **files}


def attend(
    queries, keys, values, kv_cache, kv_lens, page_indices, cu_q_lens, distribution, *, sm_scale=1.0,
    sliding_window=None, soft_cap=None, q_scale=None, k_scale=None, v_scale=None, **others,
):  # fmt: skip
    """Computes what the kernels in kernels/ragged_paged_attention/v3 do: (output [t, h, d], the updated cache).

    With heads of 64 a key and its value share the last axis of the cache.
    """
    import jax
    import jax.numpy as jnp
    from tpu_inference.kernels.ragged_paged_attention.v3 import kernel, kernel_hd64

    assert (q_scale, k_scale, v_scale) == (None, None, None)
    plain = {"use_causal_mask": True, "update_kv_cache": True, "skip_kv_mask": False}
    assert plain == {name: others.get(name, plain[name]) for name in plain}
    assert others.get("out_dtype") in (None, queries.dtype)
    (tokens, heads, width), kv_heads = queries.shape, keys.shape[1]
    page_size, merge_kv = kv_cache.shape[1], (kernel_hd64 if width == 64 else kernel).merge_kv
    padded_width = width if width == 64 else kv_cache.shape[-1]
    sequences = kv_lens.shape[0]
    pages = page_indices.reshape(sequences, -1)
    # The sequence and the position of each token. Tokens after the last sequence are padding.
    index, count = jnp.arange(tokens), distribution[-1]
    ends = jnp.where(jnp.arange(sequences) < count, cu_q_lens[1:], jnp.iinfo(jnp.int32).max)
    sequence = jnp.minimum(jnp.searchsorted(ends, index, side="right"), sequences - 1)
    real = index < cu_q_lens[count]
    position = kv_lens[sequence] - cu_q_lens[sequence + 1] + index
    # The new keys and values are written, and padding nowhere.
    page = jnp.where(real, pages[sequence, position // page_size], kv_cache.shape[0])
    kv_cache = kv_cache.at[page, position % page_size].set(merge_kv(keys, values), mode="drop")
    # The keys and values of each token's sequence are read.
    held = kv_cache[pages].reshape(sequences, pages.shape[1] * page_size, -1)[..., : 2 * kv_heads * padded_width]
    held = held.reshape(*held.shape[:2], kv_heads, 2, padded_width)
    k, v = (held[..., i, :width].astype(jnp.float32) for i in (0, 1))
    q = queries.reshape(tokens, kv_heads, heads // kv_heads, width).astype(jnp.float32)
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("tkgh,tlkh->tkgl", q, k[sequence], precision=exact) * sm_scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    at = jnp.arange(held.shape[1])
    seen = at <= position[:, None]
    if sliding_window is not None:
        seen &= at > position[:, None] - sliding_window
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
    # A page may hold NaN of an earlier request at positions that this one does not see; 0 * NaN would be NaN.
    values_seen = jnp.where(seen[:, :, None, None], v[sequence], 0)
    out = jnp.einsum("tkgl,tlkh->tkgh", jax.nn.softmax(scores, axis=-1), values_seen, precision=exact)
    out = jnp.where(real[:, None, None, None], out, 0).reshape(tokens, heads, width)
    return out.astype(queries.dtype), kv_cache


def attending(plain: Callable) -> Callable:
    own = set(inspect.signature(attend).parameters) - {"others"}
    assert own <= set(inspect.signature(plain).parameters), "tpu-inference's attention kernel takes other arguments"
    return attend


def copying(put: Callable) -> Callable:
    def device_array(mesh, *args, **kwargs):
        import jax
        import numpy as np

        copied = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, args)
        return put(mesh, *copied, **kwargs)

    return device_array


REPLACED: dict[str, Callable[[Any], Any]] = {
    # XLA for a CPU refuses the options of a TPU's compiler.
    "tpu_inference.models.common.compiler_options:get_step_fn_compiler_options": lambda plain: dict,
    "tpu_inference.models.common.compiler_options:get_sampling_compiler_options": lambda plain: dict,
    # A device of a CPU does not tell its memory.
    "tpu_inference.utils:get_device_hbm_limit": lambda plain: lambda: 2**32,
    # The runner fills the same numpy buffers for each step. JAX copies them to a TPU, but on a CPU a step that still
    # runs would read the inputs of the next.
    "tpu_inference.utils:device_array": copying,
    # The kernels are in Pallas.
    "tpu_inference.layers.common.attention_interface:ragged_paged_attention": attending,
    "tpu_inference.layers.common.attention_interface:ragged_paged_attention_hd64": attending,
}
"""The names that are replaced, each with a function of the plain object that returns the replacement."""


def with_fault(read: Callable, kept: dict[str, Any]) -> Callable:
    """Returns ``plugin.read_tensors`` with the fault that a file names: its kind and a tensor's name or a dtype."""

    def read_tensors(directory: Path, files: list[str]) -> Iterator[tuple[str, Any]]:
        import torch

        fault, _, of = Path(os.environ[FAULT]).read_text().partition(" ")
        tensors = dict(read(directory, files))
        now = dict(tensors)
        if fault == "drop":
            del now[of]
        elif fault == "swap":
            now[of] = now[of].flatten().roll(1).reshape(now[of].shape)
        elif fault == "stale":
            now[of] = kept[of]
        elif fault == "through":
            now = {name: tensor.to(getattr(torch, of)).to(tensor.dtype) for name, tensor in now.items()}
        kept.update(tensors)
        for name, tensor in now.items():
            if (fault, of) == ("break", name):
                raise RuntimeError("planted")
            yield name, tensor

    return read_tensors


def register() -> None:
    """Puts the replacements in place. vLLM calls it in each process, before it imports the worker."""
    import jax

    from rljax.rollout.servers.vllm import plugin

    for name, replacement in REPLACED.items():
        module, _, attribute = name.partition(":")
        owner = importlib.import_module(module)
        assert hasattr(owner, attribute), f"tpu-inference has no {name} any more"
        plain = getattr(owner, attribute)
        if plain.__module__ != __name__:
            setattr(owner, attribute, replacement(plain))
    plugin.read_tensors = with_fault(plugin.read_tensors, {})

    def count(event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            with Path(os.environ[COMPILED]).open("ab") as file:
                file.write(b".")

    jax.monitoring.register_event_duration_secs_listener(count)


if __name__ == "__main__":  # It serves the model of the first argument with the interpreter of the second.
    from rljax.rollout.servers.vllm.server import VllmConfig, start

    extras = {"extra_args": options(), "extra_env": environment(Path(tempfile.mkdtemp()))}
    with start(VllmConfig(*sys.argv[1:3], port=8000, max_model_len=1024, **extras), timeout_s=900) as server:
        print(server.url, flush=True)
        signal.pause()
