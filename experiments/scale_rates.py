"""The rates of ``scale_model.py``, each with its source.

A rate is *measured* (by a program of this repository, on a machine that it names), *published* (by somebody who
measured it on such hardware, or by the hardware's maker), or *assumed* (with a reason).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["measured", "published", "assumed"]


class Rate(NamedTuple):
    """A number with its unit, its kind and its source."""

    value: float
    unit: str
    kind: Kind
    source: str


LEADERBOARD = (
    "ML.ENERGY Leaderboard v3.0 (github.com/ml-energy/leaderboard, commit 0cd52da, public/data/tasks/{}.json): vLLM, "
    "bfloat16, H100, output_throughput_tokens_per_sec at avg_batch_size"
)


class Decoding(NamedTuple):
    """The published points of one server for a mean response length: (requests at a time, output tokens per second)."""

    gpus: int
    mean_tokens: int
    points: tuple[tuple[float, float], ...]
    source: str


# The servers by model, for long responses (GPQA Diamond, reasoning on) and for short ones (LM Arena chats).
DECODING = {
    ("8B", "long"): Decoding(
        1, 8052, ((8, 818), (16, 1345), (32, 1917), (63.3, 2510), (82, 3117)), LEADERBOARD.format("gpqa")
    ),
    ("8B", "short"): Decoding(
        1,
        645,
        ((8, 962), (16, 1745), (31.9, 2928), (63.9, 4315), (127.8, 5930), (255.5, 7719), (474.4, 8535)),
        LEADERBOARD.format("lm-arena-chat"),
    ),
    ("32B", "long"): Decoding(2, 7058, ((8, 475), (16, 827), (32, 1294), (63.8, 2079)), LEADERBOARD.format("gpqa")),
    ("32B", "short"): Decoding(
        2,
        634,
        ((8, 522), (16, 970), (31.9, 1706), (63.9, 2654), (127.8, 3905), (255.6, 5155)),
        LEADERBOARD.format("lm-arena-chat"),
    ),
}

TORCHTITAN = (
    "torchtitan (llama3_h100_202412_torchtitan.md among its benchmarks, table 3): Llama 3.1 8B, 128 H100 (96 GB HBM2e, "
    "500 W), FSDP and torch.compile, bfloat16, rows of 8,192 tokens"
)
TRAINING_TOKENS = Rate(6514, "tokens/s a GPU", "published", TORCHTITAN)
PEAK = Rate(989.4e12, "FLOP/s", "published", "NVIDIA's H100 SXM data sheet, bfloat16, without sparsity")
NETWORK = Rate(50e9, "B/s a GPU", "published", "one 400 Gb/s InfiniBand adapter a GPU, DGX H100 data sheet")
PCIE = Rate(53e9, "B/s a GPU", "assumed", "5/6 of the 64 GB/s of PCIe 5.0 x16, for copies between a card and its host")
STORAGE = Rate(
    8.0e9,
    "B/s a node",
    "assumed",
    "largest S3 throughput from a 100 Gb/s instance, for reads (github.com/dvassallo/s3-benchmark, 2019); taken for "
    "writes and for a parallel file system, too",
)
CHANGED = Rate(0.01, "share", "published", "16-bit weights that a step of lr 1e-6 changes: PULSE, arXiv 2602.03839")
DELTA_BYTES = Rate(4, "B a changed weight", "assumed", "two of the value, two of its place; zstd takes some of it away")

# Whole steps that others published, for comparison with the sum.
NEMO = "NVIDIA NeMo RL v0.4, docs/about/performance-summary.md: GRPO, on policy, DGX H100, bfloat16"


class PublishedStep(NamedTuple):
    """A published step in which training and generation use the same GPUs in turn."""

    model: str
    gpus: int
    responses: int
    mean_tokens: int
    seconds: float


NEMO_STEPS = (PublishedStep("8B", 16, 2048, 1060, 97.7), PublishedStep("32B", 32, 2048, 3206, 393.0))
