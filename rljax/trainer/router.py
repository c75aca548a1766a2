"""What the routers of a mixture of experts did with a micro-batch, and the loss that balances their experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rljax.mismatch import Statistics
from rljax.policy.layers import RoutingRecord


def router_statistics(routed: RoutingRecord, *, replayed: bool) -> Statistics:
    """Sums over the valid tokens, of ``RoutingRecord`` with leading [layers, b]; ``load`` of each layer and expert.

    ``replayed``: whether choices were given to it.
    """
    choices = routed.choices.shape[-1]
    sums: dict[str, Array] = {
        "load": jnp.sum(routed.load, axis=1),
        "entropy": jnp.sum(routed.entropy),
        "tokens": jnp.sum(routed.tokens),
        "wanted": jnp.sum(routed.tokens) * choices,
    }
    if replayed:
        sums |= {"given": jnp.sum(routed.given), "differing": jnp.sum(routed.differing)}
    return Statistics(sums)


def finalize_router(statistics: Statistics) -> dict[str, jax.Array]:
    """The row's metrics ``router/``."""
    load = statistics["load"].astype(jnp.float32)
    fair = jnp.maximum(jnp.mean(load, axis=1), 1e-30)
    arrived = jnp.sum(load) / jnp.maximum(statistics["wanted"], 1)
    row = {
        "load_max": jnp.max(jnp.max(load, axis=1) / fair),
        "load_min": jnp.min(jnp.min(load, axis=1) / fair),
        "entropy": statistics.mean("entropy", "tokens"),
        "dropped_fraction": jnp.where(statistics["wanted"] > 0, 1.0 - arrived, 0.0),
    }
    if "given" in statistics.sums:
        row["disagreement"] = statistics.mean("differing", "given")
    return row


def balance_loss(routed: RoutingRecord) -> Float[Array, ""]:
    """The load-balancing loss of a micro-batch: e times the sum over experts of their share of tokens and probability.

    It is 1 times k where all experts are used alike. Switch Transformers (arXiv 2101.03961), equations 4 to 6, with the
    tokens of all layers together, as transformers' ``load_balancing_loss_func``.
    """
    tokens = jnp.maximum(jnp.sum(routed.tokens), 1).astype(jnp.float32)
    share = jnp.sum(routed.load, axis=(0, 1)).astype(jnp.float32) / tokens
    probability = jnp.sum(routed.probability, axis=(0, 1)) / tokens
    return routed.load.shape[-1] * jnp.sum(share * probability)
