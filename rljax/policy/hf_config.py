"""A policy's shape read from and written to a Hugging Face ``config.json``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rljax.errors import parse_json
from rljax.policy.config import SIZES, PolicyConfig
from rljax.policy.families import FAMILIES

_OTHERWISE = ("rope_theta", "family", "num_experts", "experts_per_token", "expert_size", "normalize_gates")
"""Fields that are not in every family's file, or are read in a way of their own."""
_NAMES = {field.name: field.name for field in dataclasses.fields(PolicyConfig) if field.name not in _OTHERWISE} | {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
"""Our name -> that of the file, of the fields that every family has."""
_BOOLEANS = ("tie_word_embeddings", "normalize_gates")
_FLOATS = ("rope_theta", "rms_norm_eps", "initializer_range")


def config_from_hf(raw: dict[str, Any]) -> PolicyConfig:
    """Reads a ``config.json`` dictionary, transformers v5 form (``rope_parameters``) or the older (``rope_theta``).

    Raises:
      ValueError: a model type or a feature (sliding window, scaled RoPE, another activation, quantised weights) that no
        policy here computes, or a missing size; the message names the key and its value.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"expected an object, got {type(raw).__name__}")
    family = FAMILIES.get(raw["model_type"]) if isinstance(raw.get("model_type"), str) else None
    if family is None:
        raise ValueError(f"model_type must be one of {', '.join(sorted(FAMILIES))}, got {raw.get('model_type')!r:.60}")
    raw = {key: raw.get(other) for key, other in family.aliases.items()} | raw
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters must be an object, got {rope!r:.60}")
    found = {**raw, "rope_type": rope.get("rope_type", rope.get("type", "default"))}
    for key, only in {**family.fixed, "rope_type": "default", "quantization_config": None}.items():
        if (found.get(key) or only) != only:
            raise ValueError(f"{key} = {found[key]!r:.60} is not supported by the {family.model_type} policy")
    layer_types = raw.get("layer_types") or ["full_attention"]
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise ValueError(f"layer_types = {layer_types!r:.60} is not supported: each must be 'full_attention'")
    names = {**_NAMES, **family.fields}
    values: dict[str, Any] = {
        **family.defaults,
        **{name: raw[theirs] for name, theirs in names.items() if raw.get(theirs) is not None},
        "rope_theta": rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0,
    }
    for name in (*SIZES, *family.fields):
        if name not in values and name != "head_dim":
            raise ValueError(f"config.json has no {names[name]!r}")
    for name, value in values.items():
        if not _is_of_type(name, value):
            raise ValueError(f"{names.get(name, name)} cannot be {value!r:.60}")
    values["rope_theta"] = float(values["rope_theta"])
    values.setdefault("head_dim", values["hidden_size"] // max(1, values["num_heads"]))
    if isinstance(values.get("eos_token_id"), list):
        values["eos_token_id"] = tuple(values["eos_token_id"])
    config = PolicyConfig(**values, family=family.model_type)
    family.check(config)
    return config


def _is_of_type(name: str, value: Any) -> bool:
    """Whether a value of a ``config.json`` is of the type of our field, and of a size that anything has."""
    if name == "eos_token_id" and isinstance(value, (list, tuple)):
        return all(_is_of_type(name, one) for one in value)
    if name in _BOOLEANS:
        return isinstance(value, bool)
    if name in _FLOATS:
        return type(value) in (int, float) and 0 <= value < 1e30
    return type(value) is int and 0 <= value < 2**31


def config_to_hf(config: PolicyConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` dictionary; RoPE in the old and the new form, so that any transformers and vLLM read it."""
    family = FAMILIES[config.family]
    names = {**_NAMES, **family.fields}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.fixed,
        "attention_dropout": 0.0,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        **{theirs: getattr(config, name) for name, theirs in names.items()},
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
