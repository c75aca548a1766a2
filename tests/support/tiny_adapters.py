"""Tiny policies with random adapters."""

import jax
import jax.numpy as jnp
import numpy as np

from rljax.policy.config import PolicyConfig
from rljax.policy.lora import LoraConfig, declared_adapters

CONFIG = PolicyConfig(24, 32, 64, 2, 4, 2, 8, initializer_range=0.2)
LORA = LoraConfig(rank=3, alpha=4.5)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MIXTURE = PolicyConfig(24, 32, 64, 2, 4, 2, 8, family="qwen3_moe", num_experts=4, experts_per_token=2, expert_size=16)


def random_adapters(config=CONFIG, lora=LORA, size=0.3):
    rng = np.random.default_rng(3)
    shapes = declared_adapters(config, lora).abstract()
    return jax.tree.map(lambda leaf: jnp.asarray(size * rng.normal(size=leaf.shape), jnp.float32), shapes)
