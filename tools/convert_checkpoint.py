"""Exports a run's checkpoint as an ordinary HF directory.

    python tools/convert_checkpoint.py runs/quickstart runs/quickstart-hf [--step 120] [--dtype bfloat16]

The directory holds config.json, safetensors in the dtype asked for and the tokenizer of the model the run started
from; transformers and vLLM load it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax.numpy as jnp
import tyro

from rljax.config import Config
from rljax.config_loader import ConfigError, caller_errors, load_config, run_cli
from rljax.policy.config import read_config
from rljax.policy.hf import save_params
from rljax.sharding import MeshConfig, make_mesh
from rljax.training.checkpoint import Checkpointer
from rljax.training.optimizer import make_optimizer
from rljax.training.state import abstract_state


@dataclass(frozen=True)
class Arguments:
    """What to export.

    Attributes:
      run: run directory.
      out: HF directory to write.
      step: checkpoint to take; the newest when not given.
      dtype: of the weights in the file.
    """

    run: Annotated[Path, tyro.conf.Positional]
    out: Annotated[Path, tyro.conf.Positional]
    step: int | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


def main(argv: Sequence[str]) -> int:
    """Exports; returns the exit status."""
    arguments = tyro.cli(Arguments, args=argv, description=__doc__)
    if not (arguments.run / "config.yaml").is_file():
        raise ConfigError(f"{arguments.run} is not a run directory: it has no config.yaml")
    config = load_config(Config, [str(arguments.run / "config.yaml")], prog="convert_checkpoint", description="")
    with caller_errors():
        policy = read_config(config.model.path)
    if not (arguments.run / "checkpoints").is_dir():
        raise ConfigError(f"{arguments.run} has no checkpoints")
    checkpointer = Checkpointer(arguments.run / "checkpoints", read_only=True)
    step = checkpointer.latest_step() if arguments.step is None else arguments.step
    if step is None or step not in checkpointer.all_steps():
        raise ConfigError(f"no checkpoint of step {step} in {arguments.run}; there are {checkpointer.all_steps()}")
    mesh = make_mesh(MeshConfig(1, 1))
    dynamic = config.precision.compute_dtype == "float16"
    wanted = abstract_state(policy, make_optimizer(config.optimizer), mesh, dynamic_scale=dynamic)
    state, _ = checkpointer.restore(step, wanted)
    checkpointer.close()
    save_params(arguments.out, state.params, policy, jnp.dtype(arguments.dtype), side_files_from=config.model.path)
    print(f"wrote step {step} of {arguments.run} to {arguments.out} in {arguments.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
