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
from rljax.errors import ConfigError, caller_errors
from rljax.evaluate import find_policy
from rljax.policy.hf import save_params
from rljax.policy.peft import save_adapters
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


def main(argv: Sequence[str]) -> int:
    """Writes the Hugging Face directory and returns the exit status."""
    arguments = parse_arguments(ExportArguments, argv, prog="rljax export", description=__doc__ or "")
    with caller_errors():
        policy = find_policy(arguments.run, step=arguments.step)
        if policy.run is None:
            raise ConfigError(f"{arguments.run} is not a run directory: it has no config.yaml")
        mesh = make_mesh(MeshConfig(1, 1))
        if arguments.adapter:
            lora = policy.settings().lora
            if not lora.rank:
                raise ConfigError(f"{arguments.run} trained all weights: it has no adapters")
            save_adapters(arguments.out, policy.load_state(mesh).params, policy.config, lora, policy.hf_path)
            print(f"wrote the adapters of step {policy.step} of {policy.run} to {arguments.out}")
            return 0
        params = policy.load(mesh)
        # Without stop tokens of the run, the model's own file stays as it is.
        named = policy.settings().rollout.stop_token_ids
        stops = policy.stops(load_tokenizer(policy.hf_path).eos_token_id) if named else ()
    save_params(
        arguments.out,
        params,
        policy.config,
        jnp.dtype(arguments.dtype),
        side_files_from=policy.hf_path,
        stop_token_ids=stops,
    )
    print(f"wrote step {policy.step} of {policy.run} to {arguments.out} in {arguments.dtype}")
    return 0
