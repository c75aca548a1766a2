"""The measurements of a step besides the gradient: the mismatch of its tokens and its causes, and a mixture's routers.

Each micro-batch gives statistics, and these are merged. The split into micro-batches, the packing and the sharding
therefore change no value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rljax.errors import check_at_least
from rljax.mismatch import Statistics, diagnosis, mismatch_statistics, read_tokens
from rljax.mismatch.correction import finalize_importance, importance_statistics
from rljax.mismatch.metrics import finalize_mismatch
from rljax.policy.config import PolicyConfig, route_dtype
from rljax.policy.layers import RoutingRecord
from rljax.trainer.packing import PackedBatch

Cause = Literal["shape", "mesh", "remat"]
"""The difference between two programs of the trainer that are compared."""
STALENESS_EDGES = (1, 2, 3)
"""The least staleness (policy versions) in each bucket of ``mismatch_staleness/`` after the first, which has 0."""
HISTOGRAM = "mismatch/logprob_abs_diff"
"""The name of the histogram among the metrics of a step. ``rljax.mismatch.metrics.bin_edges`` gives its bins."""


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
    takes a forward under the policy that sampled them. 0: none; then only ``correction.part`` keeps older policies."""

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
        "mismatch_position": diagnosis.mismatch_by(read, read.sequences.position, config.position_edges),
        "mismatch_entropy": diagnosis.mismatch_by(read, scores.entropy, diagnosis.ENTROPY_EDGES),
        "mismatch_staleness": diagnosis.mismatch_by(read, micro.staleness, STALENESS_EDGES),
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
    labels = {
        "mismatch_position": diagnosis.bucket_labels(config.position_edges),
        "mismatch_entropy": diagnosis.bucket_labels(diagnosis.ENTROPY_EDGES),
        "mismatch_staleness": ("0", *diagnosis.count_labels(STALENESS_EDGES[1:])),
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


def router_statistics(routed: RoutingRecord, *, replayed: bool) -> Statistics:
    """Adds up the routing of a micro-batch over its valid tokens; ``load`` is one sum for each layer and expert.

    ``routed`` has leading axes [layers, b]. ``replayed`` says whether the choices of the routers were replayed.
    """
    sums: dict[str, Array] = {
        "load": jnp.sum(routed.load, axis=1),
        "entropy": jnp.sum(routed.entropy),
        "tokens": jnp.sum(routed.tokens, dtype=jnp.float32),
        "dropped": jnp.sum(routed.tokens) * routed.choices.shape[-1] - jnp.sum(routed.load),  # right modulo 2^32
    }
    if replayed:
        sums |= {name: jnp.sum(getattr(routed, name), dtype=jnp.float32) for name in ("given", "differing")}
    return Statistics(sums)


def finalize_router(statistics: Statistics) -> dict[str, jax.Array]:
    """Returns the metrics ``router/`` of the row, by their names without the prefix."""
    load = statistics["load"].astype(jnp.float32)
    fair = jnp.maximum(jnp.mean(load, axis=1), 1e-30)
    arrived, dropped = jnp.sum(load), statistics["dropped"].astype(jnp.float32)
    row = {
        "load_max": jnp.max(jnp.max(load, axis=1) / fair),
        "load_min": jnp.min(jnp.min(load, axis=1) / fair),
        "entropy": statistics.mean("entropy", "tokens"),
        "dropped_fraction": dropped / jnp.maximum(arrived + dropped, 1.0),
    }
    if "given" in statistics.sums:
        row["disagreement"] = statistics.mean("differing", "given")
    return row


def balance_loss(routed: RoutingRecord) -> Float[Array, ""]:
    """Computes the load-balancing loss: e times the sum over experts of the token share times the mean probability.

    With e experts and k choices per token, it is k if all experts are used equally. Source: Switch Transformers
    (arXiv 2101.03961), equations 4 to 6. The tokens of all layers count together, as in ``load_balancing_loss_func`` of
    transformers.
    """
    tokens = jnp.maximum(jnp.sum(routed.tokens), 1).astype(jnp.float32)
    share = jnp.sum(routed.load, axis=(0, 1)).astype(jnp.float32) / tokens
    probability = jnp.sum(routed.probability, axis=(0, 1)) / tokens
    return routed.load.shape[-1] * jnp.sum(share * probability)


def replayed_choices(micro: PackedBatch, config: PolicyConfig) -> jax.Array | None:
    """Returns ``micro.routes`` as ``choices`` of ``hidden_states``, [b, t, layers, k]; None if there are no routes."""
    if micro.routes is None:
        return None
    choices = micro.routes.astype(jnp.int32) - 1
    return choices.reshape(*choices.shape[:2], config.num_layers, config.experts_per_token)


def routes_of(routed: RoutingRecord, config: PolicyConfig) -> jax.Array:
    """Returns the choices that a forward made, as ``PackedBatch.routes`` [b, t, l * k]."""
    choices = jnp.moveaxis(routed.choices, 0, 2)
    return (choices + 1).astype(route_dtype(config.num_experts)).reshape(*choices.shape[:2], -1)
