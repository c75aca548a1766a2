"""Compiles MaxText's training step for a machine that is not here, and writes the compiled program.

    PYTHONPATH=. MAXTEXT_PYTHON experiments/compile_maxtext.py MODEL MACHINE OUT [KEY=VALUE ...]

It runs in an environment with MaxText and the compilers of ``launch/install_compilers.sh``. MODEL
is MaxText's name, such as qwen3-4b, and MACHINE is one of ``--compile``. The steps are those of MaxText's own
``train_compile``, on the devices that rljax compiles for. Each device has one row of 9,216 tokens. The words KEY=VALUE
go to MaxText, and those that begin with ``xla_`` to the compiler. ``OUT.hlo`` receives the program, and
``OUT.memory.json`` the bytes of a device and the seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from rljax.plan.compile import COMPILER_OPTIONS, memory_by_kind
from rljax.plan.machines import Machine, parse_machine, topology_devices

ROW_TOKENS = 9216
# MaxText takes the number of devices from its own name of the machine.
TOPOLOGIES = {
    "h100:1x8": ("a3", 1),
    "h100:2x8": ("a3", 2),
    "tpu:v5p:2x2x2": ("v5p-16", 1),
    "tpu:v5p:2x2x4": ("v5p-32", 1),
    "tpu:v6e:4x4": ("v6e-16", 1),
}


def write_compiled(lowered: jax.stages.Lowered, machine: Machine, out: Path, options: Mapping[str, Any] = {}) -> None:
    """Compiles a step. Writes its text, and the bytes on a device by kind with the compiler's seconds."""
    start = time.perf_counter()
    compiled = lowered.compile(compiler_options={**COMPILER_OPTIONS.get(machine.platform, {}), **options})
    memory = {"compile_s": round(time.perf_counter() - start, 1), **memory_by_kind(compiled.memory_analysis())}
    Path(f"{out}.hlo").write_text(compiled.as_text() or "")
    Path(f"{out}.memory.json").write_text(json.dumps(memory))


def lower_maxtext(model_name: str, machine_name: str, words: list[str]) -> jax.stages.Lowered:
    """Returns MaxText's step with the settings KEY=VALUE, lowered for the machine."""
    devices = topology_devices(parse_machine(machine_name))  # first, so that JAX runs on the CPU

    import maxtext
    from flax.core.spmd import logical_axis_rules
    from jax.sharding import AxisType, Mesh
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train, train_compile
    from maxtext.utils import maxtext_utils, sharding

    jax.config.update("jax_default_prng_impl", "unsafe_rbg")  # as train_compile has it
    topology, slices = TOPOLOGIES[machine_name]
    settings = {
        **{"model_name": model_name, "compile_topology": topology, "compile_topology_num_slices": slices},
        **{"run_name": "compile", "base_output_directory": "/tmp", "enable_checkpointing": "false"},
        **{"dataset_type": "synthetic", "per_device_batch_size": 1, "max_target_length": ROW_TOKENS},
    }
    base = str(Path(maxtext.__file__).parent / "configs/base.yml")
    config = pyconfig.initialize(["", base, *(f"{key}={value}" for key, value in settings.items()), *words])
    grid = maxtext_utils.create_device_mesh(config, devices)
    mesh = Mesh(grid, config.mesh_axes, axis_types=(AxisType.Auto,) * len(config.mesh_axes))
    arguments, named, state, _, model = train_compile.get_shaped_inputs(mesh, config)
    parameters, state = sharding.maybe_update_params_sharding_with_opt(config, state)
    given = sharding.build_zero1_input_state_mesh_shardings(config, state, parameters)
    batch = sharding.get_input_data_sharding(config, mesh)
    step, ins, outs, static, donated = maxtext_utils.get_functional_train_with_signature(
        train.train_step, batch, given, model, config, parameters
    )
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        jitted = jax.jit(step, in_shardings=ins, out_shardings=outs, static_argnums=static, donate_argnums=donated)
        return jitted.lower(*arguments, **named)


def main() -> int:
    model, machine, out, *words = sys.argv[1:]
    options = dict(word.split("=", 1) for word in words if word.startswith("xla_"))
    lowered = lower_maxtext(model, machine, [word for word in words if not word.startswith("xla_")])
    write_compiled(lowered, parse_machine(machine), Path(out), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
