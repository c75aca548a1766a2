"""Compiles MaxText's training step for a machine that is not here, and writes the compiled program.

    PYTHONPATH=. MAXTEXT_PYTHON experiments/compile_maxtext.py MODEL MACHINE OUT [KEY=VALUE ...]

It runs in an environment with MaxText and the compilers of ``launch/install_compilers.sh``. MODEL
is MaxText's name, such as qwen3-4b, and MACHINE is one of ``--compile``. The steps are those of MaxText's own
``train_compile``, on the devices that rljax compiles for. ``peer_program.py`` says what the other words are.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
from peer_program import ROW_TOKENS, compile_peer

from rljax.plan.machines import Machine, topology_devices

# MaxText takes the number of devices from its own name of the machine.
TOPOLOGIES = {
    "h100:1x8": ("a3", 1),
    "h100:2x8": ("a3", 2),
    "tpu:v5p:2x2x2": ("v5p-16", 1),
    "tpu:v5p:2x2x4": ("v5p-32", 1),
    "tpu:v6e:4x4": ("v6e-16", 1),
}


def lower_maxtext(model_name: str, machine: Machine, words: list[str]) -> jax.stages.Lowered:
    """Returns MaxText's step with the settings KEY=VALUE, lowered for the machine."""
    devices = topology_devices(machine)  # this comes first, so that JAX runs on the CPU

    import maxtext
    from flax.core.spmd import logical_axis_rules
    from jax.sharding import AxisType, Mesh
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train, train_compile
    from maxtext.utils import max_utils, maxtext_utils, sharding

    jax.config.update("jax_default_prng_impl", "unsafe_rbg")  # train_compile sets it, too
    topology, slices = TOPOLOGIES[machine.name]
    settings = {
        **{"model_name": model_name, "compile_topology": topology, "compile_topology_num_slices": slices},
        **{"run_name": "compile", "base_output_directory": "/tmp", "enable_checkpointing": "false"},
        **{"dataset_type": "synthetic", "per_device_batch_size": 1, "max_target_length": ROW_TOKENS},
    }
    if slices > 1:  # the hosts share the weights, as rljax's do
        settings |= {"dcn_data_parallelism": 1, "dcn_fsdp_parallelism": slices}
    base = str(Path(maxtext.__file__).parent / "configs/base.yml")
    config = pyconfig.initialize(["", base, *(f"{key}={value}" for key, value in settings.items()), *words])
    if slices > 1:  # MaxText asks devices for their slices, and these have one; they stand host after host
        inside = max_utils.fill_unspecified_mesh_axes(config.ici_parallelism.copy(), len(devices) // slices, "ICI")
        grid = np.reshape(devices, np.multiply(inside, config.dcn_parallelism))
    else:
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


if __name__ == "__main__":
    sys.exit(compile_peer(lower_maxtext))
