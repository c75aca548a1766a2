"""The part of rljax that runs inside vLLM's processes: weights from files, and a description of the server.

vLLM calls :func:`register` in each of its processes through the entry-point group ``vllm.general_plugins``. It makes
the weight-transfer backend ``rljax_file`` known, which reads safetensors from a directory that trainer and server both
see. :class:`WorkerExtension` (``--worker-extension-cls``) answers the handshake, and tells which bits were loaded.

A delta is written by vLLM's own ``load_checkpoint_weight_patches``, which goes through the model's loader, and so knows
names, fused tensors and tensor parallelism. It packs nothing, and is right only where a layer computes with the
parameters that it loaded. Whether it does is compared: the checksums after a load, with those before packing.

There is no jax in vLLM's environment, so this imports nothing that needs it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from rljax.rollout.servers.loaded import ModelTensors
from rljax.rollout.servers.vllm.description import describe
from rljax.rollout.servers.vllm.forced import ForcedDecoding
from rljax.rollout.servers.vllm.server import BACKEND
from rljax.rollout.servers.vllm.taps import TapMethods
from rljax.weights.delta import KeptDelta
from rljax.weights.format import Checksum, TensorRecord, read_version
from rljax.weights.mirror import WorkerWeights
from rljax.weights.sums import as_published, tensor_checksum

log = logging.getLogger(__name__)


def register() -> None:
    """Makes the backend known and asks for AMX. vLLM may call it several times in one process.

    vLLM's bfloat16 attention on a CPU uses AMX tiles without asking Linux, and a process without the permission then
    dies of SIGILL. A torch that lacks the private functions that ask is left as it is.
    """
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransferEngine)
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    request = getattr(torch.cpu, "_init_amx", None)
    if supported is not None and request is not None and supported():
        request()


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """A file that the trainer wrote, which proves that both sides see one directory (``WorkerWeights.show``)."""

    probe_path: str
    probe_text: str
    protocol: int
    source: str = ""
    version_bytes: int = 0


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """One version of the weights."""

    path: str  # the directory of the version; "" for this machine's mirror, which was brought to the version before
    tag: str  # the tag that the version must have
    in_place: bool = False  # whether a delta that the mirror took is written into parameters that stand as loaded
    keep_equal: bool = False  # whether a version from the mirror that equals the loaded one is not loaded again


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Reads a version's safetensors tensor by tensor and reloads the model in place."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    loaded: PatchedWeights | None = None  # the checksums of the last update, once it is finished
    _loading: PatchedWeights | None = None
    _in_place = False  # whether the update under way asks for it
    _digest = ""  # the digest of the version that is loaded, or being loaded; "" where it is not known
    _stands = False  # whether the parameters are those that were loaded last, and nothing was packed
    _records: Mapping[str, TensorRecord] = {}  # of the version that is loaded; empty where it is not known
    _sums: Mapping[str, Checksum | None] = {}  # the checksums that were taken as it was loaded

    @functools.cached_property
    def weights(self) -> WorkerWeights:
        """The weights that this worker may load."""
        return WorkerWeights()

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Checks protocol and probe file. Raises ValueError if one of them is not the trainer's."""
        self._stands = False  # a trainer that begins, or has found other bits here, sends all weights once
        self._records = {}
        self.weights.show(**dataclasses.asdict(init_info))

    def start_weight_update(self) -> None:
        """Forgets what was loaded. How the layers take a version is decided once the version is known."""
        self.shutdown()
        self.loaded = None

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Loads one version. Raises ValueError as ``WorkerWeights.version``."""
        held, self._digest = self._digest, ""
        known, self._records = self._records, {}
        self._in_place = update_info.in_place and not update_info.path
        with self.weights.version(update_info.path, update_info.tag) as (directory, files):
            digest, delta = self.weights.mirrored() if self._in_place else ("", None)
            fits = delta is not None and self._stands and delta.base_digest == held
            records = read_version(directory).tensors if update_info.keep_equal and not update_info.path else {}
            self._stands = False
            if records and records == known:
                self._loading = EqualWeights(self.model, self.model_config.dtype, self._sums)
            elif not (fits and delta is not None and self._patch(delta)):
                self._reload(directory, files)
            assert self._loading is not None
            self._loading.tag, self._loading.records = update_info.tag, records
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
            self._loading.put_back(self.model, self.model_config)
            self._loading.finish()
            self._stands = self._in_place and (
                not isinstance(self._loading, LoadedWeights)
                or stands_as_loaded(self.model, self.model_config.dtype, self._loading.tensors)
            )
            self.loaded = self._loading
            self._records, self._sums = self._loading.records, self._loading.tensors
        finally:
            self.shutdown()

    def shutdown(self) -> None:
        """Leaves the layers as vLLM made them."""
        if self._loading is not None:
            self._loading.detach()
        self._loading = None


def tensors_of(model: torch.nn.Module) -> ModelTensors:
    """Returns the tensors of a model of vLLM, which names its fused layers."""
    return ModelTensors(model, getattr(model, "packed_modules_mapping", {}))


def checksums(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> dict[str, Checksum]:
    """Returns the checksum of each tensor. ``dtype``: The dtype that is published."""
    return {name: tensor_checksum(as_published(tensor, dtype)) for name, tensor in tensors}


class PatchedWeights:
    """The checksum of every parameter as it stands after the changed elements were written."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """Takes no checksum yet. ``dtype``: The dtype that is published."""
        self._model, self._dtype = tensors_of(model), dtype
        self.tag = ""  # of the version
        self.records: Mapping[str, TensorRecord] = {}  # of the version, where the next one is compared with it
        self.tensors: dict[str, Checksum | None] = {}  # by Hugging Face name; None where the layer was not loaded
        self.seconds = 0.0  # the time that the checksums took

    def put_back(self, model: torch.nn.Module, model_config: Any) -> None:
        """Puts the layers back into service: a tied head gets the new embedding."""
        if getattr(model_config.hf_text_config, "tie_word_embeddings", False):
            repair_tied_head(model)

    def finish(self) -> None:
        """Takes the checksums that are missing."""
        began = time.monotonic()
        self.tensors.update(checksums(self._model.of_model(), self._dtype))
        self.seconds = time.monotonic() - began

    def detach(self) -> None:
        """Leaves the layers as vLLM made them. It may be called twice."""


class EqualWeights(PatchedWeights):
    """The checksums of a version that stays loaded, because the next one has the same tensors."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, sums: Mapping[str, Checksum | None]) -> None:
        """Takes the checksums ``sums`` that were taken as the version was loaded."""
        super().__init__(model, dtype)
        self.tensors.update(sums)

    def put_back(self, model: torch.nn.Module, model_config: Any) -> None:
        """Changes nothing: all layers are in service."""

    def finish(self) -> None:
        """Takes no checksum: some layers have packed their parameters, which cannot be read any more."""


class LoadedWeights(PatchedWeights):
    """The checksum of every parameter as it was loaded, just before its layer packed it.

    vLLM loads a layer, lets its quantization method pack it and copies the result to where it was. A layer that was
    sent nothing gets its old values back. So each checksum is taken just before the method packs. A layer without such
    a method packs nothing and is read at the end.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """Puts a step before each layer's packing, until :meth:`detach`. ``dtype``: The dtype that is published."""
        super().__init__(model, dtype)
        methods = {layer: getattr(layer, "quant_method", None) for layer in model.modules()}
        self._unpacked = {
            layer: method if isinstance(method, QuantizeMethodBase) else None for layer, method in methods.items()
        }
        self._methods = {id(method): method for method in self._unpacked.values() if method is not None}
        for method in self._methods.values():
            method.process_weights_after_loading = self._before(method.process_weights_after_loading)

    def put_back(self, model: torch.nn.Module, model_config: Any) -> None:
        """Lets vLLM finish its layers, and gives a tied head the new embedding."""
        finalize_layerwise_reload(model, model_config)
        super().put_back(model, model_config)

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
                self.tensors.update(dict.fromkeys(self._model.names_of_layer(layer)))

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
        self.tensors.update(checksums(self._model.of_layer(layer), self._dtype))
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
    """Packs the experts of a mixture for its kernel on a CPU, which vLLM does when the kernel is made, and not later.

    Otherwise the kernel would take the rows of one expert for parts of others: log-probabilities would be off by nats.
    """
    kernel.fused_experts.process_weights_after_loading(layer)


def stands_as_loaded(model: torch.nn.Module, dtype: torch.dtype, loaded: Mapping[str, Checksum | None]) -> bool:
    """Returns whether the model computes with its parameters, and these have the checksums ``loaded``, by name.

    A tensor without a checksum was not loaded: it is a tied head, whose parameter is the embedding's. A method that
    quantizes keeps a second copy of its layer's parameters.
    """
    methods = (getattr(layer, "quant_method", None) for layer in model.modules())
    named = (type(method).__name__ for method in methods if isinstance(method, QuantizeMethodBase))
    if not all(name.startswith("Unquantized") for name in named):
        return False
    try:
        standing = checksums(tensors_of(model).of_model(), dtype)
    except (RuntimeError, IndexError, ValueError):  # packing has left another shape, or nothing
        return False
    return all(standing.get(name) == sums for name, sums in loaded.items() if sums is not None)


def write_in_place(model: torch.nn.Module, delta: KeptDelta) -> None:
    """Writes what a delta changes into the parameters, which hold the version that the delta is made from.

    It may raise any error of the model's loader. Some parameters may be changed already then.
    """
    # Not in every vLLM that the plugin works with.
    from vllm.model_executor.model_loader import checkpoint_weight_patch as patching

    dtype, device = getattr(torch, delta.version.dtype), next(model.parameters()).device
    for name, shape, places, bits in delta.patches():
        signed = bits.view(f"int{8 * bits.itemsize}")
        values = torch.from_numpy(signed).view(dtype).to(device)
        patch = patching.CheckpointWeightPatch(name, shape, dtype, values, torch.from_numpy(places).to(device))
        patching.load_checkpoint_weight_patches(model, [patch], validate_unique_indices=False)


class WorkerExtension(ForcedDecoding, TapMethods):
    """The methods that vLLM's workers gain, which ``/collective_rpc`` reaches."""

    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def rljax_describe(self) -> dict[str, Any]:
        """Returns what the trainer compares at the handshake, as plain JSON."""
        return describe(self.vllm_config)

    def rljax_pull(self, name: str, keep_delta: bool = False) -> None:
        """Begins a pull (``weights.mirror.Pulls.begin``)."""
        self.weight_transfer_engine.weights.pulls.begin(name, keep_delta=keep_delta)

    def rljax_pulled(self, name: str) -> dict[str, Any] | None:
        """Returns the result of that pull (``Pulls.result``)."""
        return self.weight_transfer_engine.weights.pulls.result(name)

    def rljax_checksums(self) -> dict[str, Any]:
        """Returns the fields of ``PatchedWeights`` after the last update, as plain JSON. Before it the tag is empty.

        It also returns how the update was done: whether in place, and whether nothing was loaded.
        """
        loaded: PatchedWeights | None = self.weight_transfer_engine.loaded
        if loaded is None:
            return {"tag": "", "tensors": {}, "seconds": 0.0}
        tensors = {name: sums and dataclasses.astuple(sums) for name, sums in loaded.tensors.items()}
        done = {"in_place": not isinstance(loaded, LoadedWeights), "equal": isinstance(loaded, EqualWeights)}
        return {"tag": loaded.tag, "tensors": tensors, "seconds": loaded.seconds, **done}

    def rljax_end_update(self) -> None:
        """Ends an update that broke off, which vLLM would otherwise take for one that goes on."""
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()
        self.weight_transfer_engine.shutdown()
