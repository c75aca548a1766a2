"""The part of rljax that runs inside vLLM's processes: weights from files, and a description of the server.

vLLM calls :func:`register` in each of its processes through the entry-point group ``vllm.general_plugins``. It makes
the weight-transfer backend ``rljax_file`` known, which reads safetensors from a directory that trainer and server both
see. :class:`WorkerExtension` (``--worker-extension-cls``) answers the handshake, and tells which bits were loaded.

A delta is written by vLLM's own ``load_checkpoint_weight_patches``. It goes through the model's loader, and so knows
names, fused tensors and tensor parallelism. It packs nothing, and is right only if a layer computes with the parameters
that it loaded. To know that, the checksums at the end of a load are compared with those before packing.

There is no jax in vLLM's environment, so this module imports nothing that needs it.
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

from rljax.rollout.servers.loaded import ModelTensors, has_tied_head
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
    """Registers the weight-transfer backend and asks for AMX. vLLM may call it several times in one process.

    vLLM's bfloat16 attention on a CPU uses AMX tiles, but does not ask Linux for the permission. A process without it
    dies of SIGILL. If torch lacks the private functions that ask, nothing is asked.
    """
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransferEngine)
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    request = getattr(torch.cpu, "_init_amx", None)
    if supported is not None and request is not None and supported():
        request()


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """The arguments of ``WorkerWeights.show``: a probe file proves that both sides see the same directory or source."""

    probe_path: str
    probe_text: str
    protocol: int
    source: str = ""
    version_bytes: int = 0


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """One version of the weights."""

    path: str  # the directory of the version; "" for this machine's own mirror, which must hold the version already
    tag: str  # the tag that the version must have
    in_place: bool = False  # whether only the mirror's delta is written, if the parameters are as they were loaded
    keep_equal: bool = False  # whether nothing is loaded if the mirror's version equals the loaded one


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Reads a version's safetensors tensor by tensor and reloads the model in place."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    loaded: PatchedWeights | None = None  # the checksums of the last finished update
    _loading: PatchedWeights | None = None  # the checksums of the update under way
    _in_place = False  # whether the update under way comes from the mirror and asks for ``in_place``
    _digest = ""  # the digest of the version that is loaded or being loaded; "" if it is not known
    _stands = False  # whether the parameters are as they were loaded last, so that a delta can be written into them
    _records: Mapping[str, TensorRecord] = {}  # the records of the loaded version's tensors; empty if not known
    _sums: Mapping[str, Checksum | None] = {}  # the checksums that were taken as that version was loaded

    @functools.cached_property
    def weights(self) -> WorkerWeights:
        """The places from which this worker may load weights."""
        return WorkerWeights()

    @functools.cached_property
    def has_tied_head(self) -> bool:
        """Whether the LM head multiplies with the embedding table. It is first read before any update."""
        return has_tied_head(self.model, self.model_config.hf_text_config)

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Checks protocol and probe file, and notes where versions will be.

        Raises ValueError if one of them is not the trainer's, and RuntimeError if the mirror has too little room.
        """
        self._stands = False  # a trainer that begins, or has found wrong bits here, first sends all weights
        self._records = {}
        self.weights.show(**dataclasses.asdict(init_info))

    def start_weight_update(self) -> None:
        """Forgets the last update. The layers are prepared later, once the version is known."""
        self.shutdown()
        self.loaded = None

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Loads one version.

        Raises ValueError if it has another tag, cannot be loaded, or lies in no directory that a trainer has shown.
        """
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
        tied = self.has_tied_head  # While the model loads, no two layers share a parameter.
        initialize_layerwise_reload(self.model)
        self._loading = LoadedWeights(self.model, self.model_config.dtype, tied=tied)
        try:
            self.model.load_weights(read_tensors(directory, files))
        except BaseException:
            self.shutdown()
            raise

    def _patch(self, delta: KeptDelta) -> bool:
        """Writes a delta into the parameters. Returns whether it could be written; if not, all must be loaded."""
        try:
            write_in_place(self.model, delta)
        except Exception as error:
            log.warning("%s is loaded whole, it could not be written in place: %s", delta.version.tag, error)
            return False
        self._loading = PatchedWeights(self.model, self.model_config.dtype, tied=self.has_tied_head)
        return True

    def finish_weight_update(self) -> None:
        """Puts the layers back into service, the tied head included, and computes the missing checksums.

        After an update without weights it does nothing.
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
        """Ends the update under way, and removes the steps that it has put before the layers' packing."""
        if self._loading is not None:
            self._loading.detach()
        self._loading = None


def tensors_of(model: torch.nn.Module) -> ModelTensors:
    """Returns the tensors of one of vLLM's models, which lists its fused layers in ``packed_modules_mapping``."""
    return ModelTensors(model, getattr(model, "packed_modules_mapping", {}))


def checksums(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> dict[str, Checksum]:
    """Returns the checksum of each tensor by name. ``dtype``: The dtype of the published weights."""
    return {name: tensor_checksum(as_published(tensor, dtype)) for name, tensor in tensors}


class PatchedWeights:
    """The checksums of all parameters after an update that wrote the changed elements into them."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, *, tied: bool) -> None:
        """Computes no checksum yet. ``dtype``: The dtype of the published weights. ``tied``: See ``has_tied_head``."""
        self._model, self._dtype, self._tied = tensors_of(model), dtype, tied
        self.tag = ""  # the tag of the version
        self.records: Mapping[str, TensorRecord] = {}  # the version's records, if the next one is compared with them
        self.tensors: dict[str, Checksum | None] = {}  # the checksums by Hugging Face name; None: not loaded
        self.seconds = 0.0  # the time that the checksums took

    def put_back(self, model: torch.nn.Module, model_config: Any) -> None:
        """Puts the layers back into service: a tied head gets the new embedding."""
        if self._tied:
            repair_tied_head(model)

    def finish(self) -> None:
        """Computes the checksums of all parameters."""
        began = time.monotonic()
        self.tensors.update(checksums(self._model.of_model(), self._dtype))
        self.seconds = time.monotonic() - began

    def detach(self) -> None:
        """Does nothing: no layer was changed. It may be called twice."""


class EqualWeights(PatchedWeights):
    """The checksums of an update whose tensors all equal the loaded ones, so that nothing is loaded."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, sums: Mapping[str, Checksum | None]) -> None:
        """Takes over the checksums ``sums``, which were computed when these tensors were loaded."""
        super().__init__(model, dtype, tied=False)
        self.tensors.update(sums)

    def put_back(self, model: torch.nn.Module, model_config: Any) -> None:
        """Does nothing: all layers are in service."""

    def finish(self) -> None:
        """Computes no checksum: some layers have packed their parameters, which cannot be read any more."""


class LoadedWeights(PatchedWeights):
    """The checksums of all parameters as they were loaded. Each is computed just before its layer packs the parameter.

    vLLM loads a layer, lets its quantization method pack it, and copies the result into the old memory. A layer that
    got no weights has its old values then. So each checksum is computed just before the method packs. A layer without a
    method packs nothing and is read at the end.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, *, tied: bool) -> None:
        """Puts a step before each layer's packing, until :meth:`detach`. The base class has the same arguments."""
        super().__init__(model, dtype, tied=tied)
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
        """Removes the steps. It may be called twice."""
        for method in self._methods.values():
            vars(method).pop("process_weights_after_loading", None)
        self._methods = {}

    def finish(self) -> None:
        """Reads the layers that pack nothing. The tensors of layers that should have been packed but were not get None.

        Their values are not read, because on some CPUs a layer's parameters are empty after an earlier packing.
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
        began = time.monotonic()
        self._unpacked.pop(layer, None)
        self.tensors.update(checksums(self._model.of_layer(layer), self._dtype))
        self.seconds += time.monotonic() - began


def read_tensors(directory: Path, files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of ``files`` in order, one tensor in memory at a time."""
    for file in files:
        with safe_open(str(directory / file), framework="pt", device="cpu") as handle:
            for name in handle.keys():  # noqa: SIM118  (safe_open is not a mapping)
                yield name, handle.get_tensor(name)


def repair_tied_head(model: torch.nn.Module) -> None:
    """Ties ``lm_head`` to the reloaded embedding and packs it again.

    On a CPU the head keeps a packed copy of its weight from the start. The reload of the embedding does not change the
    copy: greedy output changes, yet log-probabilities stay more than a nat off. On other devices packing does nothing.
    """
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is None or embedding is None or head is embedding or not hasattr(embedding, "weight"):
        return
    head.weight = embedding.weight
    head.quant_method.process_weights_after_loading(head)


def repack_experts(layer: torch.nn.Module, kernel: Any) -> None:
    """Packs the experts of a mixture for its kernel on a CPU. vLLM does it only when the kernel is made.

    Without this the kernel reads rows of one expert as parts of others, and log-probabilities are off by nats.
    """
    kernel.fused_experts.process_weights_after_loading(layer)


def stands_as_loaded(model: torch.nn.Module, dtype: torch.dtype, loaded: Mapping[str, Checksum | None]) -> bool:
    """Returns whether the model computes with its parameters, and these still have the checksums ``loaded``.

    A tensor without a checksum is not compared: it is a tied head, whose parameter is the embedding's. A model with a
    method that quantizes does not pass, because the method keeps a second copy of its layer's parameters.
    """
    methods = (getattr(layer, "quant_method", None) for layer in model.modules())
    named = (type(method).__name__ for method in methods if isinstance(method, QuantizeMethodBase))
    if not all(name.startswith("Unquantized") for name in named):
        return False
    try:
        standing = checksums(tensors_of(model).of_model(), dtype)
    except (RuntimeError, IndexError, ValueError):  # after packing a parameter has another shape, or is empty
        return False
    return all(standing.get(name) == sums for name, sums in loaded.items() if sums is not None)


def write_in_place(model: torch.nn.Module, delta: KeptDelta) -> None:
    """Writes the changed elements of a delta into the parameters, which must hold the version before it.

    It may raise any error of the model's loader, after some parameters have been changed.
    """
    # Some versions of vLLM that the plugin works with lack this module.
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
        """Returns the facts that the trainer compares at the handshake, as plain JSON."""
        engine, text = self.weight_transfer_engine, self.vllm_config.model_config.hf_text_config
        is_ours = isinstance(engine, FileWeightTransferEngine)
        tied = engine.has_tied_head if is_ours else has_tied_head(self.model_runner.get_model(), text)
        return describe(self.vllm_config, tied=tied)

    def rljax_pull(self, name: str, keep_delta: bool = False) -> None:
        """Begins to pull the version ``name`` into this machine's mirror (``weights.mirror.Pulls.begin``)."""
        self.weight_transfer_engine.weights.pulls.begin(name, keep_delta=keep_delta)

    def rljax_pulled(self, name: str) -> dict[str, Any] | None:
        """Returns the result of the pull of ``name``, or None while it runs (``weights.mirror.Pulls.result``)."""
        return self.weight_transfer_engine.weights.pulls.result(name)

    def rljax_checksums(self) -> dict[str, Any]:
        """Returns tag, checksums and seconds of the last update as plain JSON. Before the first one the tag is empty.

        ``in_place`` says whether not all tensors were loaded, and ``equal`` whether none was.
        """
        loaded: PatchedWeights | None = self.weight_transfer_engine.loaded
        if loaded is None:
            return {"tag": "", "tensors": {}, "seconds": 0.0}
        tensors = {name: sums and dataclasses.astuple(sums) for name, sums in loaded.tensors.items()}
        done = {"in_place": not isinstance(loaded, LoadedWeights), "equal": isinstance(loaded, EqualWeights)}
        return {"tag": loaded.tag, "tensors": tensors, "seconds": loaded.seconds, **done}

    def rljax_end_update(self) -> None:
        """Ends an update that broke off, so that vLLM allows the next one."""
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()
        self.weight_transfer_engine.shutdown()
