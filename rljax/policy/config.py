"""The shape of a policy, the choice of its kernels, and a check for directories that hold an adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rljax.errors import check_at_least
from rljax.policy.rotary import RopeScaling

AttentionName = Literal["auto", "xla", "cudnn", "splash"]
ExpertsName = Literal["auto", "xla", "mosaic", "ragged"]
ADAPTER_CONFIG = "adapter_config.json"
"""The file with the settings of an adapter in the layout of Hugging Face PEFT."""
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True)
class PolicyOptions:
    """Choices that change the speed and the rounding of the trainer's forward and backward, but no formula."""

    attention: AttentionName = "auto"
    """Attention of packed rows. xla: in blocks, on any backend. cudnn: NVIDIA's kernel for 16-bit numbers on GPUs
    of compute capability 9 to 11. splash: JAX's kernel for bfloat16 on TPUs. auto: the backend's kernel if it
    supports the dtype and the heads, otherwise xla; always xla for rows of up to 1,024 tokens."""
    experts: ExpertsName = "auto"
    """Products of a mixture's experts. xla: in blocks of one expert's tokens, on any backend. mosaic: JAX's kernels for
    16-bit numbers on NVIDIA Hopper GPUs. ragged: ``jax.lax.ragged_dot``, which has a kernel on TPUs. auto: the
    backend's kernel if it supports the dtype and the widths, otherwise xla."""


DEFAULTS = PolicyOptions()


@dataclass(frozen=True)
class PolicyConfig:
    """The sizes and switches of a decoder of one of the families in ``rljax.policy.families``."""

    vocab_size: int  # the number of tokens v, the rows of the embedding table
    hidden_size: int  # the model width d
    intermediate_size: int  # the inner width of the SwiGLU
    num_layers: int  # the number of blocks
    num_heads: int  # the number of query heads h
    num_kv_heads: int  # the number of key-value heads g; it divides num_heads
    head_dim: int  # the width of a head, even; it need not be hidden_size / num_heads
    rope_theta: float = 10_000.0  # the base of the rotary frequencies
    rope_scaling: RopeScaling | None = None  # the scaled form of the rotary embedding, or None for the plain one
    rms_norm_eps: float = 1e-6  # the epsilon of every RMSNorm
    tie_word_embeddings: bool = False  # whether the LM head is the embedding table
    initializer_range: float = 0.02  # the standard deviation of a new weight
    max_position_embeddings: int = 32_768  # the longest sequence for which the checkpoint was made (tokens)
    # The special tokens of the files. The forward does not use them.
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    family: str = "qwen3"  # the model_type of the config.json
    num_experts: int = 0  # the number of experts that replace the SwiGLU of each block; 0: no experts
    experts_per_token: int = 0  # the number of experts k for each token
    expert_size: int = 0  # the inner width of an expert's SwiGLU
    attention_bias: bool = False  # whether all four products of a Llama's attention have biases
    mlp_bias: bool = False  # whether the three products of a Llama's SwiGLU have biases
    normalize_gates: bool = False  # whether the k gates of a token are divided by their sum
    rotary_share: float = 1.0  # the share of a head that rotary embeddings turn, from its first feature on
    delta_key_heads: int = 0  # the number of query heads, and of key heads, of a delta net; 0 without delta nets
    delta_value_heads: int = 0  # the number of value heads of a delta net, a multiple of its key heads
    delta_key_dim: int = 0  # the width of a delta net's query head or key head
    delta_value_dim: int = 0  # the width of a delta net's value head
    conv_width: int = 0  # the number of tokens that the convolution of a delta net sees

    def __post_init__(self) -> None:
        check_at_least(self, 1, *SIZES)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, got {self.num_kv_heads} and {self.num_heads}")
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            share = "" if self.rotary_share == 1.0 else f" with partial_rotary_factor = {self.rotary_share}"
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}{share}")
        if self.delta_key_heads:
            check_at_least(self, 1, "delta_value_heads", "delta_key_dim", "delta_value_dim", "conv_width")
            if self.delta_value_heads % self.delta_key_heads:
                raise ValueError(
                    f"linear_num_key_heads must divide linear_num_value_heads, got {self.delta_key_heads} and "
                    f"{self.delta_value_heads}"
                )
        if self.num_experts:
            check_at_least(self, 1, "experts_per_token", "expert_size")
            if self.experts_per_token > self.num_experts:
                raise ValueError(
                    f"experts_per_token must be at most num_experts = {self.num_experts}, got {self.experts_per_token}"
                )

    @property
    def rotary_dim(self) -> int:
        """The number of features of a head that rotary embeddings turn."""
        return int(self.head_dim * self.rotary_share)

    @property
    def route_bytes(self) -> int:
        """The bytes of one token's routes (its experts in all layers) in ``route_dtype``; 0 without experts."""
        return self.num_layers * self.experts_per_token * np.dtype(route_dtype(self.num_experts)).itemsize

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence ids as a tuple. It is empty if the file names none."""
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    def stops(self, end: int, more: Iterable[int] = ()) -> tuple[int, ...]:
        """Returns the tokens that end a response: ``more``, and ``stop_token_ids`` or, if these are empty, ``end``."""
        return tuple(dict.fromkeys((*(self.stop_token_ids or (end,)), *more)))


def route_dtype(num_experts: int) -> Any:
    """Returns the narrowest dtype of expert indices that has room for one more value, which means "free"."""
    return np.uint8 if num_experts < 256 else np.uint16


def choose_kernel(key: str, name: str, refusals: Mapping[str, str | None]) -> str:
    """Returns the name of the kernel that ``name``, the value of the configuration key ``key``, means.

    "auto" means the first kernel that is not refused, or else "xla". ``refusals`` has for the name of each kernel the
    reason why it cannot be used, or None if it can. Kernels without an entry can always be used.

    Raises:
      ValueError: The kernel ``name`` is refused.
    """
    if name == "auto":
        return next((one for one, refusal in refusals.items() if not refusal), "xla")
    if refusal := refusals.get(name):
        raise ValueError(f"{key} = {name} {refusal}; auto chooses one that fits")
    return name


def refuse_adapter(directory: Path) -> None:
    """Raises ValueError if a directory holds an adapter of PEFT. transformers would add it to a model there."""
    if (directory / ADAPTER_CONFIG).is_file():
        cause = f"{directory} holds an adapter, which transformers adds to a model there"
        remedy = f"set model.path to the model that it was made for and lora.adapter to {directory}"
        raise ValueError(f"{cause}: {remedy}, or move its files away")
