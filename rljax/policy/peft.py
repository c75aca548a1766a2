"""Adapters in the layout of Hugging Face PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from rljax.errors import parse_json
from rljax.policy.config import PolicyConfig
from rljax.policy.hf import leaves_of, open_tensors, read_leaves
from rljax.policy.lora import LoraConfig, abstract_adapters, stored_adapters
from rljax.policy.model import Params
from rljax.sharding import fetch

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
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
"""Keys of the configuration that have one value in every adapter that is computed here."""


def save_adapters(
    directory: str | Path, adapters: Params, config: PolicyConfig, lora: LoraConfig, base: str | Path
) -> None:
    """Writes a directory that ``peft.PeftModel.from_pretrained`` and vLLM load; tensors are float32.

    Args:
      directory: made when missing.
      adapters: the pytree of ``abstract_adapters``.
      config: shape of the policy.
      lora: of the adapters.
      base: the model that they are for, as the file names it.
    """
    out, flat = Path(directory), flatten_dict(adapters)
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for leaf in leaves_of(abstract_adapters(config, lora), stored_adapters(config, lora)):
        whole = np.asarray(fetch(flat[leaf.path]), np.float32)
        tensors |= {name: leaf.to_hf(part) for name, part in zip(leaf.names, whole, strict=True)}
    partial = out / (WEIGHTS_NAME + ".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.rename(out / WEIGHTS_NAME)
    said = _FIXED | {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.resolved_alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(lora.targets),
    }
    (out / CONFIG_NAME).write_text(json.dumps(said, indent=2, sort_keys=True))


def load_adapters(
    directory: str | Path, config: PolicyConfig, lora: LoraConfig, shardings: Params | None = None
) -> Params:
    """Reads float32 adapters from a directory in PEFT's layout.

    Args:
      directory: with both files; tensors of any float dtype.
      config: shape of the policy.
      lora: rank, alpha and targets that the adapters must have.
      shardings: a NamedSharding at each leaf; None puts everything on the default device.

    Raises:
      ValueError: a file is missing or not usable, the adapters are of another kind, rank or alpha, or on other layers.
    """
    folder = Path(directory)
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (folder / name).is_file():
            raise ValueError(f"no adapters at {folder}: {folder / name} does not exist")
    _check_config(folder / CONFIG_NAME, lora)
    sources = open_tensors(folder / WEIGHTS_NAME)
    leaves = list(leaves_of(abstract_adapters(config, lora), stored_adapters(config, lora)))
    known = {name for leaf in leaves for name in leaf.names}
    more = sorted(set(sources) - known)
    if more:
        raise ValueError(f"{folder / WEIGHTS_NAME}: {more[0]!r:.120} is not of a layer in lora.targets")
    said_by = "lora.rank and config.json"
    return read_leaves(sources, leaves, shardings, jnp.float32, directory=folder, said_by=said_by)


def _check_config(path: Path, lora: LoraConfig) -> None:
    """Raises ValueError when the file is of another kind of adapter, rank or alpha than ``lora`` says."""
    try:
        raw: Any = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected an object, got {type(raw).__name__}")
    for key, only in _FIXED.items():
        if (raw.get(key) or only) != only:
            raise ValueError(f"{path}: {key} = {raw[key]!r:.60} is not supported")
    for key, wanted in (("r", lora.rank), ("lora_alpha", lora.resolved_alpha)):
        name = "lora.rank" if key == "r" else "lora.alpha"
        if raw.get(key) != wanted:
            raise ValueError(f"{path}: {key} = {raw.get(key)!r:.60}, but {name} = {wanted:g}")
