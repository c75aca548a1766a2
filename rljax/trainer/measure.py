"""The measurements of a step besides the gradient: the mismatch of its tokens, and its causes.

Each micro-batch gives statistics, and these are merged. The split into micro-batches, the packing and the sharding
therefore change no value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from rljax.errors import check_at_least
from rljax.mismatch import Statistics, diagnosis, mismatch_statistics, read_tokens
from rljax.mismatch.correction import finalize_importance, importance_statistics
from rljax.mismatch.metrics import finalize_mismatch
from rljax.trainer.packing import PackedBatch
from rljax.trainer.router import finalize_router, router_statistics

Cause = Literal["shape", "mesh", "remat"]
"""The difference between two programs of the trainer that are compared."""
STALENESS_BUCKETS = 4
"""The number of buckets of ``mismatch_staleness/``: 0, 1, ... policy versions behind. The last one has no upper end."""
HISTOGRAM = "mismatch/logprob_abs_diff"
"""The name of the histogram among the metrics of a step. ``rljax.mismatch.histogram.bin_edges`` gives its bins."""


@dataclass(frozen=True)
class DiagnosisConfig:
    """The settings of the mismatch metrics."""

    position_edges: tuple[int, ...] = diagnosis.POSITION_EDGES
    """Positions in the response (tokens, from 1) at which a new bucket of ``mismatch_position/`` begins."""
    is_threshold: float = 2.0
    """Threshold C of ``is/``: the fractions of the ratios above C and below 1 / C are recorded. At least 1."""
    grad_noise_every: int = 10
    """Steps between measurements of ``optimizer/grad_noise``. 0: never."""
    free_routing_every: int = 10
    """Steps between measurements of ``mismatch_free_routing/``, the mismatch without the routes that
    ``rollout.router_replay: r3`` replays. Each measurement takes one more forward. 0: never."""
    self_every: int = 0
    """Steps between measurements of ``mismatch_self/``, the mismatch of the trainer with itself: the same tokens in
    other programs of the same function. The first measurement compiles them. 0: never. One program has micro-batches
    of half as many rows, each twice as long. One splits the same devices otherwise over ``mesh.fsdp`` and ``mesh.tp``;
    it is absent where both are 1. One has another choice of ``precision.remat``: blocks, or dots instead of blocks and
    offload, which takes more memory. Each takes a forward of 64 responses, and the last one also a backward."""
    behaviour_responses: int = 64
    """Number of responses of a step whose mismatch is split into numerics and drift, if their rollouts are stale. This
    takes a forward under the policy that sampled them. 0: none, and no copies of older policies are kept."""

    def __post_init__(self) -> None:
        diagnosis.check_edges("position_edges", self.position_edges)
        check_at_least(self, 1, "is_threshold")
        check_at_least(self, 0, "grad_noise_every", "free_routing_every", "behaviour_responses", "self_every")


def measure(
    scores: Any, micro: PackedBatch, num_sequences: int, config: DiagnosisConfig | None
) -> dict[str, Statistics]:
    """Computes the statistics of a micro-batch [b, t] of a batch of ``num_sequences``, by the name of their group.

    ``scores`` are the ``logprobs`` and ``entropy`` [b, t] and the ``stats`` of the trainer's forward. If ``config`` is
    None, only the forward is measured.
    """
    entropy = jnp.sum(jnp.where(micro.response_mask, scores.entropy, 0.0))
    tokens = jnp.sum(micro.response_mask, dtype=jnp.int32)
    largest = {"activation_max": scores.stats.activation_max}
    forward = {"forward": Statistics({"entropy": entropy, "tokens": tokens}, largest)}
    if scores.stats.router is not None:
        forward["router"] = router_statistics(scores.stats.router, replayed=micro.routes is not None)
    if config is None:
        return forward
    where = {"sequence_ids": micro.sequence_ids, "num_sequences": num_sequences}
    read = read_tokens(scores.logprobs, micro.rollout_logprobs, micro.response_mask, **where)
    return forward | {
        "mismatch": mismatch_statistics(read, scores.entropy),
        "is": importance_statistics(read, config.is_threshold),
        "mismatch_position": diagnosis.mismatch_by_position(read, config.position_edges),
        "mismatch_entropy": diagnosis.mismatch_by_entropy(read, scores.entropy, diagnosis.ENTROPY_EDGES),
        "mismatch_staleness": diagnosis.mismatch_by_staleness(read, micro.staleness, STALENESS_BUCKETS),
        "mismatch_sign": diagnosis.sign_skew(read, micro.advantages),
    }


def finalize_measured(measured: dict[str, Statistics], config: DiagnosisConfig | None) -> dict[str, jax.Array]:
    """Returns the metrics of a row, scalars by name, and under ``HISTOGRAM`` the counts of abs(log_ratio) [bins]."""
    forward = measured["forward"]
    row = {"policy/entropy": forward.mean("entropy", "tokens"), "precision/activation_max": forward["activation_max"]}
    if "router" in measured:
        row |= {f"router/{name}": value for name, value in finalize_router(measured["router"]).items()}
    if config is None:
        return row
    staleness = [*map(str, range(STALENESS_BUCKETS - 1)), f"ge_{STALENESS_BUCKETS - 1}"]
    labels = {
        "mismatch_position": diagnosis.bucket_labels(config.position_edges),
        "mismatch_entropy": diagnosis.bucket_labels(diagnosis.ENTROPY_EDGES),
        "mismatch_staleness": staleness,
    }
    groups = {
        "mismatch": finalize_mismatch(measured["mismatch"]),
        "is": finalize_importance(measured["is"]),
        "mismatch_sign": diagnosis.finalize_sign_skew(measured["mismatch_sign"]),
        **{group: diagnosis.finalize_buckets(measured[group], names) for group, names in labels.items()},
    }
    row |= {f"{group}/{name}": value for group, names in groups.items() for name, value in names.items()}
    return row | {HISTOGRAM: measured["mismatch"]["histogram"]}


def without_empty_buckets(row: dict[str, Any]) -> dict[str, Any]:
    """Removes the metrics of buckets without a token from a row, because their zeros would look like agreement."""
    bucketed, count = ("mismatch_position/", "mismatch_entropy/", "mismatch_staleness/"), "/token_count"
    counts = {key: value for key, value in row.items() if key.startswith(bucketed) and key.endswith(count)}
    empty = tuple(key.removesuffix("token_count") for key, value in counts.items() if not value)
    return {key: value for key, value in row.items() if not key.startswith(empty)}
