"""Counts by formula the floating-point operations of a training step; a multiply-add is two."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from rljax.policy.config import PolicyConfig
from rljax.policy.families import FAMILIES
from rljax.policy.lora import OFF, LoraConfig, targets_of
from rljax.policy.model import abstract_params, logical_axes


def causal_pairs(segments: Sequence[int]) -> int:
    """Counts the (query, key) pairs of a row with segments of these lengths. A token sees itself and earlier tokens.

    >>> causal_pairs([3, 1])
    7
    """
    return sum(length * (length + 1) // 2 for length in segments)


def model_flops(policy: PolicyConfig, rows: int, segments: list[int], lora: LoraConfig = OFF) -> int:
    """Counts the operations that a micro-batch's gradient needs on all devices, without recomputation.

    Each token needs six operations for each parameter that it uses; an untied embedding table does not multiply, and of
    a mixture's experts only ``experts_per_token`` do. A frozen parameter without adapters needs four. Attention is
    causal inside each segment: each pair of a query and a key needs 12 operations for each layer and each element of
    the query heads. A delta net has three products of each token with the state of each head. ``segments`` are lengths
    in tokens.
    """
    multiplying = 0 if policy.tie_word_embeddings else -policy.vocab_size * policy.hidden_size
    axes_of_leaves = jax.tree.leaves(logical_axes(policy), is_leaf=lambda node: isinstance(node, tuple))
    for leaf, axes in zip(jax.tree.leaves(abstract_params(policy)), axes_of_leaves, strict=True):
        multiplying += leaf.size * policy.experts_per_token // policy.num_experts if "experts" in axes else leaf.size
    trained = multiplying
    if lora.rank:
        trained = sum(leaf.size for leaf in jax.tree.leaves(targets_of(abstract_params(policy), policy, lora)))
    of_layer = 4 * causal_pairs(segments) * policy.num_heads * policy.head_dim  # two products of a forward pass
    kinds = FAMILIES[policy.family].layer_types(policy.num_layers)
    of_state = 6 * policy.delta_value_heads * policy.delta_key_dim * policy.delta_value_dim * sum(segments)
    attention = 3 * (kinds.count("full_attention") * of_layer + kinds.count("linear_attention") * of_state)
    return rows * ((4 * multiplying + 2 * trained) * sum(segments) + attention)
