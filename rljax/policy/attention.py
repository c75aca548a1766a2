"""Grouped-query attention over packed rows and over a key-value cache. Scores and softmax are float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rljax.policy.config import AttentionName, choose_kernel
from rljax.policy.context import device_heads, exchange_back, exchange_heads
from rljax.policy.cudnn import CAPABILITY, cudnn_attention
from rljax.policy.flash import BLOCKS, Ends, KeyBlocks, Queries, block_attention, head_axes
from rljax.policy.splash import LANES, splash_attention
from rljax.sharding import axis_size, on_each_device

ONE_PIECE = 1024
"""The longest row (tokens) whose scores are all in memory at once."""
_MASKED = -1e30
PackedAttention = Callable[[Queries, KeyBlocks, KeyBlocks, Ends], Queries]
"""Attention of packed rows: a function of queries, keys, values and their ``ends`` (``flash.Ends``).

The output is in the dtype of the inputs. Query head i attends to key-value head i // (h / g). Scores are scaled by
k ** -0.5. The query at i attends to the keys at j <= i with i < ends[j]. Other keys and values change no bit of its
output. The output of a padding token is finite and meaningless. If several devices share a row, queries, keys and
values are folded (``context.fold``), but ``ends`` are of whole rows.
"""


def path_mask(ends: Ends) -> Bool[Array, "b t t"]:
    """Returns the mask of packed rows: ``mask[b, i, j]`` is True if the token at i attends to the token at j."""
    place = jnp.arange(ends.shape[1])
    return (place[:, None] >= place[None, :])[None] & (place[None, :, None] < ends[:, None, :])


def attend(
    q: Float[Array, "b t h k"], k: Float[Array, "b s g k"], v: Float[Array, "b s g k"], mask: Bool[Array, "b t s"]
) -> Float[Array, "b t h k"]:
    """Computes softmax attention. Query head i attends to key-value head i // (h / g); g divides h.

    It works on any backend and with any float dtype. The contractions accumulate in float32. A query whose mask is
    empty attends to all tokens equally; the caller must mask its output.
    """
    b, t, h, d = q.shape
    groups = k.shape[2]
    grouped = q.reshape(b, t, groups, h // groups, d)
    scores = jnp.einsum("btgrk,bsgk->bgrts", grouped, k, preferred_element_type=jnp.float32) * d**-0.5
    scores = jnp.where(mask[:, None, None], scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bgrts,bsgk->btgrk", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(b, t, h, d).astype(q.dtype)


def packed_attention(q: Queries, k: KeyBlocks, v: KeyBlocks, ends: Ends, *, block: int | None = None) -> Queries:
    """Computes attention of packed rows (``PackedAttention``) on any backend, in blocks above ``ONE_PIECE`` tokens.

    ``block`` is the number of tokens in a block. If it is None, ``flash.block_size`` chooses the number.
    """
    return _or_one_piece(functools.partial(block_attention, block=block))(q, k, v, ends)


def _or_one_piece(kernel: PackedAttention) -> PackedAttention:
    """Returns a function that uses ``kernel`` for rows above ``ONE_PIECE`` tokens, and ``attend`` for shorter rows."""

    def attention(q: Array, k: Array, v: Array, ends: Array) -> Array:
        if q.shape[1] <= ONE_PIECE:
            return attend(q, k, v, path_mask(ends))
        return kernel(q, k, v, ends)

    return attention


def attention_of_parts(
    kernel: PackedAttention, parts: int, q: Queries, k: KeyBlocks, v: KeyBlocks, ends: Int[Array, "rows tokens"]
) -> Queries:
    """Computes attention of folded rows (``context.fold``). ``parts`` devices share each whole row.

    The devices exchange tokens for heads, and each computes whole rows of its heads with the kernel. ``ends`` are not
    folded: each device has the ``ends`` of its whole rows.
    """
    num_heads, _ = device_heads(q.shape[2], k.shape[2], axis_size("act_heads"))
    heads = head_axes(k)

    def of_device(q: Array, k: Array, v: Array, ends: Array) -> tuple[Array]:
        out = kernel(*exchange_heads(q, k, v, parts), ends)
        return (exchange_back(out, parts, num_heads),)

    run = on_each_device(of_device, (heads, heads, heads, ("batch_rows", "tokens")), (heads,), rows=q.shape[0])
    return run(q, k, v, ends)[0]


_KERNELS: dict[str, Any] = {"cudnn": cudnn_attention, "splash": splash_attention}


def find_implementation(name: AttentionName, device: Any, dtype: Any, head_dim: int) -> str:
    """Returns the name of the kernel for rows above ``ONE_PIECE`` tokens, if ``policy.attention`` is ``name``.

    The result is never "auto". Arguments and errors are as in ``choose_attention``.
    """
    refusals = {"cudnn": _why_not_cudnn(device, dtype, head_dim), "splash": _why_not_splash(device, dtype, head_dim)}
    return choose_kernel("policy.attention", name, refusals)


def choose_attention(
    name: AttentionName, device: Any, dtype: Any, head_dim: int, parts: int = 1, *, trees: bool = False
) -> PackedAttention:
    """Returns the attention function that ``name``, a value of ``policy.attention``, means on a device.

    ``device`` is any device of the mesh, which may exist only for compilation ahead of time. ``dtype`` is the dtype of
    queries, keys and values. ``parts`` is the number of devices that share a row. Without ``trees`` the function takes
    rows of sequences that share nothing, with ``trees`` rows of trees. cuDNN and splash take trees of two levels.

    Raises:
      ValueError: The kernel does not support the device, the dtype or the heads. The message begins with the key.
    """
    chosen = find_implementation(name, device, dtype, head_dim)
    kernel: PackedAttention = packed_attention
    if chosen not in _KERNELS and trees and device.platform == "cpu":
        # Branches fill large blocks badly. A CPU loses nothing with small ones.
        kernel = functools.partial(packed_attention, block=BLOCKS[-1])
    elif chosen in _KERNELS:
        kernel = functools.partial(_KERNELS[chosen], trees=True) if trees else _KERNELS[chosen]
        kernel = _or_one_piece(kernel) if name == "auto" else kernel
    return kernel if parts == 1 else functools.partial(attention_of_parts, kernel, parts)


def _why_not_cudnn(device: Any, dtype: Any, head_dim: int) -> str | None:
    if device.platform != "gpu" or not hasattr(device, "compute_capability"):
        return f"needs an NVIDIA GPU, got {device.device_kind}"
    found, least = (tuple(map(int, text.split("."))) for text in (device.compute_capability, CAPABILITY))
    if found < least:
        return f"needs compute capability {CAPABILITY}, got {device.compute_capability} ({device.device_kind})"
    if found[0] == 12:  # RTX 50 and RTX PRO 6000
        return f"is not known to have a backward pass for packed rows on {device.device_kind} (compute capability 12)"
    if jnp.dtype(dtype).itemsize != 2:
        return f"needs bfloat16 or float16, got {jnp.dtype(dtype)}"
    if head_dim % 8 or head_dim > 256:
        return f"needs a head width of at most 256 that is a multiple of 8, got {head_dim}"
    return None


def _why_not_splash(device: Any, dtype: Any, head_dim: int) -> str | None:
    if device.platform != "tpu":
        return f"needs a TPU, got {device.device_kind}"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"needs bfloat16, got {jnp.dtype(dtype)}"
    if head_dim % LANES:
        return f"needs a head width that is a multiple of {LANES}, got {head_dim}"
    return None
