"""The checksum of a torch tensor, as a server's worker holds it (rljax.weights.checksum)."""

from __future__ import annotations

import torch

from rljax.weights.checksum import Checksum, checksum, mixed, place_weights

_CHUNK = 2**20  # elements whose checksum is taken at a time


def tensor_checksum(tensor: torch.Tensor) -> Checksum:
    """Of any tensor of 16 or 32 bits, wherever it lies; needs memory for a small part of it only."""
    narrow = tensor.element_size() == 2
    bits = tensor.detach().reshape(-1).view(torch.int16 if narrow else torch.int32)
    sums = torch.zeros(3, dtype=torch.int64, device=tensor.device)
    for number, part in enumerate(bits.split(_CHUNK)):
        words = part.to(torch.int32) & 0xFFFF if narrow else part
        first, second = mixed(words)
        places = torch.arange(number * _CHUNK, number * _CHUNK + len(part), device=part.device).to(torch.int32)
        placed = first * place_weights(places)
        sums += torch.stack([values.sum(dtype=torch.int64) for values in (first, second, placed)])
    return checksum(tensor.numel(), *sums.tolist())


def as_published(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in ``dtype`` where that changes no value, else as it is.

    A server may hold in float32 what was published in 16 bits: vLLM does so with the bias of a linear layer on a CPU
    with AMX. Where a value is not one of ``dtype``, the checksum shall differ from the trainer's.
    """
    if tensor.dtype == dtype:
        return tensor
    narrow = tensor.to(dtype)
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor
