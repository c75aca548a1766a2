"""The parameters of a vLLM model by Hugging Face name: their checksums as they stand, and writing what changed.

Fused tensors are taken apart, and padding is left out.

What changed is written by vLLM's own ``load_checkpoint_weight_patches``, which goes through the model's loader. So
names, fused tensors and tensor parallelism are vLLM's matter. It packs nothing, and is right only where a layer
computes with the parameters that it loaded. Whether it does is not assumed for a kind of layer but compared: the
checksums of all parameters after a load, with those before packing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from rljax.weights.delta import KeptDelta
from rljax.weights.format import Checksum
from rljax.weights.sums import as_published, tensor_checksum

EXPERT_PARTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
"""The Hugging Face tensors of each expert, by the parameter of a mixture that holds them."""


class ParameterSums:
    """The checksums of a model's parameters, as they stand when they are asked for."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """Reads the names. ``dtype``: The dtype that is published."""
        self._dtype = dtype
        self._names = {layer: name for name, layer in model.named_modules()}
        self._fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})

    def of_layer(self, layer: torch.nn.Module) -> dict[str, Checksum]:
        """Returns the checksums of a layer's own parameters, those of a fused tensor one by one."""
        return {
            tensor: tensor_checksum(as_published(part, self._dtype))
            for name, parameter in layer.named_parameters(recurse=False)
            for tensor, part in self._parts(layer, name, parameter)
        }

    def of_model(self) -> dict[str, Checksum]:
        """Returns the checksums of all layers. A parameter that several layers share has the names of each."""
        return {name: sums for layer in self._names for name, sums in self.of_layer(layer).items()}

    def names_of_layer(self, layer: torch.nn.Module) -> list[str]:
        """Returns the Hugging Face names of a layer's own parameters."""
        return [name for own, _ in layer.named_parameters(recurse=False) for name in self._tensor_names(layer, own)]

    def _parts(self, layer: torch.nn.Module, name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (Hugging Face name, its part) of one parameter, without padding."""
        names = self._tensor_names(layer, name)
        if name in EXPERT_PARTS:
            yield from zip(names, expert_parts(layer, name, parameter), strict=True)
            return
        rows = getattr(layer, "shard_indices", None)  # of a vocabulary
        whole = parameter if rows is None else parameter[: rows.num_org_elements]
        parts = whole.split(layer.output_partition_sizes) if len(names) > 1 else [whole]
        yield from zip(names, parts, strict=True)

    def _tensor_names(self, layer: torch.nn.Module, parameter: str) -> list[str]:
        """Returns the Hugging Face names of the tensors in one parameter: three for qkv_proj, one for most layers."""
        if parameter in EXPERT_PARTS:
            path = self._names[layer]
            above = path[: path.rindex(".experts")]
            parts = EXPERT_PARTS[parameter]
            return [f"{above}.experts.{expert}.{part}.weight" for expert, _ in own_experts(layer) for part in parts]
        above, dot, last = self._names[layer].rpartition(".")
        return [f"{above}{dot}{part}.{parameter}" for part in self._fused.get(last, [last])]


def own_experts(layer: Any) -> Iterator[tuple[int, int]]:
    """Yields (number of an expert, its place in the parameters) for each expert of a mixture on this worker."""
    for expert in range(layer.global_num_experts):
        local = layer._map_global_expert_id_to_local_expert_id(expert)
        if local >= 0:
            yield expert, local


def expert_parts(layer: Any, name: str, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensors of each expert in a parameter of a mixture, in the order of ``EXPERT_PARTS``.

    ``w13_weight`` [e, 2 f, d] holds gate and up of the experts on this worker, and ``w2_weight`` [e, d, f] holds down.
    Under tensor parallelism each holds a part of f. vLLM may have rounded d and f up.
    """
    sizes = layer.moe_config
    d, f = sizes.hidden_dim_unpadded, sizes.intermediate_size_per_partition_unpadded
    for _, local in own_experts(layer):
        if name == "w2_weight":
            yield parameter[local][:d, :f]
        else:
            gate, up = parameter[local].chunk(2)
            yield from (gate[:f, :d], up[:f, :d])


class PatchedWeights:
    """The checksum of every parameter as it stands after the changed elements were written.

    Attributes:
      tag: The tag of the version.
      tensors: The checksum of each tensor, by Hugging Face name.
      seconds: The time that the checksums took (seconds).
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """Takes no checksum yet. ``dtype``: The dtype that is published."""
        self._sums = ParameterSums(model, dtype)
        self.tag = ""
        self.tensors: Mapping[str, Checksum | None] = {}
        self.seconds = 0.0

    def finish(self) -> None:
        """Takes the checksums."""
        began = time.monotonic()
        self.tensors = self._sums.of_model()
        self.seconds = time.monotonic() - began


def stands_as_loaded(model: torch.nn.Module, dtype: torch.dtype, loaded: Mapping[str, Checksum | None]) -> bool:
    """Returns whether the model computes with its parameters, and these have the checksums ``loaded``, by name.

    A tensor without a checksum was not loaded: it is a tied head, whose parameter is the embedding's.
    """
    methods = (getattr(layer, "quant_method", None) for layer in model.modules())
    if not all(_computes_with_parameters(method) for method in methods if isinstance(method, QuantizeMethodBase)):
        return False
    try:
        standing = ParameterSums(model, dtype).of_model()
    except (RuntimeError, IndexError, ValueError):  # packing has left another shape, or nothing
        return False
    return all(standing.get(name) == sums for name, sums in loaded.items() if sums is not None)


def _computes_with_parameters(method: QuantizeMethodBase) -> bool:
    """Returns whether a layer's method quantizes nothing, so that the layer keeps no second copy of its parameters."""
    return type(method).__name__.startswith("Unquantized")


def write_in_place(model: torch.nn.Module, delta: KeptDelta) -> None:
    """Writes what a delta changes into the parameters, which hold the version that the delta is made from.

    Raises:
      Exception: The model's loader cannot do it, or a new value is NaN. Some parameters may be changed already.
    """
    # Not in every vLLM that the plugin works with.
    from vllm.model_executor.model_loader.checkpoint_weight_patch import load_checkpoint_weight_patches

    for patch in _patches(model, delta):
        load_checkpoint_weight_patches(model, [patch], validate_unique_indices=False)


def _patches(model: torch.nn.Module, delta: KeptDelta) -> Iterator[object]:
    from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch

    dtype = getattr(torch, delta.version.dtype)
    device = next(model.parameters()).device
    for name, shape, places, bits in delta.patches():
        signed = bits.view(f"int{8 * bits.itemsize}")
        values = torch.from_numpy(signed).view(dtype).to(device)
        yield CheckpointWeightPatch(name, shape, dtype, values, torch.from_numpy(places).to(device))
