"""What a vLLM model's parameters hold, by Hugging Face names: fused tensors apart, without padding, as they stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from rljax.weights.format import Checksum
from rljax.weights.sums import as_published, tensor_checksum

EXPERT_PARTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
"""Parameter of a mixture's experts -> what it holds of each expert."""


class ParameterSums:
    """The checksums of a model's parameters, as they stand when they are asked for."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """``dtype``: that is published."""
        self._dtype = dtype
        self._names = {layer: name for name, layer in model.named_modules()}
        self._fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})

    def of_layer(self, layer: torch.nn.Module) -> dict[str, Checksum]:
        """Those of a layer's own parameters; of one fused tensor one by one, without padding rows."""
        return {
            tensor: tensor_checksum(as_published(part, self._dtype))
            for name, parameter in layer.named_parameters(recurse=False)
            for tensor, part in self._parts(layer, name, parameter)
        }

    def of_model(self) -> dict[str, Checksum]:
        """Those of all layers; a parameter that several share has the names of each."""
        return {name: sums for layer in self._names for name, sums in self.of_layer(layer).items()}

    def names_of_layer(self, layer: torch.nn.Module) -> list[str]:
        """The names alone."""
        return [name for own, _ in layer.named_parameters(recurse=False) for name in self._tensor_names(layer, own)]

    def _parts(self, layer: torch.nn.Module, name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """What of the Hugging Face tensors one parameter holds, by their names, without padding."""
        names = self._tensor_names(layer, name)
        if name in EXPERT_PARTS:
            yield from zip(names, expert_parts(layer, name, parameter), strict=True)
            return
        rows = getattr(layer, "shard_indices", None)  # of a vocabulary
        whole = parameter if rows is None else parameter[: rows.num_org_elements]
        parts = whole.split(layer.output_partition_sizes) if len(names) > 1 else [whole]
        yield from zip(names, parts, strict=True)

    def _tensor_names(self, layer: torch.nn.Module, parameter: str) -> list[str]:
        """The Hugging Face names of what one parameter holds: of qkv_proj three, of most layers one."""
        if parameter in EXPERT_PARTS:
            path = self._names[layer]
            above = path[: path.rindex(".experts")]
            parts = EXPERT_PARTS[parameter]
            return [f"{above}.experts.{expert}.{part}.weight" for expert, _ in held_experts(layer) for part in parts]
        above, dot, last = self._names[layer].rpartition(".")
        return [f"{above}{dot}{part}.{parameter}" for part in self._fused.get(last, [last])]


def held_experts(layer: Any) -> Iterator[tuple[int, int]]:
    """(number of an expert, its place in the parameters) of each that this worker has of a mixture."""
    for expert in range(layer.global_num_experts):
        local = layer._map_global_expert_id_to_local_expert_id(expert)
        if local >= 0:
            yield expert, local


def expert_parts(layer: Any, name: str, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors of each expert that a parameter of a mixture holds, those of ``EXPERT_PARTS`` in their order.

    ``w13_weight`` [e, 2 f, d] has gate and up of the experts that this worker has, ``w2_weight`` [e, d, f] has down;
    under tensor parallelism of each a part of f. vLLM may have rounded d and f up.
    """
    sizes = layer.moe_config
    d, f = sizes.hidden_dim_unpadded, sizes.intermediate_size_per_partition_unpadded
    for _, local in held_experts(layer):
        if name == "w2_weight":
            yield parameter[local][:d, :f]
        else:
            gate, up = parameter[local].chunk(2)
            yield from (gate[:f, :d], up[:f, :d])
