"""The part of rljax that runs inside vLLM's processes: weights from files, and a description of the server.

vLLM calls :func:`register` in each of its processes through the entry-point group ``vllm.general_plugins``. It makes
the weight-transfer backend ``rljax_file`` known, which reads safetensors from a directory that trainer and server both
see. :class:`WorkerExtension` (``--worker-extension-cls``) answers what the handshake asks, and which bits were loaded.

Imports only the standard library, torch, safetensors, vllm and what of rljax needs no more: there is no jax in vLLM's
environment.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from rljax.checksum import Checksum
from rljax.rollout.served.torch_checksum import as_published, tensor_checksum
from rljax.rollout.served.worker_weights import WorkerWeights, described_shape
from rljax.rollout.weights.directory import PROTOCOL

BACKEND = "rljax_file"
EXPERT_PARTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
"""Parameter of a mixture's experts -> what it holds of each expert."""


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
    """A file the trainer wrote and what it must contain, which proves that both sides see one directory.

    With a ``source``, weights are pulled from there, and the file is read there by its name.
    """

    probe_path: str
    probe_text: str
    protocol: int
    source: str = ""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """One version: a directory with ``manifest.json`` and safetensors files, and the tag its manifest must bear.

    An empty path is that of this machine's mirror, which was brought to the version before.
    """

    path: str
    tag: str


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Reads a version's safetensors tensor by tensor and reloads the model in place."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    loaded: LoadedWeights | None = None  # by the last update, once it is finished
    _loading: LoadedWeights | None = None

    @functools.cached_property
    def weights(self) -> WorkerWeights:
        """What this worker may load."""
        return WorkerWeights()

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Checks protocol and probe file.

        Raises:
          ValueError: the protocols differ, or this process does not see the trainer's file.
        """
        self.weights.show(init_info.probe_path, init_info.probe_text, init_info.protocol, init_info.source)

    def start_weight_update(self) -> None:
        """Prepares every layer to be loaded again, and the checksums of what will be."""
        self.shutdown()
        self.loaded = None
        initialize_layerwise_reload(self.model)
        self._loading = LoadedWeights(self.model, self.model_config.dtype)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Loads one version.

        Raises:
          ValueError: the directory bears another tag than the update asks for, names a file outside itself, or lies in
            no directory that a trainer has shown.
        """
        with self.weights.version(update_info.path, update_info.tag) as (directory, files):
            assert self._loading is not None
            try:
                self.model.load_weights(read_tensors(directory, files))
                self._loading.tag = update_info.tag
            except BaseException:
                self.shutdown()
                raise

    def finish_weight_update(self) -> None:
        """Puts the layers back into service, the tied head included, and takes the checksums that are missing."""
        assert self._loading is not None
        try:
            finalize_layerwise_reload(self.model, self.model_config)
            if getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
                repair_tied_head(self.model)
            self._loading.finish()
            self.loaded = self._loading
        finally:
            self.shutdown()

    def shutdown(self) -> None:
        """Leaves the layers as vLLM made them."""
        if self._loading is not None:
            self._loading.detach()
            self._loading = None


class LoadedWeights:
    """The checksum of every parameter as it was loaded, just before its layer packed it.

    vLLM loads a layer, lets its quantization method pack it and copies the result to where it was; a layer that was
    sent nothing gets its old values back. So the checksums are taken by the quantization methods themselves, from
    parameters that are as they were loaded; a layer without one packs nothing and is read at the end.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """Puts a step before each layer's packing; :meth:`detach` takes it out again. ``dtype``: that is published."""
        self._dtype = dtype
        self._names = {layer: name for name, layer in model.named_modules()}
        self._fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
        methods = {layer: getattr(layer, "quant_method", None) for layer in self._names}
        self._unpacked = {
            layer: method if isinstance(method, QuantizeMethodBase) else None for layer, method in methods.items()
        }
        self._methods = {id(method): method for method in self._unpacked.values() if method is not None}
        for method in self._methods.values():
            method.process_weights_after_loading = self._before(method.process_weights_after_loading)
        self.tag = ""
        self.tensors: dict[str, Checksum | None] = {}
        self.seconds = 0.0  # that the checksums took

    def detach(self) -> None:
        """Takes the steps out; may be called twice."""
        for method in self._methods.values():
            vars(method).pop("process_weights_after_loading", None)
        self._methods = {}

    def finish(self) -> None:
        """Reads the layers that pack nothing; those that should have been packed and were not have no checksum.

        Of these only the names are asked for: on some CPUs a layer's parameters are empty once it was packed.
        """
        for layer, method in dict(self._unpacked).items():
            if method is None:
                self._record(layer)
            else:
                for name, _ in layer.named_parameters(recurse=False):
                    self.tensors.update(dict.fromkeys(self._tensor_names(layer, name)))

    def _before(self, process: Callable[..., None]) -> Callable[..., None]:
        def record_and_process(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            self._record(layer)
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            process(layer, *args, **kwargs)
            if kernel is not None and current_platform.is_cpu():
                repack_experts(layer, kernel)

        return record_and_process

    def _record(self, layer: torch.nn.Module) -> None:
        """The checksums of a layer's parameters; those of one fused tensor one by one, without padding rows."""
        began = time.monotonic()
        self._unpacked.pop(layer, None)
        for name, parameter in layer.named_parameters(recurse=False):
            parts = self._parts(layer, name, parameter)
            self.tensors.update((name, tensor_checksum(as_published(part, self._dtype))) for name, part in parts)
        self.seconds += time.monotonic() - began

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


def repack_experts(layer: torch.nn.Module, kernel: Any) -> None:
    """Packs the experts of a mixture for its kernel on a CPU.

    vLLM packs them when the kernel is made, and not when they are loaded again: the kernel would take the rows of one
    expert for parts of others, and every log-probability would be off by nats.
    """
    kernel.fused_experts.process_weights_after_loading(layer)


class WorkerExtension:
    """Methods that vLLM's workers gain; reached through ``/collective_rpc``."""

    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: Any

    def rljax_describe(self) -> dict[str, Any]:
        """What the trainer compares with its own at the handshake; plain JSON."""
        model = self.vllm_config.model_config
        transfer = self.vllm_config.weight_transfer_config
        return {
            "protocol": PROTOCOL,
            "vllm": str(getattr(vllm, "__version__", "unknown")),
            "dtype": str(model.dtype).removeprefix("torch."),
            "head_dtype": str(model.head_dtype).removeprefix("torch."),
            "quantization": model.quantization,
            "max_model_len": model.max_model_len,
            "max_logprobs": model.max_logprobs,
            "default_sampling": model.get_diff_sampling_param(),
            "block_size": self.vllm_config.cache_config.block_size,
            "backend": transfer.backend if transfer is not None else None,
            "head_sizes": supported_head_sizes(),
            "returns_routes": returns_routes(self.vllm_config),
            "shape": described_shape(model.hf_text_config, model.get_head_size()),
        }

    def rljax_pull(self, name: str) -> None:
        """Begins to bring this machine's mirror to the version ``name``; the worker goes on."""
        self.weight_transfer_engine.weights.begin_pull(name)

    def rljax_pulled(self, name: str) -> dict[str, Any] | None:
        """What that pull did (``weights.pull.Pulled``), or its ``error``; null while it goes on. Plain JSON."""
        return self.weight_transfer_engine.weights.pulled(name)

    def rljax_checksums(self) -> dict[str, Any]:
        """What this worker was given last: the tag, each tensor's checksum, and the seconds that they took; plain JSON.

        A tensor whose layer was not loaded has null for its checksum. The tag is empty when no update was finished.
        """
        loaded: LoadedWeights | None = self.weight_transfer_engine.loaded
        if loaded is None:
            return {"tag": "", "tensors": {}, "seconds": 0.0}
        tensors = {name: sums and dataclasses.astuple(sums) for name, sums in loaded.tensors.items()}
        return {"tag": loaded.tag, "tensors": tensors, "seconds": loaded.seconds}


def returns_routes(vllm_config: Any) -> bool:
    """Whether replies have the experts of each token (--enable-return-routed-experts)."""
    asked = getattr(vllm_config, "aux_output_config", None) or vllm_config.model_config
    return bool(getattr(asked, "enable_return_routed_experts", False))


def supported_head_sizes() -> list[int] | None:
    """Head sizes that attention takes on this device, where vLLM does not check them itself (a CPU); else None.

    There a server with another head size starts, and its engine ends at the first request.
    """
    if not current_platform.is_cpu():
        return None
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return list(CPUAttentionBackend.get_supported_head_sizes())
