"""Qwen3-MoE: dense Qwen3 whose MLP is a router and experts, of which each token goes to k; no shared expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from rljax.policy.config import PolicyConfig
from rljax.policy.experts import experts
from rljax.policy.family import COMMON_FIXED, Family
from rljax.policy.layers import Attention, Block, Routed, Routing, param


@jax.custom_vjp
def router_logits(x: Float[Array, "b t d"], weight: Float[Array, "d e"]) -> Float[Array, "b t e"]:
    """Float32 logits, not rounded to the dtype of the operands; the backward products have operands of that dtype."""
    return jnp.einsum("btd,de->bte", x, weight, preferred_element_type=jnp.float32)


def _forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return router_logits(x, weight), (x, weight)


def _backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, weight = saved
    cotangent = cotangent.astype(x.dtype)
    d_x = jnp.einsum("bte,de->btd", cotangent, weight, preferred_element_type=jnp.float32)
    d_weight = jnp.einsum("btd,bte->de", x, cotangent, preferred_element_type=jnp.float32)
    return d_x.astype(x.dtype), d_weight.astype(weight.dtype)


router_logits.defvjp(_forward, _backward)


class Experts(nnx.Module):
    """A router in float32 and e SwiGLUs."""

    def __init__(self, c: PolicyConfig, rngs: nnx.Rngs):
        normal = jax.nn.initializers.normal(c.initializer_range)
        d, e, f = c.hidden_size, c.num_experts, c.expert_size
        into, back = ("experts", "expert_embed", "mlp"), ("experts", "mlp", "expert_embed")
        self.k, self.normalize = c.experts_per_token, c.normalize_gates
        self.router = param(rngs, (d, e), ("embed", "router"), normal, "mlp.gate.weight", 1)
        self.gate = param(rngs, (e, d, f), into, normal, "mlp.experts.{}.gate_proj.weight", 1)
        self.up = param(rngs, (e, d, f), into, normal, "mlp.experts.{}.up_proj.weight", 1)
        self.down = param(rngs, (e, f, d), back, normal, "mlp.experts.{}.down_proj.weight", 1)

    def __call__(self, x: Float[Array, "b t d"], routing: Routing) -> tuple[Array, Array, Routed]:
        """``x`` -> (the same shape and dtype, largest absolute values inside [b, 1, f], what the router did)."""
        probabilities = jax.nn.softmax(router_logits(x, self.router[...]), axis=-1)
        gates, own = jax.lax.top_k(probabilities, self.k)
        choices = own
        if routing.choices is not None:
            choices = jnp.where(routing.choices < 0, own, routing.choices)
            gates = jnp.take_along_axis(probabilities, choices, axis=-1)
        if self.normalize:
            gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
        weights = (self.gate[...], self.up[...], self.down[...])
        out, inside = experts(routing.grouped, x, choices, gates, weights)
        return out, inside[:, None], _routed(probabilities, own, choices, routing)


def _routed(probabilities: Array, own: Array, choices: Array, routing: Routing) -> Routed:
    valid = jnp.ones(choices.shape[:2], bool) if routing.valid is None else routing.valid
    chosen = choices[..., None] == jnp.arange(probabilities.shape[-1])[None, None, None]
    logarithms = jnp.log(jnp.maximum(probabilities, jnp.finfo(jnp.float32).tiny))
    of_token = -jnp.sum(probabilities * logarithms, axis=-1)
    given = jnp.zeros(choices.shape, bool) if routing.choices is None else routing.choices >= 0
    given &= valid[..., None]
    agrees = jnp.any(choices[..., None] == own[..., None, :], axis=-1)
    return Routed(
        choices=choices,
        tokens=jnp.sum(valid, axis=1, dtype=jnp.int32),
        load=jnp.sum(chosen & valid[..., None, None], axis=(1, 2), dtype=jnp.int32),
        probability=jnp.sum(jnp.where(valid[..., None], probabilities, 0.0), axis=1),
        entropy=jax.lax.stop_gradient(jnp.sum(jnp.where(valid, of_token, 0.0), axis=1)),
        given=jnp.sum(given, axis=(1, 2), dtype=jnp.int32),
        differing=jnp.sum(given & ~agrees, axis=(1, 2), dtype=jnp.int32),
    )


def _block(c: PolicyConfig, rngs: nnx.Rngs) -> Block:
    return Block(c, rngs, Attention(c, rngs, norms=True), Experts(c, rngs))


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    block=_block,
    fixed={**COMMON_FIXED, "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    defaults={
        "num_kv_heads": 4,
        "num_experts": 128,
        "experts_per_token": 8,
        "expert_size": 768,
        "normalize_gates": False,
    },
    fields={
        "num_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_size": "moe_intermediate_size",
        "normalize_gates": "norm_topk_prob",
    },
    aliases={"num_experts": "num_local_experts"},
)
