"""The values of the operations of this library's forward, on any mesh and at any shape of a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.compare.layers.operations import OperationValues, operations, stacked, value_shapes
from rljax.policy.config import AttentionName, PolicyOptions
from rljax.policy.families import blocks_of, read_config
from rljax.policy.head import all_logits, matmul_precision
from rljax.policy.hf import load_params
from rljax.policy.kernels import choose_kernels
from rljax.policy.model import cast_params, hidden_states, lm_head_table, param_shardings
from rljax.policy.score import segment_ends
from rljax.policy.taps import Substitutes, recording, tap
from rljax.sharding import MeshConfig, fetch, make_mesh

_MULTIPLE = 64  # the default width of a row is a multiple of this number of tokens


@dataclass(frozen=True)
class JaxForm:
    """The settings of a forward pass of this library: dtypes, attention, mesh and the shape of the batch."""

    dtype: str  # the dtype of weights and activations
    attention: AttentionName = "auto"  # the kernel of the attention
    head: str = ""  # the dtype of the operands of the LM head; "" for that of the weights
    logits: str = ""  # the dtype that the logits are rounded to; "" for none, as in the trainer
    fsdp: int = 1  # the size of the mesh's axis fsdp
    tp: int = 1  # the size of the mesh's axis tp
    rows: int = 1  # the number of rows of the batch; each holds the sequence
    width: int = 0  # the number of tokens of a row; 0 for the next multiple of 64


class JaxTracer:
    """The tracer (``Tracer``) of this library's forward pass, which is one compiled program, as in the trainer."""

    def __init__(self, directory: str | Path, form: JaxForm, label: str) -> None:
        """Loads the weights of a Hugging Face directory. ``label`` is the name for a reader.

        Raises:
          ValueError: The directory does not hold a model, or jax's devices do not support the form.
        """
        self.label, self.dtype, self._form = label, form.dtype, form
        self.config = read_config(directory)
        self._mesh = make_mesh(MeshConfig(fsdp=form.fsdp, tp=form.tp), jax.devices()[: form.fsdp * form.tp])
        options = PolicyOptions(attention=form.attention)
        self._kernels = choose_kernels(options, self.config, form.dtype, self._mesh)
        self._params = load_params(directory, self.config, param_shardings(self.config, self._mesh))
        self._forward = jax.jit(self._traced)

    def run(self, tokens: np.ndarray, given: Mapping[str, np.ndarray]) -> OperationValues:
        """Computes one sequence (``Tracer.run``). Raises ValueError if it is longer than ``JaxForm.width``."""
        width = self._form.width or -(-len(tokens) // _MULTIPLE) * _MULTIPLE
        if len(tokens) > width:
            raise ValueError(f"{self.label}: width must be at least the {len(tokens)} tokens of the sequence")
        row = np.zeros((self._form.rows, width), np.int32)
        row[:, : len(tokens)] = tokens
        segments = np.zeros_like(row)
        segments[:, : len(tokens)] = 1
        substitutes = self._given(row, given)
        with jax.set_mesh(self._mesh):
            found = fetch(self._forward(self._params, row, segments, substitutes))
        values = {}
        for operation in operations(self.config):
            name, index = stacked(operation, self.config)
            value = found[name][0] if index is None else found[name][index, 0]
            count = len(tokens) - (operation.kind == "logits")
            values[operation.name] = np.asarray(value[:count], np.float32).reshape(count, -1)
        return values

    def _traced(self, params: Any, tokens: jax.Array, segments: jax.Array, given: Substitutes) -> dict[str, jax.Array]:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        with recording(given) as recorded, jax.default_matmul_precision(matmul_precision(self.dtype)):
            cast = cast_params(params, self.dtype)
            hidden, _ = hidden_states(
                cast, self.config, tokens, segment_ends(segments), positions, kernels=self._kernels
            )
            logits = all_logits(hidden[0], lm_head_table(cast), self._form.head or None)[None]
            tap("logits", logits.astype(self._form.logits or logits.dtype))
        return recorded

    def _given(self, row: np.ndarray, given: Mapping[str, np.ndarray]) -> Substitutes:
        """Returns all values, with zeros for values not given, and their flags. So each call runs the same program."""
        shapes, blocks = value_shapes(self.config), len(blocks_of(self.config))
        values: dict[str, np.ndarray] = {}
        flags: dict[str, np.ndarray] = {}
        for operation in operations(self.config)[:-1]:  # the logits are last
            name, index = stacked(operation, self.config)
            layers = () if index is None else (self.config.num_layers // blocks,)
            if name not in values:
                features = math.prod(shapes[operation.name])
                values[name] = np.zeros((*layers, *row.shape, features), jnp.dtype(self.dtype))
                flags[name] = np.zeros(layers, bool)
            if operation.name in given:
                at = () if index is None else index
                value = given[operation.name]
                values[name][at][..., : len(value), :] = value
                flags[name][at] = True
        return Substitutes(*jax.tree.map(jnp.asarray, (values, flags)))
