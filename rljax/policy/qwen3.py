"""Dense Qwen3: grouped-query attention with norms of each head's query and key, and a SwiGLU."""

from __future__ import annotations

from flax import nnx

from rljax.policy.config import PolicyConfig
from rljax.policy.family import COMMON_FIXED, Family
from rljax.policy.layers import MLP, Attention, Block


def _block(c: PolicyConfig, rngs: nnx.Rngs) -> Block:
    return Block(c, rngs, Attention(c, rngs, norms=True), MLP(c, rngs))


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    block=_block,
    fixed={**COMMON_FIXED, "attention_bias": False},
    defaults={"num_kv_heads": 32, "head_dim": 128},
)
