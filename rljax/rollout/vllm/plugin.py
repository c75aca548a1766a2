"""The part of rljax that runs inside vLLM's processes: weights from files, and a description of the server.

vLLM calls :func:`register` in each of its processes through the entry-point group ``vllm.general_plugins``. It makes
the weight-transfer backend ``rljax_file`` known, which reads safetensors from a directory that trainer and server both
see. :class:`WorkerExtension` (``--worker-extension-cls``) answers what the handshake asks.

Imports only the standard library, torch, safetensors and vllm: there is no jax in vLLM's environment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

BACKEND = "rljax_file"
PROTOCOL = 1


def register() -> None:
    """Makes the backend known and asks for AMX; vLLM may call it several times in one process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransferEngine)
    request_amx()


def request_amx() -> None:
    """Asks Linux for this process's permission to use AMX tiles, where the processor has them.

    vLLM's bfloat16 attention on a CPU uses tiles without asking, and a process without the permission then dies of
    SIGILL. A torch that lacks these private functions is left as it is.
    """
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    request = getattr(torch.cpu, "_init_amx", None)
    if supported is not None and request is not None and supported():
        request()


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """A file the trainer wrote and what it must contain, which proves that both sides see one directory."""

    probe_path: str
    probe_text: str
    protocol: int


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """One version: a directory with ``manifest.json`` and safetensors files, and the tag its manifest must bear."""

    path: str
    tag: str


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Reads a version's safetensors tensor by tensor and reloads the model in place."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Checks protocol and probe file.

        Raises:
          ValueError: the protocols differ, or this process does not see the trainer's file.
        """
        if init_info.protocol != PROTOCOL:
            raise ValueError(f"rljax protocol: the trainer speaks {init_info.protocol}, this server {PROTOCOL}")
        probe = Path(init_info.probe_path)
        if not probe.is_file() or probe.read_text() != init_info.probe_text:
            raise ValueError(f"this server does not see the trainer's file {probe}: one shared directory is needed")

    def start_weight_update(self) -> None:
        """Prepares every layer to be loaded again."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Loads one version.

        Raises:
          ValueError: the directory bears another tag than the update asks for.
        """
        directory = Path(update_info.path)
        manifest = json.loads((directory / "manifest.json").read_text())
        if manifest["tag"] != update_info.tag:
            raise ValueError(f"{directory} holds {manifest['tag']}, the update is for {update_info.tag}")
        self.model.load_weights(read_tensors(directory, manifest["files"]))

    def finish_weight_update(self) -> None:
        """Puts the layers back into service, the tied head included."""
        finalize_layerwise_reload(self.model, self.model_config)
        if getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            repair_tied_head(self.model)

    def shutdown(self) -> None:
        """Holds nothing between updates."""


def read_tensors(directory: Path, files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of ``files`` in order, one tensor in memory at a time."""
    for file in files:
        with safe_open(str(directory / file), framework="pt", device="cpu") as handle:
            for name in handle.keys():  # noqa: SIM118  (safe_open is no mapping)
                yield name, handle.get_tensor(name)


def repair_tied_head(model: torch.nn.Module) -> None:
    """Ties ``lm_head`` to the reloaded embedding and packs it again.

    On a CPU the head keeps a packed copy of its weight made at start-up, which the reload of the embedding passes
    over: greedy output changes, yet log-probabilities stay more than a nat off. Elsewhere packing does nothing.
    """
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is None or embedding is None or head is embedding or not hasattr(embedding, "weight"):
        return
    head.weight = embedding.weight
    head.quant_method.process_weights_after_loading(head)


class WorkerExtension:
    """Methods that vLLM's workers gain; reached through ``/collective_rpc``."""

    vllm_config: Any
    model_runner: Any

    def rljax_describe(self) -> dict[str, Any]:
        """What the trainer compares with its own at the handshake; plain JSON."""
        model = self.vllm_config.model_config
        text = model.hf_text_config
        transfer = self.vllm_config.weight_transfer_config
        shape = {
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": getattr(text, "intermediate_size", None),
            "num_hidden_layers": text.num_hidden_layers,
            "num_attention_heads": text.num_attention_heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", text.num_attention_heads),
            "head_dim": model.get_head_size(),
            "tie_word_embeddings": bool(getattr(text, "tie_word_embeddings", False)),
        }
        return {
            "protocol": PROTOCOL,
            "vllm": str(getattr(vllm, "__version__", "unknown")),
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": model.quantization,
            "max_model_len": model.max_model_len,
            "max_logprobs": model.max_logprobs,
            "default_sampling": model.get_diff_sampling_param(),
            "block_size": self.vllm_config.cache_config.block_size,
            "backend": transfer.backend if transfer is not None else None,
            "head_sizes": supported_head_sizes(),
            "shape": shape,
        }


def supported_head_sizes() -> list[int] | None:
    """Head sizes that attention takes on this device, where vLLM does not check them itself (a CPU); else None.

    There a server with another head size starts, and its engine ends at the first request.
    """
    if not current_platform.is_cpu():
        return None
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return list(CPUAttentionBackend.get_supported_head_sizes())
