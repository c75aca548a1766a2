"""The files of adapters in the layout of Hugging Face PEFT, and directories of them that are taken for models."""

from __future__ import annotations

from pathlib import Path

from rljax.errors import naming, parse_json

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"


def refuse_adapter(directory: Path) -> None:
    """Raises ValueError if a directory holds an adapter of PEFT, which transformers adds to a model there.

    The message names the settings that take the adapter.
    """
    path = directory / CONFIG_NAME
    if not path.is_file():
        return
    with naming(path):
        raw = parse_json(path.read_bytes())
    raw = raw if isinstance(raw, dict) else {}
    targets = raw.get("target_modules")
    values = {
        "model.path": raw.get("base_model_name_or_path"),
        "lora.adapter": directory,
        "lora.rank": raw.get("r"),
        "lora.alpha": raw.get("lora_alpha"),
        "lora.targets": " ".join(map(str, targets)) if isinstance(targets, list) else None,
    }
    said = ", ".join(f"{key} = {value!s:.200}" for key, value in values.items() if value is not None)
    cause = f"{directory} holds an adapter, which transformers adds to a model there"
    raise ValueError(f"{cause}: set {said}, or move its files away")
