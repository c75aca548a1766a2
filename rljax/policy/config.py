"""The shape of a policy, and the choices of its computation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rljax.errors import check_at_least

AttentionName = Literal["auto", "xla", "cudnn", "splash"]
ExpertsName = Literal["auto", "xla", "mosaic", "ragged"]
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True)
class PolicyOptions:
    """The choices that change the speed and rounding of the trainer's forward and backward, not the function."""

    attention: AttentionName = "auto"
    """Attention of packed rows. xla: in blocks, on any backend. cudnn: NVIDIA's kernel for 16-bit numbers on Hopper
    GPUs and newer. splash: JAX's kernel for bfloat16 on TPUs. auto: the backend's kernel if it supports the dtype and
    the heads, otherwise xla; always xla for rows of up to 1,024 tokens."""
    experts: ExpertsName = "auto"
    """Products of a mixture's experts. xla: in blocks of one expert's tokens, on any backend. mosaic: JAX's kernels for
    16-bit numbers on NVIDIA Hopper GPUs. ragged: ``jax.lax.ragged_dot``, which has a kernel on TPUs. auto: the
    backend's kernel if it supports the dtype and the widths, otherwise xla."""


DEFAULTS = PolicyOptions()


@dataclass(frozen=True)
class PolicyConfig:
    """The sizes and switches of a decoder of one of the families in ``rljax.policy.families``.

    Attributes:
      vocab_size: The number of tokens v, the rows of the embedding table.
      hidden_size: The model width d.
      intermediate_size: The inner width of the SwiGLU.
      num_layers: The number of blocks.
      num_heads: The number of query heads h.
      num_kv_heads: The number of key-value heads. It divides ``num_heads``.
      head_dim: The width of a head, even. It need not be hidden_size / num_heads.
      rope_theta: The base of the rotary frequencies.
      rms_norm_eps: The epsilon of every RMSNorm.
      tie_word_embeddings: Whether the LM head is the embedding table.
      initializer_range: The standard deviation of a new weight.
      max_position_embeddings: The longest sequence for which the checkpoint was made (tokens).
      bos_token_id: The begin-of-sequence token of the file. The forward does not use it.
      eos_token_id: The end-of-sequence token or tokens of the files. The forward does not use them.
      pad_token_id: The padding token of the file. The forward does not use it.
      family: The ``model_type`` of the ``config.json``.
      num_experts: The number of experts that replace the SwiGLU of each block. 0: a dense policy.
      experts_per_token: The number of experts k for each token.
      expert_size: The inner width of an expert's SwiGLU.
      normalize_gates: Whether the k gates of a token are divided by their sum.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 32_768
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    family: str = "qwen3"
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalize_gates: bool = False

    def __post_init__(self) -> None:
        check_at_least(self, 1, *SIZES)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, got {self.num_kv_heads} and {self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.num_experts:
            check_at_least(self, 1, "experts_per_token", "expert_size")
            if self.experts_per_token > self.num_experts:
                raise ValueError(
                    f"experts_per_token must be at most num_experts = {self.num_experts}, got {self.experts_per_token}"
                )

    @property
    def route_bytes(self) -> int:
        """The bytes of one token's routes, in ``route_dtype``. 0 for a dense policy."""
        return self.num_layers * self.experts_per_token * np.dtype(route_dtype(self.num_experts)).itemsize

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence ids as a tuple. It is empty if the file names none."""
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    def stops(self, end: int, more: Iterable[int] = ()) -> tuple[int, ...]:
        """Returns the tokens that end a response: ``stop_token_ids``, or ``end`` if there are none, and ``more``."""
        return tuple(dict.fromkeys((*(self.stop_token_ids or (end,)), *more)))


def route_dtype(num_experts: int) -> Any:
    """Returns the narrowest dtype of expert indices that has room for one more value, which means "free"."""
    return np.uint8 if num_experts < 256 else np.uint16


def toy_config(vocab_size: int = 16) -> PolicyConfig:
    """Returns the policy of the toy tasks: 124k parameters, 2 layers of width 64, 4 query heads and 2 key-value heads.

    The heads have size 32, the smallest that vLLM supports on a CPU.

    Args:
      vocab_size: The number of tokens. The last two are the end-of-sequence token and the padding token.
    """
    return PolicyConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=192,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        initializer_range=0.05,
        max_position_embeddings=1024,
        eos_token_id=vocab_size - 2,
        pad_token_id=vocab_size - 1,
    )
