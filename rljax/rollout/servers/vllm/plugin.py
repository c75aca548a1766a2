"""The part of rljax that runs inside vLLM's processes: weights from files, and a description of the server.

vLLM calls :func:`register` in each of its processes through the entry-point group ``vllm.general_plugins``. It makes
the weight-transfer backend ``rljax_file`` known, which reads safetensors from a directory that trainer and server both
see. :class:`WorkerExtension` (``--worker-extension-cls``) answers the handshake, and returns checksums of weights.

There is no jax in vLLM's environment, so this module imports nothing that needs it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import is_torchvision_available
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from rljax.rollout.servers.loaded import ModelTensors, has_tied_head
from rljax.rollout.servers.vllm.description import describe, describe_tokens
from rljax.rollout.servers.vllm.hooks import ForcedDecoding
from rljax.rollout.servers.vllm.server import BACKEND
from rljax.rollout.servers.vllm.taps import TapMethods
from rljax.weights.format import Checksum
from rljax.weights.sums import as_published, tensor_checksum
from rljax.weights.worker import WorkerWeights

TPU_MODELS = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")
"""The models of tpu-inference whose weights rljax's worker replaces."""


def register() -> None:
    """Registers the weight-transfer backend and asks for AMX. vLLM may call it several times in one process.

    On a TPU it only makes vLLM take rljax's worker.

    vLLM's bfloat16 attention on a CPU uses AMX tiles, but does not ask Linux for the permission. A process without it
    dies of SIGILL. If torch lacks the private functions that ask, nothing is asked.
    """
    if current_platform.is_tpu():
        take_tpu_worker(current_platform.__class__)
        return
    stand_in_for_torchvision()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransferEngine)
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    request = getattr(torch.cpu, "_init_amx", None)
    if supported is not None and request is not None and supported():
        request()


@functools.cache
def stand_in_for_torchvision() -> None:
    """Makes an empty ``torchvision.transforms.v2.functional`` if torchvision is missing, as in the build for CPUs.

    vLLM's file of Qwen3.5 imports it for images, also for a model of text alone. transformers is asked before whether
    torchvision is there, and keeps its answer.
    """
    if is_torchvision_available() or importlib.util.find_spec("torchvision") is not None:
        return
    names, above = ("torchvision", "transforms", "v2", "functional"), None
    for count in range(1, len(names) + 1):
        name = ".".join(names[:count])
        module = sys.modules[name] = importlib.util.module_from_spec(ModuleSpec(name, None, is_package=True))
        if above is not None:
            setattr(above, names[count - 1], module)
        above = module


@functools.cache
def take_tpu_worker(platform: Any) -> None:
    """Makes vLLM start :class:`rljax.rollout.servers.vllm.tpu.TpuWorker` on a TPU, or refuse what it cannot do."""
    update_config = platform.check_and_update_config

    def check_and_update_config(config: Any) -> None:
        update_config(config)
        if config.model_config is None:  # a default of vLLM's, which nobody serves
            return
        if reasons := tpu_refusals(config):
            raise ValueError(f"rljax does not serve this on a TPU: {'; '.join(reasons)}")
        if getattr(config.model_config, "word_embeddings_untied_by_checkpoint", False):
            # vLLM ties the head again if the files hold the embedding twice. tpu-inference does not, and trainers
            # publish the embedding alone.
            for settings in (config.model_config.hf_config, config.model_config.hf_text_config):
                settings.tie_word_embeddings = True
        config.parallel_config.worker_cls = "rljax.rollout.servers.vllm.tpu.TpuWorker"

    platform.check_and_update_config = staticmethod(check_and_update_config)


def tpu_refusals(config: Any) -> list[str]:
    """Returns what a server's ``VllmConfig`` has that rljax's worker cannot do on a TPU, each with a remedy."""
    from tpu_inference import envs
    from tpu_inference.models.common.model_loader import resolve_model_impl_type

    model, parallel, text = config.model_config, config.parallel_config, config.model_config.hf_text_config
    workers, head_dim, vocab = parallel.tensor_parallel_size, model.get_head_size(), model.get_vocab_size()
    heads = getattr(text, "num_key_value_heads", text.num_attention_heads)
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    architecture, dtype = model.architecture, str(model.dtype).removeprefix("torch.")
    in_torch = architecture in TPU_MODELS and resolve_model_impl_type(config) != "flax_nnx"
    found = {
        f"the model {architecture} (it takes {', '.join(TPU_MODELS)})": architecture not in TPU_MODELS,
        "a model in torch (leave out MODEL_IMPL_TYPE)": in_torch,
        f"rotary embeddings of the type {rope} (it takes default and llama3)": rope not in ("default", "llama3"),
        f"quantized weights, {model.quantization} (leave out --quantization)": model.quantization is not None,
        f"the dtype {dtype} (give bfloat16 or float32)": dtype not in ("bfloat16", "float32"),
        "LoRA (leave out --enable-lora)": config.lora_config is not None,
        "speculative decoding (leave out --speculative-config)": config.speculative_config is not None,
        "pipeline parallelism (leave out --pipeline-parallel-size)": parallel.pipeline_parallel_size > 1,
        "data parallelism (start a server for each replica)": parallel.data_parallel_size > 1,
        "several hosts (leave out TPU_MULTIHOST_BACKEND)": bool(envs.TPU_MULTIHOST_BACKEND),
        "--worker-extension-cls (leave it out: the plugin brings its own worker)": bool(parallel.worker_extension_cls),
        f"{heads} key-value heads on {workers} devices (give a divisor as --tensor-parallel-size)": heads % workers > 0,
        # tpu-inference pads the vocabulary, and samples the padding, too.
        f"{vocab} tokens on {workers} devices (give a divisor as --tensor-parallel-size)": vocab % workers > 0,
        f"heads of {head_dim} (it takes 64 and multiples of 128)": head_dim != 64 and head_dim % 128 > 0,
    }
    return [reason for reason, is_there in found.items() if is_there]


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """The arguments of ``WorkerWeights.show``, by which a trainer shows where its versions will be."""

    probe_path: str
    probe_text: str
    protocol: int
    source: str = ""
    version_bytes: int = 0


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """The version of the weights that an update loads."""

    path: str  # the directory of the version; "" for this machine's own mirror, which must hold the version already
    tag: str  # the tag that the version must have


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """The backend that reads a version's safetensors tensor by tensor and reloads the model in place."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    loaded: LoadedWeights | None = None  # the checksums of the last finished update
    _loading: LoadedWeights | None = None  # the checksums of the update under way

    @functools.cached_property
    def weights(self) -> WorkerWeights:
        """The directories and the mirror from which this worker may load weights."""
        return WorkerWeights()

    @functools.cached_property
    def has_tied_head(self) -> bool:
        """Whether the LM head multiplies with the embedding table. It is first read before any update."""
        return has_tied_head(self.model, self.model_config.hf_text_config)

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Stores where a trainer's versions will be, after a check of the protocol and of the trainer's probe file.

        Raises ValueError if protocol or file is not the trainer's, and RuntimeError if the mirror has too little room.
        """
        self.weights.show(**dataclasses.asdict(init_info))

    def start_weight_update(self) -> None:
        """Forgets the last update. The layers are prepared later, once the version is known."""
        self.shutdown()
        self.loaded = None

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Loads one version.

        Raises ValueError if it has another tag, cannot be loaded, or lies in no directory that a trainer has shown.
        """
        with self.weights.version(update_info.path, update_info.tag) as (directory, files):
            tied = self.has_tied_head  # While the model loads, no two layers share a parameter.
            initialize_layerwise_reload(self.model)
            self._loading = LoadedWeights(self.model, self.model_config.dtype, update_info.tag, tied=tied)
            try:
                self.model.load_weights(read_tensors(directory, files))
            except BaseException:
                self.shutdown()
                raise

    def finish_weight_update(self) -> None:
        """Makes the layers usable again, the tied head included, and computes the missing checksums.

        After an update without weights it does nothing.
        """
        if self._loading is None:
            return
        try:
            finalize_layerwise_reload(self.model, self.model_config)
            if self._loading.tied:
                repair_tied_head(self.model)
            self._loading.finish()
            self.loaded = self._loading
        finally:
            self.shutdown()

    def shutdown(self) -> None:
        """Ends the update under way, and removes the hooks that it has put before the layers' packing."""
        if self._loading is not None:
            self._loading.detach()
        self._loading = None


class LoadedWeights:
    """The checksums of all parameters as they were loaded. Each is computed just before its layer packs the parameter.

    vLLM loads a layer, lets its quantization method pack it, and copies the result into the old memory. A layer without
    new weights still has its old values then. So each checksum is computed just before the method packs. A layer
    without a method packs nothing and is read at the end.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, tag: str, *, tied: bool) -> None:
        """Puts a hook before each layer's packing, until :meth:`detach`.

        ``dtype``: The dtype of the published weights. ``tag``: The version's tag. ``tied``: See ``has_tied_head``.
        """
        self._model = ModelTensors(model, getattr(model, "packed_modules_mapping", {}))  # with vLLM's fused layers
        self._dtype, self.tied, self.tag = dtype, tied, tag
        self.tensors: dict[str, Checksum | None] = {}  # the checksums by Hugging Face name; None: not loaded
        self.seconds = 0.0  # the time that the checksums took
        methods = {layer: getattr(layer, "quant_method", None) for layer in model.modules()}
        self._unpacked = {
            layer: method if isinstance(method, QuantizeMethodBase) else None for layer, method in methods.items()
        }
        self._methods = {id(method): method for method in self._unpacked.values() if method is not None}
        for method in self._methods.values():
            method.process_weights_after_loading = self._before(method.process_weights_after_loading)

    def detach(self) -> None:
        """Removes the hooks. It may be called twice."""
        for method in self._methods.values():
            vars(method).pop("process_weights_after_loading", None)
        self._methods = {}

    def finish(self) -> None:
        """Adds the checksums of layers that pack nothing. Layers that should have been packed but were not get None.

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
        for name, tensor in self._model.of_layer(layer):
            self.tensors[name] = tensor_checksum(as_published(tensor, self._dtype))
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


class WorkerExtension(ForcedDecoding, TapMethods):
    """The methods that vLLM's workers gain. Clients call them through ``/collective_rpc``."""

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

    def rljax_describe_tokens(self) -> dict[str, Any]:
        """Returns the end-of-sequence tokens and a hash of the tokenizer, as plain JSON."""
        return describe_tokens(self.vllm_config.model_config)

    def rljax_pull(self, name: str) -> dict[str, Any] | None:
        """Pulls the version ``name`` into this machine's mirror. Returns None until that is done (``Pulls.pulled``)."""
        return self.weight_transfer_engine.weights.pulls.pulled(name)

    def rljax_checksums(self) -> dict[str, Any]:
        """Returns tag, checksums and seconds of the last update as plain JSON. The tag is empty unless it succeeded."""
        loaded: LoadedWeights | None = self.weight_transfer_engine.loaded
        if loaded is None:
            return {"tag": "", "tensors": {}, "seconds": 0.0}
        tensors = {name: sums and dataclasses.astuple(sums) for name, sums in loaded.tensors.items()}
        return {"tag": loaded.tag, "tensors": tensors, "seconds": loaded.seconds}

    def rljax_end_update(self) -> None:
        """Ends an update that broke off, so that vLLM allows the next one."""
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()
        self.weight_transfer_engine.shutdown()
