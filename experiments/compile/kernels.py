"""Counts by formula the products of a gradient, and of custom calls, which the program's text does not show.

Attention: a product of one query with one key costs two operations for each element of a head. A forward pass makes two
products, and a backward pass five, or four and three if it has two kernels.

Grouped products of a mixture's experts: each of m rows [m, d] multiplies one of e matrices [e, d, f], or adds to one of
e outer products. These are 2 m d f operations. m counts all rows for which there is room.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from compile.count import Work
from compile.hlo import Computation, Instruction
from rljax.policy.config import PolicyConfig
from rljax.policy.families import FAMILIES
from rljax.policy.lora import OFF, LoraConfig, TrainedParams
from rljax.policy.model import abstract_params, logical_axes

# Patterns of a call's name or metadata, with the number of products for each pair; the first match counts.
_PRODUCTS = (
    (re.compile(r"__cudnn\$fmha\w*Backward"), 5),
    (re.compile(r"__cudnn\$fmha"), 2),
    (re.compile(r'"tpu_custom_call".*(splash|flash)\w*dkv'), 4),
    (re.compile(r'"tpu_custom_call".*(splash|flash)\w*dq'), 3),
    (re.compile(r'"tpu_custom_call".*(splash|flash)'), 2),
)
_GROUPED = re.compile(r'custom_call_target="mosaic_gpu\w*"|"tpu_custom_call".*(ragged|gmm)')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclass(frozen=True)
class KernelUse:
    """The executions of a custom call."""

    target: str  # the name of the call
    count: int  # the number of executions
    dtype: str  # the dtype of the operands; empty if the kernel is unknown
    flops: int | None  # the floating-point operations by formula; None if the kernel is unknown


def causal_pairs(segments: Sequence[int]) -> int:
    """Counts the (query, key) pairs of a row with segments of these lengths. A token sees itself and earlier tokens.

    >>> causal_pairs([3, 1])
    7
    """
    return sum(length * (length + 1) // 2 for length in segments)


def full_row(row_tokens: int, longest: int) -> list[int]:
    """Returns the lengths of the segments of a row that is filled with the longest sequences.

    >>> full_row(10, 4)
    [4, 4, 2]
    """
    whole, rest = divmod(row_tokens, min(longest, row_tokens))
    return [min(longest, row_tokens)] * whole + [rest] * (rest > 0)


def kernel_uses(work: Work, segments: Sequence[int]) -> list[KernelUse]:
    """Returns the custom calls of ``work``; calls of the same name and dtype are added up.

    ``segments`` are the lengths of the segments in every row, in tokens.
    """
    uses: dict[tuple[str, str], KernelUse] = {}
    for computation, call, times in work.kernels:
        target = _TARGET.search(call.attributes)
        name = target.group(1) if target else ""
        dtype, flops = _grouped_flops(computation, call) or _attention_flops(computation, call, segments) or ("", None)
        before = uses.get((name, dtype), KernelUse(name, 0, dtype, None if flops is None else 0))
        total = None if flops is None or before.flops is None else before.flops + flops * times
        uses[name, dtype] = KernelUse(name, before.count + times, dtype, total)
    return list(uses.values())


def _attention_flops(computation: Computation, call: Instruction, segments: Sequence[int]) -> tuple[str, int] | None:
    """Returns (dtype, operations) of one execution of an attention kernel; None for another call."""
    products = next((count for pattern, count in _PRODUCTS if pattern.search(call.attributes)), None)
    arrays = itertools.chain(*computation.operand_arrays(call))
    # The query is the first operand with dimensions for rows or heads, tokens and a head's width.
    query = next((array for array in arrays if "float" in array.dtype and len(array.dims) >= 3), None)
    if query is None or products is None:
        return None
    return query.dtype, 2 * products * causal_pairs(segments) * math.prod(query.dims) // sum(segments)


def _grouped_flops(computation: Computation, call: Instruction) -> tuple[str, int] | None:
    """Returns (dtype, operations) of one execution of a grouped product's kernel; None for another call."""
    if not _GROUPED.search(call.attributes):
        return None
    operands = [array for operand in computation.operand_arrays(call) for array in operand if "float" in array.dtype]
    results = [array for array in call.arrays if "float" in array.dtype]
    stacks = [array for array in (*operands, *results) if len(array.dims) == 3]
    rows = [array for array in operands if len(array.dims) == 2]
    if not stacks or not rows:
        return None
    return rows[0].dtype, 2 * rows[0].dims[0] * math.prod(stacks[0].dims[1:])


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
        targets = TrainedParams(policy, lora).targets(abstract_params(policy))
        trained = sum(leaf.size for leaf in jax.tree.leaves(targets))
    of_layer = 4 * causal_pairs(segments) * policy.num_heads * policy.head_dim  # two products of a forward pass
    kinds = FAMILIES[policy.family].layer_types(policy.num_layers)
    of_state = 6 * policy.delta_value_heads * policy.delta_key_dim * policy.delta_value_dim * sum(segments)
    attention = 3 * (kinds.count("full_attention") * of_layer + kinds.count("linear_attention") * of_state)
    return rows * ((4 * multiplying + 2 * trained) * sum(segments) + attention)
