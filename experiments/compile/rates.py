"""The published rates of the cards of ``rljax.plan.budget``.

A rate is a card's peak without sparsity, published by its maker: NVIDIA's H100 data sheet, the H100 white paper, and
Google's pages of TPU v4, v5e, v5p, v6e and 7x (docs.cloud.google.com/tpu/docs). The rate of a link counts one
direction, which is half of the advertised rate.
"""

from __future__ import annotations

from dataclasses import dataclass

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
