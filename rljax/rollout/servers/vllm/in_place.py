"""What changed, written into a vLLM model's parameters by vLLM's own ``load_checkpoint_weight_patches``.

It goes through the model's loader, so that names, fused tensors and tensor parallelism are vLLM's matter, and packs
nothing: it is right only where the parameters that a layer computes with are those that it loaded. Whether they are is
not believed of a kind of layer, but compared: the checksums of all parameters after a load with those before packing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from rljax.rollout.servers.vllm.parameters import ParameterSums
from rljax.weights.delta import KeptDelta
from rljax.weights.format import Checksum


class PatchedWeights:
    """The checksum of every parameter as it stands after what changed was written."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """``dtype``: that is published."""
        self._sums = ParameterSums(model, dtype)
        self.tag = ""
        self.tensors: Mapping[str, Checksum | None] = {}
        self.seconds = 0.0  # that the checksums took

    def finish(self) -> None:
        """Takes the checksums."""
        began = time.monotonic()
        self.tensors = self._sums.of_model()
        self.seconds = time.monotonic() - began


def stands_as_loaded(model: torch.nn.Module, dtype: torch.dtype, loaded: Mapping[str, Checksum | None]) -> bool:
    """Whether the model computes with its parameters, and these have the checksums ``loaded``, by Hugging Face name.

    A tensor without one was not loaded: a tied head, whose parameter is the embedding's.
    """
    methods = (getattr(layer, "quant_method", None) for layer in model.modules())
    if not all(_computes_with_parameters(method) for method in methods if isinstance(method, QuantizeMethodBase)):
        return False
    try:
        found = ParameterSums(model, dtype).of_model()
    except (RuntimeError, IndexError, ValueError):  # packing has left another shape, or nothing
        return False
    return all(found.get(name) == sums for name, sums in loaded.items() if sums is not None)


def _computes_with_parameters(method: QuantizeMethodBase) -> bool:
    """Whether a layer's method is not to quantize, so that it keeps no second copy of parameters that stand."""
    return type(method).__name__.startswith("Unquantized")


def write_in_place(model: torch.nn.Module, delta: KeptDelta) -> None:
    """Writes what a delta changes into the parameters, which hold its base.

    Raises:
      Exception: the model's loader cannot do it, or a new value is NaN; some parameters may be changed already.
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
