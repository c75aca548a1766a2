"""The part of rljax that runs inside vLLM's processes: weights from files, and a description of the server.

vLLM calls :func:`register` in each of its processes through the entry-point group ``vllm.general_plugins``. It makes
the weight-transfer backend ``rljax_file`` known, which reads safetensors from a directory that trainer and server both
see. :class:`WorkerExtension` (``--worker-extension-cls``) answers the handshake, and tells which bits were loaded.

There is no jax in vLLM's environment, so this imports nothing that needs it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator
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

from rljax.rollout.servers.shape import described_shape
from rljax.rollout.servers.vllm.parameters import ParameterSums, PatchedWeights, stands_as_loaded, write_in_place
from rljax.weights.delta import KeptDelta
from rljax.weights.format import PROTOCOL, Checksum
from rljax.weights.mirror import WorkerWeights

log = logging.getLogger(__name__)

BACKEND = "rljax_file"


def register() -> None:
    """Makes the backend known and asks for AMX. vLLM may call it several times in one process."""
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
    """A file that the trainer wrote, which proves that both sides see one directory.

    Attributes:
      probe_path: The path of the file.
      probe_text: The text that it must contain.
      protocol: The protocol of the trainer.
      source: The place that weights are pulled from, where the file is read by its name; "" for the directory itself.
    """

    probe_path: str
    probe_text: str
    protocol: int
    source: str = ""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """One version of the weights.

    Attributes:
      path: The directory with ``version.json`` and safetensors files; "" for this machine's mirror, which was brought
        to the version before.
      tag: The tag that the version must have.
      in_place: Whether a delta that the mirror took is written into the parameters, where these stand as loaded.
    """

    path: str
    tag: str
    in_place: bool = False


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Reads a version's safetensors tensor by tensor and reloads the model in place.

    Attributes:
      loaded: The checksums of the last update, once it is finished, or None.
    """

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    loaded: LoadedWeights | PatchedWeights | None = None
    _loading: LoadedWeights | PatchedWeights | None = None
    _in_place = False  # whether the update under way asks for it
    _digest = ""  # the digest of the version that is loaded, or being loaded; "" where it is not known
    _stands = False  # whether the parameters are those that were loaded last, and nothing was packed

    @functools.cached_property
    def weights(self) -> WorkerWeights:
        """The weights that this worker may load."""
        return WorkerWeights()

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Checks protocol and probe file.

        Raises:
          ValueError: The protocols differ, or this process does not see the trainer's file.
        """
        self._stands = False  # a trainer that begins, or has found other bits here, sends all weights once
        self.weights.show(init_info.probe_path, init_info.probe_text, init_info.protocol, init_info.source)

    def start_weight_update(self) -> None:
        """Forgets what was loaded. How the layers take a version is decided once the version is known."""
        self.shutdown()
        self.loaded = None

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Loads one version.

        Raises:
          ValueError: The directory bears another tag than the update asks for, names a file outside itself, or lies in
            no directory that a trainer has shown.
        """
        held, self._digest = self._digest, ""
        self._in_place = update_info.in_place and not update_info.path
        with self.weights.version(update_info.path, update_info.tag) as (directory, files):
            digest, delta = self.weights.mirrored() if self._in_place else ("", None)
            fits = delta is not None and self._stands and delta.base_digest == held
            self._stands = False
            if not (fits and delta is not None and self._patch(delta)):
                self._reload(directory, files)
            assert self._loading is not None
            self._loading.tag = update_info.tag
            self._digest = digest

    def _reload(self, directory: Path, files: list[str]) -> None:
        """Loads every tensor, layer by layer."""
        initialize_layerwise_reload(self.model)
        self._loading = LoadedWeights(self.model, self.model_config.dtype)
        try:
            self.model.load_weights(read_tensors(directory, files))
        except BaseException:
            self.shutdown()
            raise

    def _patch(self, delta: KeptDelta) -> bool:
        """Returns whether what changed was written; where not, some of it may be, until all tensors are loaded."""
        try:
            write_in_place(self.model, delta)
        except Exception as error:
            log.warning("%s is loaded whole, it could not be written in place: %s", delta.version.tag, error)
            return False
        self._loading = PatchedWeights(self.model, self.model_config.dtype)
        return True

    def finish_weight_update(self) -> None:
        """Puts the layers back into service, the tied head included, and takes the checksums that are missing.

        An update that brought no weights changes nothing.
        """
        if self._loading is None:
            return
        try:
            if isinstance(self._loading, LoadedWeights):
                finalize_layerwise_reload(self.model, self.model_config)
            if getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
                repair_tied_head(self.model)
            self._loading.finish()
            self._stands = self._in_place and (
                isinstance(self._loading, PatchedWeights)
                or stands_as_loaded(self.model, self.model_config.dtype, self._loading.tensors)
            )
            self.loaded = self._loading
        finally:
            self.shutdown()

    def shutdown(self) -> None:
        """Leaves the layers as vLLM made them."""
        if isinstance(self._loading, LoadedWeights):
            self._loading.detach()
        self._loading = None


class LoadedWeights:
    """The checksum of every parameter as it was loaded, just before its layer packed it.

    vLLM loads a layer, lets its quantization method pack it and copies the result to where it was. A layer that was
    sent nothing gets its old values back. So the checksums are taken by the quantization methods themselves, from
    parameters that are as they were loaded. A layer without such a method packs nothing and is read at the end.

    Attributes:
      tag: The tag of the version.
      tensors: The checksum of each tensor by Hugging Face name, or None where its layer was not loaded.
      seconds: The time that the checksums took (seconds).
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """Puts a step before each layer's packing, until :meth:`detach`. ``dtype``: The dtype that is published."""
        self._sums = ParameterSums(model, dtype)
        methods = {layer: getattr(layer, "quant_method", None) for layer in model.modules()}
        self._unpacked = {
            layer: method if isinstance(method, QuantizeMethodBase) else None for layer, method in methods.items()
        }
        self._methods = {id(method): method for method in self._unpacked.values() if method is not None}
        for method in self._methods.values():
            method.process_weights_after_loading = self._before(method.process_weights_after_loading)
        self.tag = ""
        self.tensors: dict[str, Checksum | None] = {}
        self.seconds = 0.0

    def detach(self) -> None:
        """Takes the steps out. It may be called twice."""
        for method in self._methods.values():
            vars(method).pop("process_weights_after_loading", None)
        self._methods = {}

    def finish(self) -> None:
        """Reads the layers that pack nothing. Layers that should have been packed and were not get no checksum.

        Only the names of the latter are read: on some CPUs a layer's parameters are empty once it was packed.
        """
        for layer, method in dict(self._unpacked).items():
            if method is None:
                self._record(layer)
            else:
                self.tensors.update(dict.fromkeys(self._sums.names_of_layer(layer)))

    def _before(self, process: Callable[..., None]) -> Callable[..., None]:
        def record_and_process(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            self._record(layer)
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            process(layer, *args, **kwargs)
            if kernel is not None and current_platform.is_cpu():
                repack_experts(layer, kernel)

        return record_and_process

    def _record(self, layer: torch.nn.Module) -> None:
        """Takes the checksums of a layer's parameters."""
        began = time.monotonic()
        self._unpacked.pop(layer, None)
        self.tensors.update(self._sums.of_layer(layer))
        self.seconds += time.monotonic() - began


def read_tensors(directory: Path, files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of ``files`` in order, one tensor in memory at a time."""
    for file in files:
        with safe_open(str(directory / file), framework="pt", device="cpu") as handle:
            for name in handle.keys():  # noqa: SIM118  (safe_open is no mapping)
                yield name, handle.get_tensor(name)


def repair_tied_head(model: torch.nn.Module) -> None:
    """Ties ``lm_head`` to the reloaded embedding and packs it again.

    On a CPU the head keeps a packed copy of its weight from the start, which the reload of the embedding does not
    change: greedy output changes, yet log-probabilities stay more than a nat off. Elsewhere packing does nothing.
    """
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is None or embedding is None or head is embedding or not hasattr(embedding, "weight"):
        return
    head.weight = embedding.weight
    head.quant_method.process_weights_after_loading(head)


def repack_experts(layer: torch.nn.Module, kernel: Any) -> None:
    """Packs the experts of a mixture for its kernel on a CPU.

    vLLM packs them when the kernel is made, and not when they are loaded again. Then the kernel would take the rows of
    one expert for parts of others, and every log-probability would be off by nats.
    """
    kernel.fused_experts.process_weights_after_loading(layer)


class WorkerExtension:
    """The methods that vLLM's workers gain, which ``/collective_rpc`` reaches."""

    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def rljax_describe(self) -> dict[str, Any]:
        """Returns what the trainer compares at the handshake, as plain JSON."""
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

    def rljax_pull(self, name: str, keep_delta: bool = False) -> None:
        """Begins to bring this machine's mirror to the version ``name``, and returns at once."""
        self.weight_transfer_engine.weights.pulls.begin(name, keep_delta=keep_delta)

    def rljax_pulled(self, name: str) -> dict[str, Any] | None:
        """Returns the figures of that pull (``weights.pull.Pulled``) or its ``error``, and null while it goes on."""
        return self.weight_transfer_engine.weights.pulls.result(name)

    def rljax_checksums(self) -> dict[str, Any]:
        """Returns the tag and the tensors' checksums of the last update, as plain JSON.

        It also tells the seconds that the checksums took, and whether only what changed was written. A tensor whose
        layer was not loaded has null for its checksum. The tag is empty when no update was finished.
        """
        loaded: LoadedWeights | PatchedWeights | None = self.weight_transfer_engine.loaded
        if loaded is None:
            return {"tag": "", "tensors": {}, "seconds": 0.0}
        tensors = {name: sums and dataclasses.astuple(sums) for name, sums in loaded.tensors.items()}
        in_place = isinstance(loaded, PatchedWeights)
        return {"tag": loaded.tag, "tensors": tensors, "seconds": loaded.seconds, "in_place": in_place}

    def rljax_end_update(self) -> None:
        """Ends an update that broke off, which vLLM would otherwise take for one that goes on."""
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()
        self.weight_transfer_engine.shutdown()


def returns_routes(vllm_config: Any) -> bool:
    """Returns whether replies hold the experts of each token (--enable-return-routed-experts)."""
    asked = getattr(vllm_config, "aux_output_config", None) or vllm_config.model_config
    return bool(getattr(asked, "enable_return_routed_experts", False))


def supported_head_sizes() -> list[int] | None:
    """Returns the head sizes that attention takes on a CPU, where vLLM does not check them itself; elsewhere None.

    On a CPU a server with another head size starts, and its engine ends at the first request.
    """
    if not current_platform.is_cpu():
        return None
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return list(CPUAttentionBackend.get_supported_head_sizes())
