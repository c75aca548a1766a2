"""A lower bound on the time of a step from what it does and the published rates of the cards; not a measurement.

The time of a micro-batch is max(products, memory) + links: products and traffic to memory overlap, and nothing overlaps
with the exchanges between devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljax.plan.count import Collective, Work
from rljax.plan.machines import Card


@dataclass(frozen=True)
class Times:
    """Seconds on one device.

    Attributes:
      products: floating-point operations at the rate of each dtype and precision, those of kernels included.
      memory: traffic to the device's memory.
      links: collectives, one after another.
    """

    products: float
    memory: float
    links: float

    @property
    def total(self) -> float:
        """max(products, memory) + links."""
        return max(self.products, self.memory) + self.links


def times(work: Work, kernel_flops: Mapping[str, int], card: Card, nodes: Sequence[int]) -> Times:
    """Seconds that ``work`` takes at the card's published rates.

    Args:
      work: of one device.
      kernel_flops: dtype -> floating-point operations inside kernels.
      card: what each device is.
      nodes: of each partition, the node that it stands in.
    """
    products = sum(count / card.product_rate(*kind) for kind, count in work.flops.items())
    products += sum(count / card.product_rate(dtype, "default") for dtype, count in kernel_flops.items())
    links = sum(collective_seconds(one, card, nodes) for one in work.merged_collectives())
    return Times(products, work.memory_bytes / card.memory_rate, links)


def crosses_nodes(collective: Collective, nodes: Sequence[int]) -> bool:
    """Whether any of its groups has members in several nodes."""
    return any(len({nodes[member] for member in group}) > 1 for group in collective.groups)


def collective_seconds(collective: Collective, card: Card, nodes: Sequence[int]) -> float:
    """Seconds of a collective by rings over its slowest group; the slower of the links inside and between nodes counts.

    Of n members each sends (n - 1) / n of the bytes, in an all-reduce twice that. Where a ring passes between nodes,
    every member of a node has a part of it over its own network adapter; an all-to-all sends each member its own part.
    """
    return max((_group_seconds(collective, group, card, nodes) for group in collective.groups), default=0.0)


def _group_seconds(collective: Collective, group: Sequence[int], card: Card, nodes: Sequence[int]) -> float:
    members = len(set(group))
    if members < 2:
        return 0.0
    if collective.kind in ("collective-permute", "collective-broadcast"):
        sent = float(collective.bytes)
    else:
        sent = collective.bytes * (members - 1) / members * (2 if collective.kind == "all-reduce" else 1)
    in_nodes = Counter(nodes[member] for member in group)
    if len(in_nodes) == 1 or card.network_rate is None:
        return sent / card.link_rate
    fewest = min(in_nodes.values())
    if collective.kind in ("all-to-all", "ragged-all-to-all"):
        across = collective.bytes * (members - fewest) / members
    elif collective.kind == "collective-permute":
        across = sent
    else:
        across = sent / fewest
    inside = sent / card.link_rate if fewest > 1 else 0.0
    return max(inside, across / card.network_rate)
