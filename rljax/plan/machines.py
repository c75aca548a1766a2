"""Machines to compile for by name, with the published rates of their cards, and their devices as JAX describes them.

Rates are a card's peaks as its maker publishes them, without sparsity: NVIDIA's H100 and H200 data sheets and the H100
white paper, and Google's pages of TPU v4, v5e, v5p, v6e and 7x (docs.cloud.google.com/tpu/docs). A link's rate is that
of one direction, half of what is advertised for both.
"""

from __future__ import annotations

import dataclasses
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
INSTALL = "bash launch/install_compilers.sh; then .venv-compile/bin/python -m rljax.train"


@dataclass(frozen=True)
class Card:
    """What one device of a machine can do.

    Attributes:
      name: as its maker says it.
      flops: (dtype of the operands, precision) -> floating-point operations of products in a second.
      memory_bytes: of its main memory.
      memory_rate: bytes read or written in a second.
      link_rate: bytes a second and direction to the other cards of its node; of a TPU over all its links in the slice.
      network_rate: bytes a second and direction to other nodes; None: all cards of a machine are linked alike.
    """

    name: str
    flops: dict[tuple[str, str], float]
    memory_bytes: int
    memory_rate: float
    link_rate: float
    network_rate: float | None = None

    def product_rate(self, dtype: str, precision: str) -> float:
        """Floating-point operations a second of products of this dtype; of two dtypes that of the slower."""
        pairs = [(part, precision) for part in dtype.split("x")]
        pairs = [pair if pair in self.flops else (pair[0], "default") for pair in pairs]
        return min(self.flops.get(pair, self.flops["float32", "highest"]) for pair in pairs)


@dataclass(frozen=True)
class Machine:
    """Cards that train together.

    Attributes:
      name: as given on the command line.
      card: what each device is.
      platform: cuda or tpu.
      topology: JAX's name of the arrangement.
      nodes: hosts of a GPU machine; a TPU's slice counts as one.
    """

    name: str
    card: Card
    platform: str
    topology: str
    nodes: int


_SIXTEEN_BIT = ("bfloat16", "float16")
H100 = Card(
    name="NVIDIA H100 SXM 80 GB",
    # A float32 product runs as TF32 unless the highest precision is asked for.
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
H200 = dataclasses.replace(H100, name="NVIDIA H200 SXM", memory_bytes=141_000_000_000, memory_rate=4.8e12)


def _tpu(name: str, tflops: float, memory_gib: int, memory_gb_s: float, link_gb_s: float) -> Card:
    """A TPU; its products are of bfloat16, and float32 takes one, three or six passes of them."""
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
    # A chip is two devices, which share its links.
    "tpu7x": _tpu("TPU7x, half a chip", 2307 / 2, 96, 7380 / 2, 300),
}


_KINDS = {
    "NVIDIA H100 80GB HBM3": H100,
    "NVIDIA H200": H200,
    "TPU v4": TPUS["v4"],
    "TPU v5 lite": TPUS["v5e"],
    "TPU v5e": TPUS["v5e"],
    "TPU v5": TPUS["v5p"],
    "TPU v5p": TPUS["v5p"],
    "TPU v6 lite": TPUS["v6e"],
    "TPU v6e": TPUS["v6e"],
    "TPU7x": TPUS["tpu7x"],
}


def card_of_kind(device_kind: str) -> Card | None:
    """The card that JAX calls ``device_kind``, or None where its rates are not known here.

    An H100 of another form (PCIe, NVL) is not known: it is slower than the SXM one.
    """
    return _KINDS.get(device_kind)


def parse_machine(name: str) -> Machine:
    """The machine of a name: ``h100:NODESxCARDS``, such as h100:2x8, or ``tpu:KIND:SHAPE``, such as tpu:v5p:2x2x4.

    Raises:
      ValueError: no such machine.
    """
    if found := re.fullmatch(r"h100:([1-9]\d*)x([1-9]\d*)", name):
        nodes, cards = int(found.group(1)), int(found.group(2))
        return Machine(name, H100, "cuda", f"{nodes}x1x{cards}", nodes)
    kinds = "|".join(TPUS)
    if found := re.fullmatch(rf"tpu:({kinds}):((?:[1-9]\d*x)*[1-9]\d*)", name):
        kind, shape = found.groups()
        return Machine(name, TPUS[kind], "tpu", f"{kind}:{shape}", 1)
    raise ValueError(
        f"--compile: no machine {name!r}; give h100:NODESxCARDS, such as h100:1x8, or tpu:KIND:SHAPE with one of "
        f"{', '.join(TPUS)}, such as tpu:v5p:2x2x4"
    )


def topology_devices(machine: Machine) -> list[Any]:
    """The machine's devices (``jax.Device``), to make a mesh of and compile for; none of them need be here.

    From here on JAX runs on the CPU: a compiler's plug-in would ask for its own devices otherwise.

    Raises:
      ValueError: the compiler for them is not installed, or there is no such arrangement.
    """
    import jax
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")
    if machine.platform == "tpu":
        # Otherwise libtpu asks a metadata server what this host is, and complains when there is none.
        for variable, value in _NO_TPU_HOST.items():
            os.environ.setdefault(variable, value)
        options = {"topology_name": machine.topology}
        if machine.topology.startswith("v4:"):
            options["chip_config_name"] = "megacore"  # a chip is one device, as Cloud TPU runs it
    else:
        target = files("rljax.plan").joinpath("h100_sxm.txtpb").read_text()
        options = {"topology_name": "", "target_config": target, "topology": machine.topology}
    try:
        return list(topologies.get_topology_desc(platform=machine.platform, **options).devices)
    except Exception as error:  # each plug-in raises its own kind, RuntimeError, JaxRuntimeError and others
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"--compile {machine.name}: JAX has no compiler for it here, or knows no such arrangement "
            f"({type(error).__name__}: {reason:.200}); {INSTALL}"
        ) from error


def node_of(machine: Machine, device: Any) -> int:
    """Which node of the machine a device stands in."""
    return 0 if machine.card.network_rate is None else int(device.process_index)
