"""The shape of a policy: the sizes and switches that its family's declaration reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rljax.errors import check_at_least

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True)
class PolicyConfig:
    """Sizes of a decoder of one of the families of ``rljax.policy.families`` (the fields that change the function).

    Attributes:
      vocab_size: v, rows of the embedding table.
      hidden_size: d.
      intermediate_size: inner width of the SwiGLU.
      num_layers: blocks.
      num_heads: h, query heads.
      num_kv_heads: kv heads; divides ``num_heads``.
      head_dim: width of a head, even; need not be hidden_size / num_heads.
      rope_theta: base of the rotary frequencies.
      rms_norm_eps: epsilon of every RMSNorm.
      tie_word_embeddings: the LM head is the embedding table.
      initializer_range: standard deviation of a fresh weight.
      max_position_embeddings: longest sequence the checkpoint was made for (tokens).
      bos_token_id, eos_token_id, pad_token_id: as in the file; the forward does not use them.
      family: ``model_type`` of the ``config.json``.
      num_experts: experts of each block in place of its one SwiGLU; 0: a dense policy.
      experts_per_token: k, experts that each token goes to.
      expert_size: inner width of an expert's SwiGLU.
      normalize_gates: the k gates of a token are divided by their sum.
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
        """Bytes of the routes of one token, in the narrowest integers with room for "free" besides; 0 of no mixture."""
        return self.num_layers * self.experts_per_token * np.dtype(route_dtype(self.num_experts)).itemsize

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence ids as a tuple, empty when the file names none."""
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)


def route_dtype(num_experts: int) -> Any:
    """The narrowest dtype of the experts that tokens go to: with room for one number more than there are experts."""
    return np.uint8 if num_experts < 256 else np.uint16


def toy_config(vocab_size: int = 16) -> PolicyConfig:
    """The policy of the toy tasks: 124k parameters, 2 layers of width 64, 4 query heads and 2 key-value heads.

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
