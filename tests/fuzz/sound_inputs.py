"""Sound inputs, from which malformed ones begin: a tiny policy of each family, and adapters."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from rljax.policy.config import PolicyConfig
from rljax.policy.hf import save_params
from rljax.policy.lora import LoraConfig, init_adapters
from rljax.policy.model import init_params
from rljax.policy.peft import ADAPTER_CONFIG, WEIGHTS_NAME, save_adapters

ROOT = Path(__file__).resolve().parents[2]
SHAPE: dict[str, Any] = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 2}
SHAPE |= {"num_kv_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
POLICIES = {
    "qwen3": PolicyConfig(**SHAPE),
    "qwen2": PolicyConfig(**SHAPE, family="qwen2"),
    "qwen3_moe": PolicyConfig(**SHAPE, family="qwen3_moe", num_experts=4, experts_per_token=2, expert_size=8),
}
LORA = LoraConfig(rank=2, targets=("q_proj", "o_proj"))


@functools.cache
def sound_model(family: str) -> tuple[dict[str, Any], bytes]:
    """Returns config.json and model.safetensors of a tiny policy."""
    config = POLICIES[family]
    with tempfile.TemporaryDirectory() as made:
        save_params(made, init_params(config, 0), config)
        return _read(Path(made), "config.json", "model.safetensors")


@functools.cache
def sound_adapters() -> tuple[dict[str, Any], bytes]:
    """Returns adapter_config.json and adapter_model.safetensors."""
    config = POLICIES["qwen3"]
    with tempfile.TemporaryDirectory() as made:
        save_adapters(made, init_adapters(config, LORA, 0), config, LORA, "model")
        return _read(Path(made), ADAPTER_CONFIG, WEIGHTS_NAME)


def _read(folder: Path, config: str, weights: str) -> tuple[dict[str, Any], bytes]:
    return json.loads((folder / config).read_text()), (folder / weights).read_bytes()
