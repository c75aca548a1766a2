"""A model of a step's time from its work and the published rates of the cards. It is a lower bound, not a measurement.

The time of a micro-batch is max(products, memory) + links. Products and memory traffic overlap; the exchanges between
devices overlap with nothing.

A rate is a card's peak without sparsity, published by its maker: NVIDIA's H100 data sheet, the H100 white paper, and
Google's pages of TPU v4, v5e, v5p, v6e and 7x (docs.cloud.google.com/tpu/docs). The rate of a link counts one
direction, which is half of the advertised rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from compile.count import Collective, Work
from compile.kernels import KernelUse
from rljax.plan.budget import H100, TPUS

_SIXTEEN_BIT = ("bfloat16", "float16")


@dataclass(frozen=True)
class Rates:
    """The rates of one device."""

    flops: dict[tuple[str, str], float]  # products' operations per second, by (dtype of the operands, precision)
    memory: float  # bytes read or written per second
    link: float  # bytes per second and direction to the other cards of the node, or over all links of a TPU
    network: float | None = None  # bytes per second and direction to other nodes; None if all links are equal

    def of_products(self, dtype: str, precision: str) -> float:
        """Returns the floating-point operations per second of products of a dtype. Of two dtypes the slower counts."""
        pairs = [(part, precision) for part in dtype.split("x")]
        pairs = [pair if pair in self.flops else (pair[0], "default") for pair in pairs]
        return min(self.flops.get(pair, self.flops["float32", "highest"]) for pair in pairs)


def _tpu(tflops: float, memory_gb_s: float, link_gb_s: float) -> Rates:
    """Returns a TPU's rates. A float32 product takes one, three or six passes of bfloat16 products."""
    passes = {"default": 1, "high": 3, "highest": 6}
    flops = {(dtype, "default"): tflops * 1e12 for dtype in _SIXTEEN_BIT}
    flops |= {("float32", precision): tflops * 1e12 / count for precision, count in passes.items()}
    return Rates(flops, memory_gb_s * 1e9, link_gb_s * 1e9)


# A float32 product runs as TF32 unless its precision is highest.
_H100_FLOPS = {("float32", "default"): 494.7e12, ("float32", "high"): 494.7e12, ("float32", "highest"): 66.9e12}
_H100_FLOPS |= {(dtype, "default"): 989.4e12 for dtype in _SIXTEEN_BIT}
RATES = {
    # NVLink 4 has 18 links of 25 GB/s. Each card has one InfiniBand adapter of 400 Gb/s.
    H100.name: Rates(_H100_FLOPS, 3.35e12, 450e9, 50e9),
    TPUS["v4"].name: _tpu(275, 1228, 300),
    TPUS["v5e"].name: _tpu(197, 819, 200),
    TPUS["v5p"].name: _tpu(459, 2765, 600),
    TPUS["v6e"].name: _tpu(918, 1638, 400),
    # A chip is two devices that share its links.
    TPUS["tpu7x"].name: _tpu(2307 / 2, 7380 / 2, 300),
}
"""The rates of a card by its name."""


@dataclass(frozen=True)
class Times:
    """The modelled seconds on one device."""

    products: float  # all products, kernels included, at the rate of each dtype and precision
    memory: float  # the traffic to the device's memory
    links: float  # the collectives, one after another

    @property
    def total(self) -> float:
        """The seconds max(products, memory) + links."""
        return max(self.products, self.memory) + self.links

    def rounded(self) -> dict[str, float]:
        """Returns the seconds and their total by name, to the microsecond."""
        return {name: round(getattr(self, name), 6) for name in ("products", "memory", "links", "total")}


def times(work: Work, kernels: Iterable[KernelUse], rates: Rates, nodes: Sequence[int]) -> Times:
    """Models the seconds that a device's work takes at the published rates of a card.

    ``kernels`` are the custom calls of the work, from ``kernel_uses``; ``nodes`` has the node of each partition.
    """
    products = sum(count / rates.of_products(*kind) for kind, count in work.flops.items())
    products += sum(use.flops / rates.of_products(use.dtype, "default") for use in kernels if use.flops)
    links = sum(collective_seconds(one, rates, nodes) for one in work.merged_collectives())
    return Times(products, work.memory_bytes / rates.memory, links)


def crosses_nodes(collective: Collective, nodes: Sequence[int]) -> bool:
    """Returns whether any group of the collective has members in several nodes."""
    return any(len({nodes[member] for member in group}) > 1 for group in collective.groups)


def collective_seconds(collective: Collective, rates: Rates, nodes: Sequence[int]) -> float:
    """Models the seconds of a collective as rings over its slowest group, limited by links inside or between nodes.

    Each of n members sends (n - 1) / n of the bytes, in an all-reduce twice as many. If a ring crosses nodes, every
    member of a node sends a part over its own network adapter. An all-to-all sends each member its own part.
    """
    return max((_group_seconds(collective, group, rates, nodes) for group in collective.groups), default=0.0)


def _group_seconds(collective: Collective, group: Sequence[int], rates: Rates, nodes: Sequence[int]) -> float:
    members = len(set(group))
    if members < 2:
        return 0.0
    if collective.kind in ("collective-permute", "collective-broadcast"):
        sent = float(collective.bytes)
    else:
        sent = collective.bytes * (members - 1) / members * (2 if collective.kind == "all-reduce" else 1)
    in_nodes = Counter(nodes[member] for member in group)
    if len(in_nodes) == 1 or rates.network is None:
        return sent / rates.link
    fewest = min(in_nodes.values())
    if collective.kind in ("all-to-all", "ragged-all-to-all"):
        across = collective.bytes * (members - fewest) / members
    elif collective.kind == "collective-permute":
        across = sent
    else:
        across = sent / fewest
    inside = sent / rates.link if fewest > 1 else 0.0
    return max(inside, across / rates.network)
