"""A model of a step's time from its work and the published rates of the cards. It is a lower bound, not a measurement.

The time of a micro-batch is max(products, memory) + links. Products and memory traffic overlap; the exchanges between
devices overlap with nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from compile.count import Collective, Work
from compile.kernels import KernelUse
from compile.rates import Rates


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
