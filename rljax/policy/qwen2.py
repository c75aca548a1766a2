"""Qwen2 and Qwen2.5: a bias on query, key and value, and no norm of theirs."""

from __future__ import annotations

from flax import nnx

from rljax.policy.config import PolicyConfig
from rljax.policy.family import COMMON_FIXED, Family
from rljax.policy.layers import MLP, Attention, Block


def _block(c: PolicyConfig, rngs: nnx.Rngs) -> Block:
    return Block(c, rngs, Attention(c, rngs, bias=True), MLP(c, rngs))


def _check(c: PolicyConfig) -> None:
    """vLLM's Qwen2 does not read ``head_dim``."""
    if c.head_dim * c.num_heads != c.hidden_size:
        raise ValueError(f"head_dim of a qwen2 must be hidden_size / num_heads, got {c.head_dim}")


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    block=_block,
    fixed=COMMON_FIXED,
    defaults={"num_kv_heads": 32},
    check=_check,
)
