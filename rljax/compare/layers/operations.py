"""The operations of a decoder, in order and by name, and the values that they compute for one sequence.

The name of an operation in a block is ``LAYER/OPERATION``, such as ``17/attention``. An operation takes the values of
earlier operations, and only those. If each value of a scorer is replaced by the reference's value, all its operations
get the reference's inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rljax.policy.config import PolicyConfig
from rljax.policy.families import blocks_of
from rljax.policy.model import abstract_params, hidden_states
from rljax.policy.taps import recording, stack_paths

OperationValues = dict[str, np.ndarray]
"""The value of each operation for one sequence, float32 [t, n]. The logits lack the last row: no token follows it."""

IN_BLOCK = {
    "attention_norm": "norm before attention",
    "query": "query projection",
    "key": "key projection",
    "value": "value projection",
    "query_norm": "query norm",
    "key_norm": "key norm",
    "query_rope": "rotation of queries",
    "key_rope": "rotation of keys",
    "attention": "attention",
    "gated_attention": "attention times its gate",
    "delta_qkv": "joint projection of a delta net",
    "delta_gate": "gate projection of a delta net",
    "delta_rate": "rate projection of a delta net",
    "delta_step": "step projection of a delta net",
    "convolution": "short convolution",
    "delta_rule": "delta rule",
    "gated_norm": "norm of the delta rule, times its gate",
    "attention_output": "output projection",
    "attention_residual": "residual stream after attention",
    "mlp_norm": "norm before the MLP",
    "gate": "gate projection",
    "up": "up projection",
    "activation": "product of gate and up",
    "mlp": "down projection",
    "residual": "residual stream after the MLP",
}
"""The operations of blocks, in order, with names for a reader. Each value that a block records is of one of them."""
OUTSIDE = {"embedding": "embedding", "final_norm": "final norm", "logits": "logits"}
"""The operations outside of the blocks. The first comes before the blocks."""
PRODUCTS = (
    *("query", "key", "value", "delta_qkv", "delta_gate", "delta_rate", "delta_step"),
    *("attention_output", "gate", "up", "mlp"),
)
"""The operations of a block that multiply by a matrix of weights."""


@dataclass(frozen=True)
class Operation:
    """One operation of a decoder, such as the attention of a block."""

    kind: str  # a key of IN_BLOCK or of OUTSIDE
    layer: int | None = None  # the number of its block, from 0; None outside of the blocks

    @property
    def name(self) -> str:
        """The name of the operation and of its value, such as ``17/attention``."""
        return self.kind if self.layer is None else f"{self.layer}/{self.kind}"

    @property
    def label(self) -> str:
        """The name for a reader, such as ``layer 17, attention``."""
        return OUTSIDE[self.kind] if self.layer is None else f"layer {self.layer}, {IN_BLOCK[self.kind]}"


def operations(config: PolicyConfig) -> list[Operation]:
    """Returns the operations of a policy, in order. A mixture's router and experts are one operation, ``mlp``.

    Raises KeyError if the policy records a value (``tap``) that neither ``IN_BLOCK`` nor ``OUTSIDE`` names.
    """
    taps = _taps(config)
    if unnamed := {tap.rpartition("/")[2] for tap in taps} - {*IN_BLOCK, *OUTSIDE}:
        raise KeyError(f"IN_BLOCK must name the taps {', '.join(sorted(unnamed))}")
    every = (Operation(kind, layer) for layer in range(config.num_layers) for kind in IN_BLOCK)
    in_blocks = [operation for operation in every if stacked(operation, config)[0] in taps]
    return [Operation("embedding"), *in_blocks, Operation("final_norm"), Operation("logits")]


@functools.lru_cache(maxsize=32)
def _taps(config: PolicyConfig) -> dict[str, Any]:
    """Returns the shape of each value that a forward of 64 tokens records, by the name that ``stacked`` gives it."""

    def recorded(params: Any) -> dict[str, Any]:
        row = jnp.ones((1, 64), jnp.int32)
        with recording() as values:
            hidden_states(params, config, row, row, row)
        return values

    shapes: dict[str, Any] = jax.eval_shape(recorded, abstract_params(config))
    return shapes


@functools.lru_cache(maxsize=32)
def value_shapes(config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of one token's value of each operation, by name: (features,), or (heads, features of a head).

    The query of a gated attention has the features of its gate, too.
    """
    shapes: dict[str, tuple[int, ...]] = {"logits": (config.vocab_size,)}
    for operation in operations(config)[:-1]:
        name, index = stacked(operation, config)
        shapes[operation.name] = _taps(config)[name].shape[2 if index is None else 3 :]
    return shapes


class Tracer(Protocol):
    """The interface of a scorer that shows the values of its operations."""

    label: str  # the name for a reader, such as ``jax:bfloat16``
    dtype: str  # the dtype of weights and activations; "" if it is unknown
    config: PolicyConfig  # the policy

    def run(self, tokens: np.ndarray, given: Mapping[str, np.ndarray]) -> OperationValues:
        """Computes one sequence, int32 [t]. Returns the value of each operation that the scorer shows.

        Operations named in ``given`` pass on the given values instead of the computed ones. An engine may compute
        several operations in one kernel. It then shows the last one only.
        """


def stacked(operation: Operation, config: PolicyConfig) -> tuple[str, int | None]:
    """Returns the name of an operation's value in what a forward records, and its index in that stack of blocks."""
    if operation.layer is None:
        return operation.kind, None
    stacks = stack_paths(len(blocks_of(config)))
    index, stack = divmod(operation.layer, len(stacks))
    return "/".join((*stacks[stack], operation.kind)), index


def logprobs(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Computes the log-probabilities of tokens [1:] from logits [t - 1, v], float64 [t - 1] (nats)."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    picked = np.take_along_axis(wide, tokens[1:, None].astype(np.int64), axis=-1)[:, 0]
    result: np.ndarray = picked - np.log(np.exp(wide).sum(axis=-1))
    return result
