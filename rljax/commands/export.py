"""Writes a checkpoint of a run as an ordinary Hugging Face directory.

    rljax export runs/quickstart runs/quickstart-hf [--step 120] [--dtype bfloat16]
    rljax export runs/lora runs/lora-adapter --adapter

The directory holds config.json, safetensors in the wanted dtype, and the tokenizer of the model from which the run
started. transformers and vLLM load it. With ``rollout.stop_token_ids``, generation_config.json names those tokens, too.
A run with ``lora`` gives the merged weights. With ``--adapter`` the directory holds only the adapters, in the layout
of PEFT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax.numpy as jnp

from rljax.data.tokenizer import load_tokenizer
from rljax.distributed.files import filled_directory
from rljax.errors import ConfigError, caller_errors, parse_json
from rljax.evaluate import find_policy
from rljax.policy.config import ADAPTER_CONFIG
from rljax.policy.hf import SafetensorError, save_params
from rljax.policy.peft import WEIGHTS_NAME, save_adapters
from rljax.run.options import Positional, parse_arguments
from rljax.sharding import MeshConfig, make_mesh


@dataclass(frozen=True)
class ExportArguments:
    """The arguments of the export."""

    run: Positional[Path]
    """The run directory, or one of its checkpoints."""
    out: Positional[Path]
    """The Hugging Face directory to write."""
    step: int | None = None
    """The step of the checkpoint; None: the newest."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of the weights in the file."""
    adapter: bool = False
    """Write only the adapters, in float32."""
    model: str | None = None
    """The Hugging Face directory, or OWNER/NAME, of the model that the run started from. None: the run's
    ``model.path``."""


def main(argv: Sequence[str]) -> int:
    """Writes the Hugging Face directory and returns the exit status."""
    arguments = parse_arguments(ExportArguments, argv, prog="rljax export", description=__doc__ or "")
    out, other = arguments.out, "config.json" if arguments.adapter else ADAPTER_CONFIG
    with caller_errors(SafetensorError), filled_directory(out):  # safetensors has its own error for a full disk
        if (out / other).exists():
            raise ConfigError(f"{out} has {other}, and transformers would load both together: name another directory")
        policy = find_policy(arguments.run, step=arguments.step, model=arguments.model)
        if policy.run is None:
            raise ConfigError(f"{arguments.run} is not a run directory: it has no config.yaml")
        mesh = make_mesh(MeshConfig(1, 1))
        if arguments.adapter:
            lora, base = policy.settings().lora, Path(policy.hf_path)
            if not lora.rank:
                raise ConfigError(f"{arguments.run} trained all weights: it has no adapters")
            save_adapters(out, policy.load_state(mesh)[0].params, policy.config, lora, base)
            print(f"wrote the adapters of step {policy.step} of {policy.run} to {out}")
            if "text_config" in parse_json((base / "config.json").read_bytes()):
                names = "model.layers to model.language_model.layers"
                print(f"they fit {base} as AutoModelForCausalLM reads it: for vLLM, rename {names} in {WEIGHTS_NAME}")
            return 0
        params = policy.load(mesh)
        # Without stop tokens of the run, the model's own file stays as it is.
        named = policy.settings().rollout.stop_token_ids
        stops = policy.stops(load_tokenizer(policy.hf_path).eos_token_id) if named else ()
        dtype = jnp.dtype(arguments.dtype)
        save_params(out, params, policy.config, dtype, side_files_from=policy.hf_path, stop_token_ids=stops)
    print(f"wrote step {policy.step} of {policy.run} to {out} in {arguments.dtype}")
    return 0
