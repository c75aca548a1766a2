"""Statistics of the routers of a mixture of experts, and the loss that balances their experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rljax.mismatch import Statistics
from rljax.policy.config import PolicyConfig, route_dtype
from rljax.policy.layers import RoutingRecord
from rljax.trainer.packing import PackedBatch


def router_statistics(routed: RoutingRecord, *, replayed: bool) -> Statistics:
    """Adds up the routing of a micro-batch over its valid tokens; ``load`` is one sum for each layer and expert.

    ``routed`` has leading axes [layers, b]. ``replayed`` says whether the choices of the routers were replayed.
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
    """Returns the metrics ``router/`` of the row, by their names without the prefix."""
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
    """Returns the expert choices [b, t, layers, k] of a micro-batch with routes for ``hidden_states``, or None."""
    if micro.routes is None:
        return None
    choices = micro.routes.astype(jnp.int32) - 1
    return choices.reshape(*choices.shape[:2], config.num_layers, config.experts_per_token)


def routes_of(routed: RoutingRecord, config: PolicyConfig) -> jax.Array:
    """Returns the choices that a forward made, as ``PackedBatch.routes`` [b, t, l * k]."""
    choices = jnp.moveaxis(routed.choices, 0, 2)
    return (choices + 1).astype(route_dtype(config.num_experts)).reshape(*choices.shape[:2], -1)
