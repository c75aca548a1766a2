"""The machines that a step can be compiled for, with the published rates of their cards and JAX's devices.

A rate is a card's peak without sparsity, published by its maker: NVIDIA's H100 and H200 data sheets, the H100 white
paper, and Google's pages of TPU v4, v5e, v5p, v6e and 7x (docs.cloud.google.com/tpu/docs). The rate of a link counts
one direction, which is half of the advertised rate.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

_NO_TPU_HOST = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
INSTALL = {  # the advice of an error message, by platform
    "tpu": "pip install 'jax[tpu]'",
    "cuda": "pip install --no-deps nvidia-cudnn-cu12, and jax-cuda12-plugin and jax-cuda12-pjrt of jaxlib's version",
}


@dataclass(frozen=True)
class Card:
    """The memory and the rates of one device."""

    name: str  # the maker's name of the card
    flops: dict[tuple[str, str], float]  # products' operations per second, by (dtype of the operands, precision)
    memory_bytes: int  # the size of the main memory
    memory_rate: float  # bytes read or written per second
    link_rate: float  # bytes per second and direction to the other cards of the node, or over all links of a TPU
    network_rate: float | None = None  # bytes per second and direction to other nodes; None if all links are equal

    def product_rate(self, dtype: str, precision: str) -> float:
        """Returns the floating-point operations per second of products of a dtype. Of two dtypes the slower counts."""
        pairs = [(part, precision) for part in dtype.split("x")]
        pairs = [pair if pair in self.flops else (pair[0], "default") for pair in pairs]
        return min(self.flops.get(pair, self.flops["float32", "highest"]) for pair in pairs)


@dataclass(frozen=True)
class Machine:
    """The cards that train together."""

    name: str  # the name on the command line
    card: Card  # the card of every device
    platform: str  # cuda or tpu
    topology: str  # JAX's name for the arrangement of the cards
    nodes: int  # the number of hosts of a GPU machine; a TPU's slice counts as one


_SIXTEEN_BIT = ("bfloat16", "float16")
H100 = Card(
    name="NVIDIA H100 SXM 80 GB",
    # A float32 product runs as TF32 unless its precision is highest.
    flops={
        **{(dtype, "default"): 989.4e12 for dtype in _SIXTEEN_BIT},
        ("float32", "default"): 494.7e12,
        ("float32", "high"): 494.7e12,
        ("float32", "highest"): 66.9e12,
    },
    memory_bytes=84_942_979_072,
    memory_rate=3.35e12,
    link_rate=450e9,  # NVLink 4: 18 links of 25 GB/s
    network_rate=50e9,  # one 400 Gb/s InfiniBand adapter a card
)


def _tpu(name: str, tflops: float, memory_gib: int, memory_gb_s: float, link_gb_s: float) -> Card:
    """Returns a TPU's card. A float32 product takes one, three or six passes of bfloat16 products."""
    passes = {"default": 1, "high": 3, "highest": 6}
    return Card(
        name=name,
        flops={
            **{(dtype, "default"): tflops * 1e12 for dtype in _SIXTEEN_BIT},
            **{("float32", precision): tflops * 1e12 / count for precision, count in passes.items()},
        },
        memory_bytes=memory_gib * 2**30,
        memory_rate=memory_gb_s * 1e9,
        link_rate=link_gb_s * 1e9,
    )


TPUS = {
    "v4": _tpu("TPU v4", 275, 32, 1228, 300),
    "v5e": _tpu("TPU v5e", 197, 16, 819, 200),
    "v5p": _tpu("TPU v5p", 459, 95, 2765, 600),
    "v6e": _tpu("TPU v6e", 918, 32, 1638, 400),
    # A chip is two devices that share its links.
    "tpu7x": _tpu("TPU7x, half a chip", 2307 / 2, 96, 7380 / 2, 300),
}


def parse_machine(name: str) -> Machine:
    """Reads a machine's name: ``h100:NODESxCARDS``, such as h100:2x8, or ``tpu:KIND:SHAPE``, such as tpu:v5p:2x2x4.

    Raises:
      ValueError: There is no such machine.
    """
    if gpus := re.fullmatch(r"h100:([1-9]\d*)x([1-9]\d*)", name):
        nodes, cards = int(gpus.group(1)), int(gpus.group(2))
        return Machine(name, H100, "cuda", f"{nodes}x1x{cards}", nodes)
    kinds = "|".join(TPUS)
    if tpu := re.fullmatch(rf"tpu:({kinds}):((?:[1-9]\d*x)*[1-9]\d*)", name):
        kind, shape = tpu.groups()
        return Machine(name, TPUS[kind], "tpu", f"{kind}:{shape}", 1)
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
