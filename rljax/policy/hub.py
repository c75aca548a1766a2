"""Models by name: a directory on this machine or a model on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rljax.policy.config import PolicyConfig
from rljax.policy.families import read_config

CONFIGS = Path(__file__).parents[1] / "configs"
"""The directory of the configurations that the package carries, and of the quickstart's base model."""

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# The hub also has the same weights in other formats.
_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt")

# The model width, MLP width, layers, query heads and key-value heads in the config.json of each model.
_QWEN3_SIZES = {
    "0.6B": (1024, 3072, 28, 16, 8),
    "1.7B": (2048, 6144, 28, 16, 8),
    "4B": (2560, 9728, 36, 32, 8),
    "8B": (4096, 12288, 36, 32, 8),
    "14B": (5120, 17408, 40, 40, 8),
    "32B": (5120, 25600, 64, 64, 8),
    "30B-A3B": (2048, 6144, 48, 32, 4),
}
_MIXTURE = {"num_experts": 128, "experts_per_token": 8, "expert_size": 768, "normalize_gates": True}


def _qwen3(size: str, longest: int, end: int = 151_645, theta: float = 1e6) -> PolicyConfig:
    more: dict[str, Any] = {"family": "qwen3_moe", **_MIXTURE} if size == "30B-A3B" else {}
    more |= {"max_position_embeddings": longest, "eos_token_id": end, "rope_theta": theta}
    is_tied = size in ("0.6B", "1.7B", "4B")
    return PolicyConfig(
        151_936, *_QWEN3_SIZES[size], head_dim=128, tie_word_embeddings=is_tied, bos_token_id=151_643, **more
    )


KNOWN_SHAPES: dict[str, PolicyConfig] = {}
for _size in _QWEN3_SIZES:
    KNOWN_SHAPES[f"Qwen/Qwen3-{_size}"] = _qwen3(_size, 40_960)
    KNOWN_SHAPES[f"Qwen/Qwen3-{_size}-Base"] = _qwen3(_size, 32_768, 151_643)
# The models of July 2025 are the same with longer rows.
for _size, _theta in (("4B", 5e6), ("30B-A3B", 1e7)):
    for _kind in ("Instruct", "Thinking"):
        KNOWN_SHAPES[f"Qwen/Qwen3-{_size}-{_kind}-2507"] = _qwen3(_size, 262_144, theta=_theta)
_QWEN2: dict[str, Any] = {"family": "qwen2", "bos_token_id": 151_643}
KNOWN_SHAPES["deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"] = PolicyConfig(
    151_936, *(1536, 8960, 28, 12, 2, 128), max_position_embeddings=131_072, eos_token_id=151_643, **_QWEN2
)
KNOWN_SHAPES["Qwen/Qwen2.5-Coder-0.5B-Instruct"] = PolicyConfig(
    151_936, *(896, 4864, 24, 14, 2, 64), rope_theta=1e6, tie_word_embeddings=True, eos_token_id=151_645, **_QWEN2
)
_SMOL: dict[str, Any] = {"family": "llama", "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 8192}
KNOWN_SHAPES["HuggingFaceTB/SmolLM2-135M-Instruct"] = PolicyConfig(
    49_152, *(576, 1536, 30, 9, 3, 64), rope_theta=1e5, rms_norm_eps=1e-5, tie_word_embeddings=True, **_SMOL
)
_DELTA = {"delta_key_heads": 16, "delta_value_heads": 32, "delta_key_dim": 128, "delta_value_dim": 128, "conv_width": 4}
_QWEN3_5: dict[str, Any] = {"family": "qwen3_5_text", "rotary_share": 0.25, "rope_theta": 1e7, **_DELTA}
KNOWN_SHAPES["Qwen/Qwen3.5-4B"] = PolicyConfig(
    248_320, *(2560, 9216, 32, 16, 4, 256), tie_word_embeddings=True, max_position_embeddings=262_144, **_QWEN3_5
)


def is_hub_id(name: str) -> bool:
    """Returns whether ``name`` has the form OWNER/NAME of a model on the hub, and OWNER is no local directory."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name).parent.is_dir()


def packaged(name: str) -> Path | None:
    """Returns the file or directory of ``CONFIGS`` that a name means, or None if there is none.

    ``toy-base`` and ``configs/toy-base`` mean the same directory, and ``quickstart`` means ``quickstart.yaml``. The
    caller must check first whether the name is an existing path.
    """
    inside = Path(name.removeprefix("configs/"))
    if not name or inside.is_absolute() or ".." in inside.parts:
        return None
    return next((path for path in (CONFIGS / inside, CONFIGS / f"{inside}.yaml") if os.path.exists(path)), None)


def model_directory(name: str, files: Sequence[str] = _FILES) -> str:
    """Returns the local directory of a model: ``name`` itself, one of the package, or one fetched from the hub.

    ``name`` is a directory, the name of a model that the package carries, or OWNER/NAME of a model on the hub. Any
    other name is returned as it is. From the hub, files that match ``files`` are downloaded unless they were before.

    Raises:
      ValueError: The hub has no such model, or it cannot be reached and the model was not downloaded before.
    """
    inside = None if os.path.exists(name) else packaged(name)
    if inside is not None and inside.is_dir():
        return str(inside)
    if not is_hub_id(name):
        return name
    from huggingface_hub import snapshot_download  # This import takes a second.

    try:
        return str(snapshot_download(name, allow_patterns=list(files)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"no model at {name}: there is no such directory, and the Hugging Face hub does not give it "
            f"({type(error).__name__}: {reason})"
        ) from error


def policy_shape(name: str) -> PolicyConfig:
    """Returns the shape of a model, from its name or its ``config.json``. No weights are read or downloaded.

    Raises:
      ValueError: The model is not found, or its ``config.json`` cannot be used.
    """
    if is_hub_id(name) and name in KNOWN_SHAPES:
        return KNOWN_SHAPES[name]
    return read_config(model_directory(name, ("config.json",)))
