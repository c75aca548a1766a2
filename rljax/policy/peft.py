"""Adapters in the layout of Hugging Face PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from safetensors.numpy import save_file

from rljax.distributed.files import replacing
from rljax.errors import naming, parse_json
from rljax.policy.config import ADAPTER_CONFIG, PolicyConfig
from rljax.policy.hf import host_tensors, leaves_of, open_tensors, read_leaves
from rljax.policy.lora import LoraConfig, declared_adapters
from rljax.policy.model import Params

WEIGHTS_NAME = "adapter_model.safetensors"
"""The file with the matrices of an adapter."""
_FIXED = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "lora_bias": False,
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "layer_replication": None,
    "trainable_token_indices": None,
}
"""The keys of the configuration that must have these values in every adapter that rljax can compute."""
_STARTS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
"""The values of ``init_lora_weights`` that leave the base as it is. All others of PEFT subtract from it."""
_SAME_FUNCTION = (
    "auto_mapping", "base_model_class", "base_model_name_or_path", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "loftq_config",
    "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version",
    "qalora_group_size", "r", "revision", "runtime_config", "target_modules", "task_type", "unsloth_fixed",
    "velora_config",
)  # fmt: skip
"""The keys that do not change what is computed, or that ``_check_config`` compares one by one."""


def save_adapters(
    directory: str | Path, adapters: Params, config: PolicyConfig, lora: LoraConfig, base: str | Path
) -> None:
    """Writes a directory that ``peft.PeftModel.from_pretrained`` and vLLM can load. The tensors are float32.

    The directory is created if it is missing. ``adapters`` has the structure of ``declared_adapters``. ``base`` is the
    name or path of the base model, which adapter_config.json records.
    """
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    tensors = dict(host_tensors(adapters, leaves_of(declared_adapters(config, lora)), jnp.float32))
    with replacing(out / WEIGHTS_NAME) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
    settings = _FIXED | {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.resolved_alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(lora.targets),
    }
    (out / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True))


def load_adapters(
    directory: str | Path, config: PolicyConfig, lora: LoraConfig, shardings: Params | None = None
) -> Params:
    """Reads float32 adapters, with the rank, alpha and targets of ``lora``, from a directory in PEFT's layout.

    The tensors may be F16, BF16, F32 or F64. ``shardings`` has a NamedSharding at each leaf. Without it everything is
    on the default device.

    Raises:
      ValueError: A file is missing or cannot be used, or the adapters have another kind, rank, alpha or other targets.
    """
    folder = Path(directory)
    for name in (ADAPTER_CONFIG, WEIGHTS_NAME):
        if not (folder / name).is_file():
            made = "peft's save_pretrained makes it, also from adapter_model.bin"
            raise ValueError(f"no adapters at {folder}: {folder / name} does not exist; {made}")
    _check_config(folder / ADAPTER_CONFIG, lora)
    sources = open_tensors(folder / WEIGHTS_NAME)
    leaves = list(leaves_of(declared_adapters(config, lora)))
    unknown = sorted(set(sources) - {name for leaf in leaves for name in leaf.names})
    if unknown:
        raise ValueError(f"{folder / WEIGHTS_NAME}: {unknown[0]!r:.120} belongs to no layer in lora.targets")
    shapes_from = "lora.rank and config.json"
    return read_leaves(sources, leaves, shardings, jnp.float32, directory=folder, shapes_from=shapes_from)


def _check_config(path: Path, lora: LoraConfig) -> None:
    """Raises ValueError unless the file describes an adapter with the kind, rank and alpha of ``lora``."""
    with naming(path):
        raw: Any = parse_json(path.read_bytes())
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected an object, got {type(raw).__name__}")
    for key, value in raw.items():
        if key not in _SAME_FUNCTION and value and value != _FIXED.get(key):
            raise ValueError(f"{path}: {key} = {value!r:.60} is not supported")
    start = raw.get("init_lora_weights")
    if (start.lower() if isinstance(start, str) else start) not in _STARTS:
        raise ValueError(
            f"{path}: init_lora_weights = {start!r:.60} is not supported, because it changes the base; save it "
            "with path_initial_model_for_weight_conversion"
        )
    for key, name, wanted in (("r", "lora.rank", lora.rank), ("lora_alpha", "lora.alpha", lora.resolved_alpha)):
        if raw.get(key) != wanted:
            raise ValueError(f"{path}: {key} = {raw.get(key)!r:.60}, but {name} = {wanted:g}")
