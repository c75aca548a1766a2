"""The shape of a dense Qwen3, read from and written to a Hugging Face ``config.json``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljax.checks import check_at_least, parse_json

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True)
class PolicyConfig:
    """Sizes of a dense Qwen3 (transformers' ``Qwen3Config``, the fields that change the function).

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

    def __post_init__(self) -> None:
        check_at_least(self, 1, *_SIZES)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, got {self.num_kv_heads} and {self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence ids as a tuple, empty when the file names none."""
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)


_HF_NAMES = {field.name: field.name for field in dataclasses.fields(PolicyConfig) if field.name != "rope_theta"} | {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
"""Our name -> HF's of each field but ``rope_theta``, whose place in the file has changed."""
_HF_DEFAULTS = {"num_kv_heads": 32, "head_dim": 128}
"""What transformers' Qwen3Config uses if the file has no value; its other defaults are those of ``PolicyConfig``."""

_FIXED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
"""What every dense Qwen3 has in its file."""


def config_from_hf(raw: dict[str, Any]) -> PolicyConfig:
    """Reads a ``config.json`` dictionary, transformers v5 form (``rope_parameters``) or the older (``rope_theta``).

    Raises:
      ValueError: a model type or a feature (attention bias, sliding window, scaled RoPE, another activation) that this
        policy does not compute, or a missing size; the message names the key and its value.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"expected an object, got {type(raw).__name__}")
    if raw.get("model_type") != "qwen3":
        raise ValueError(f"model_type must be 'qwen3', got {raw.get('model_type')!r}")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters must be an object, got {rope!r:.60}")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    found = {**raw, "rope_type": rope_type}
    for key, only in {**_FIXED, "rope_type": "default", "quantization_config": None}.items():
        if (found.get(key) or only) != only:
            raise ValueError(f"{key} = {found[key]!r} is not supported by the dense Qwen3 policy")
    values: dict[str, Any] = {
        **_HF_DEFAULTS,
        **{name: raw[theirs] for name, theirs in _HF_NAMES.items() if raw.get(theirs) is not None},
        "rope_theta": rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0,
    }
    for name in _SIZES:
        if name not in values:
            raise ValueError(f"config.json has no {_HF_NAMES[name]!r}")
    for name, value in values.items():
        if not _is_of_type(name, value):
            raise ValueError(f"{_HF_NAMES.get(name, name)} cannot be {value!r:.60}")
    values["rope_theta"] = float(values["rope_theta"])
    if isinstance(values.get("eos_token_id"), list):
        values["eos_token_id"] = tuple(values["eos_token_id"])
    return PolicyConfig(**values)


def _is_of_type(name: str, value: Any) -> bool:
    """Whether a value of a ``config.json`` is of the type of our field, and of a size that anything has."""
    if name == "eos_token_id" and isinstance(value, (list, tuple)):
        return all(_is_of_type(name, one) for one in value)
    if name == "tie_word_embeddings":
        return isinstance(value, bool)
    if name in ("rope_theta", "rms_norm_eps", "initializer_range"):
        return type(value) in (int, float) and 0 <= value < 1e30
    return type(value) is int and 0 <= value < 2**31


def config_to_hf(config: PolicyConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` dictionary; RoPE in the old and the new form, so that any transformers and vLLM read it."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **_FIXED,
        "attention_dropout": 0.0,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        **{theirs: getattr(config, name) for name, theirs in _HF_NAMES.items()},
    }


def read_config(directory: str | Path) -> PolicyConfig:
    """Reads ``directory/config.json``. Raises ValueError naming the path when it is missing or not usable."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"no model at {directory}: {path} does not exist")
    try:
        return config_from_hf(parse_json(path.read_bytes()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
