"""The dtypes of the trainer, and the choice of the activations that its backward pass recomputes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

from rljax.policy.model import Remat

ComputeDtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes of the trainer's forward and backward. Masters, moments and accumulators are always float32."""

    compute_dtype: ComputeDtype = "bfloat16"
    """Dtype of the forward and backward. The weights are cast to it once a step. float16 turns on dynamic loss scaling.
    float32 multiplies at the highest precision."""
    lm_head_dtype: Literal["compute", "float32"] = "compute"
    """Dtype in which the LM head multiplies. compute: ``compute_dtype`` in the trainer; an engine rounds its logits to
    ``rollout.dtype``. float32: trainer and engine first upcast hidden states and table, and an engine does not round
    its logits. A vLLM server then needs ``--head-dtype float32``."""
    remat: bool | Remat = "none"
    """Activations of a block that the backward pass recomputes. none: nothing is recomputed, all activations are kept.
    dots: everything between its products with weights. blocks (or true): everything but the input of the block.
    offload: the same as blocks, with the inputs in the host's memory (GPU and TPU)."""

    reduce_dtype: Literal["float32", "compute"] = "float32"
    """Dtype in which devices add up the gradients of a micro-batch. compute: ``compute_dtype``, which halves the bytes
    in 16 bits. The part of each device is then rounded before the sum. Gradients of experts and of the embedding, and
    the sum over micro-batches, stay in float32."""

    @property
    def remat_policy(self) -> Remat:
        """The name of the choice ``remat``."""
        if isinstance(self.remat, bool):
            return "blocks" if self.remat else "none"
        return self.remat

    @property
    def head_dtype(self) -> Any:
        """The dtype in which the LM head multiplies; None for the dtype of the hidden states."""
        return jnp.float32 if self.lm_head_dtype == "float32" else None
