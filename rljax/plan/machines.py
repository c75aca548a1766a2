"""The machines that a step can be compiled for, with the memory of their cards and JAX's devices."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

_NO_TPU_HOST = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
INSTALL = {  # the advice of an error message, by platform
    "tpu": "pip install 'jax[tpu]'",
    "cuda": "pip install --no-deps nvidia-cudnn-cu12, and jax-cuda12-plugin and jax-cuda12-pjrt of jaxlib's version",
}


class Card(NamedTuple):
    """One device."""

    name: str  # the maker's name of the card
    memory_bytes: int  # the size of the main memory


@dataclass(frozen=True)
class Machine:
    """The cards that train together."""

    name: str  # the name on the command line
    card: Card  # the card of every device
    platform: str  # cuda or tpu
    topology: str  # JAX's name for the arrangement of the cards


H100 = Card("NVIDIA H100 SXM 80 GB", 84_942_979_072)
TPUS = {
    "v4": Card("TPU v4", 32 * 2**30),
    "v5e": Card("TPU v5e", 16 * 2**30),
    "v5p": Card("TPU v5p", 95 * 2**30),
    "v6e": Card("TPU v6e", 32 * 2**30),
    "tpu7x": Card("TPU7x, half a chip", 96 * 2**30),
}


def parse_machine(name: str) -> Machine:
    """Reads a machine's name: ``h100:NODESxCARDS``, such as h100:2x8, or ``tpu:KIND:SHAPE``, such as tpu:v5p:2x2x4.

    Raises:
      ValueError: There is no such machine.
    """
    if gpus := re.fullmatch(r"h100:([1-9]\d*)x([1-9]\d*)", name):
        nodes, cards = int(gpus.group(1)), int(gpus.group(2))
        return Machine(name, H100, "cuda", f"{nodes}x1x{cards}")
    kinds = "|".join(TPUS)
    if tpu := re.fullmatch(rf"tpu:({kinds}):((?:[1-9]\d*x)*[1-9]\d*)", name):
        kind, shape = tpu.groups()
        return Machine(name, TPUS[kind], "tpu", f"{kind}:{shape}")
    raise ValueError(
        f"--compile: no machine {name!r}; give h100:NODESxCARDS, such as h100:1x8, or tpu:KIND:SHAPE with one of "
        f"{', '.join(TPUS)}, such as tpu:v5p:2x2x4"
    )


def topology_devices(machine: Machine) -> list[Any]:
    """Returns the machine's devices (``jax.Device``) to compile for. They need not be present.

    JAX runs on the CPU after this call, because a compiler's plug-in would otherwise ask for its own devices.

    Raises:
      ValueError: The compiler for the machine is not installed, or there is no such arrangement.
    """
    import jax
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")
    if machine.platform == "tpu":
        # Without these variables libtpu asks a metadata server about this host, and fails if there is none.
        for variable, value in _NO_TPU_HOST.items():
            os.environ.setdefault(variable, value)
        options = {"topology_name": machine.topology}
        if machine.topology.startswith("v4:"):
            options["chip_config_name"] = "megacore"  # on Cloud TPU a v4 chip is one device
    else:
        target = files("rljax.plan").joinpath("h100_sxm.txtpb").read_text()
        options = {"topology_name": "", "target_config": target, "topology": machine.topology}
    try:
        return list(topologies.get_topology_desc(platform=machine.platform, **options).devices)
    except Exception as error:  # each plug-in raises errors of its own: RuntimeError, JaxRuntimeError and others
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"--compile {machine.name}: JAX has no compiler for it here, or knows no such arrangement "
            f"({type(error).__name__}: {reason:.200}); {INSTALL[machine.platform]}"
        ) from error
