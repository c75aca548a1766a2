"""The files of adapters in the layout of Hugging Face PEFT, and directories of them that are taken for models."""

from __future__ import annotations

from pathlib import Path

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"


def refuse_adapter(directory: Path) -> None:
    """Raises ValueError if a directory holds an adapter of PEFT, which transformers adds to a model there."""
    if (directory / CONFIG_NAME).is_file():
        cause = f"{directory} holds an adapter, which transformers adds to a model there"
        remedy = f"set model.path to the model that it was made for and lora.adapter to {directory}"
        raise ValueError(f"{cause}: {remedy}, or move its files away")
