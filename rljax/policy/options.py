"""How the policy is computed: choices that change speed and rounding, not the function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttentionName = Literal["auto", "xla", "cudnn", "splash"]
ExpertsName = Literal["auto", "xla", "mosaic", "ragged"]


@dataclass(frozen=True)
class PolicyOptions:
    """How the trainer computes the policy's forward and backward."""

    attention: AttentionName = "auto"
    """Attention of packed rows. xla: in blocks, on any backend. cudnn: NVIDIA's kernel, for 16-bit numbers on Hopper
    GPUs and newer. splash: JAX's kernel for TPUs, for bfloat16. auto: the kernel of the backend where it takes the
    dtype and the heads, otherwise xla; xla for rows of up to 1,024 tokens."""
    experts: ExpertsName = "auto"
    """Products of a mixture's experts. xla: in blocks of one expert's tokens, on any backend. mosaic: JAX's kernels for
    NVIDIA Hopper GPUs, for 16-bit numbers. ragged: ``jax.lax.ragged_dot``, which has a kernel on TPUs. auto: the kernel
    of the backend where it takes the dtype and the widths, otherwise xla."""


DEFAULTS = PolicyOptions()
