"""vLLM's worker on TPUs: new weights go into the arrays of a running server, and the worker proves which it holds.

tpu-inference is vLLM's backend for TPUs. It answers 200 to ``/update_weights`` and changes nothing. vLLM forbids that
an extension class replaces methods of a worker, so the plugin makes vLLM start :class:`TpuWorker` in place of its own
(``plugin.register``). The models are the ones that tpu-inference defines in flax. Their own loader knows the names,
transposes, paddings and shardings of the tensors.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from tpu_inference.models.jax import llama3
from tpu_inference.models.jax.qwen2 import Qwen2ForCausalLM
from tpu_inference.worker.tpu_worker import TPUWorker

from rljax.rollout.servers.vllm.description import describe
from rljax.rollout.servers.vllm.plugin import read_tensors
from rljax.rollout.servers.vllm.server import BACKEND
from rljax.weights.sums import array_checksum
from rljax.weights.worker import WorkerWeights

SEEN_IN = "0.32.0"
"""The version of tpu-inference whose names this module uses."""
WORKER_NAMES = ("_weight_update_active", "_kv_cache_freed", "start_weight_update", "finish_weight_update")
RUNNER_NAMES = ("model", "mesh", "state", "state_leaves", "refresh_state_leaves")
MODEL_NAMES = ("load_weights", "named_parameters")
ORDER = "permute_dims"
"""The names that the worker uses: of tpu-inference's worker, of its runner, of a model, and an argument of the function
``weight_loader`` that each parameter has in its metadata."""


class LlamaAsQwen2(Qwen2ForCausalLM):
    """Llama as Qwen2 without biases. The Llama of tpu-inference loads only files."""

    def __init__(self, config: Any, key: jax.Array, mesh: Any) -> None:
        super().__init__(config, key, mesh)
        for layer in self.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.bias = None


class TpuWorker(TPUWorker):
    """A worker whose model gets new weights in place. All methods but vLLM's own are for ``/collective_rpc``."""

    rljax_weights: WorkerWeights
    rljax_tag = ""  # the tag of the version that the last update brought
    rljax_is_mixed = False  # whether an update broke off, so that some arrays are new and others old

    def load_model(self) -> None:
        """Loads the model that the server was started with. Raises the errors of ``check_names``."""
        llama3.LlamaForCausalLM, settings = LlamaAsQwen2, self.model_config.hf_config
        if not hasattr(settings, "text_config"):  # a Qwen2 whose head is not tied asks there for its width
            settings.text_config = copy.copy(settings)
        super().load_model()
        runner, dtype = self.model_runner, str(self.model_config.dtype).removeprefix("torch.")
        check_names(self, runner, runner.model)
        # The loader keeps the dtype of the files, and the programs would be compiled for it.
        bind(runner, jax.tree.map(lambda leaf: leaf.astype(dtype), runner.state))
        self.rljax_weights = WorkerWeights()
        leaves = jax.tree.leaves(runner.state)
        self.rljax_layout = jax.tree.structure(runner.state), [(x.shape, x.dtype, x.sharding) for x in leaves]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Stores where a trainer's versions are (``WorkerWeights.show``)."""
        self.rljax_weights.show(**init_info)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads one version, ``{"path": ..., "tag": ...}`` as ``WorkerWeights.version`` takes it.

        After an error the arrays are mixed, and the session stays open until a whole version has loaded.
        """
        if not self._weight_update_active:
            raise RuntimeError("/update_weights came before /start_weight_update")
        self.rljax_tag = ""
        with self.rljax_weights.version(**update_info) as (directory, files):
            self.rljax_is_mixed = True
            load_in_place(self.model_runner, self.rljax_layout, read_tensors(directory, files))
        self.rljax_tag, self.rljax_is_mixed = update_info["tag"], False

    def finish_weight_update(self) -> None:
        """Ends the session with an empty key-value cache. Raises RuntimeError if the arrays are mixed."""
        if self.rljax_is_mixed:
            raise RuntimeError("the last weight update broke off and left mixed weights: publish a version again")
        super().finish_weight_update()

    def rljax_end_update(self) -> None:
        """Ends an update that broke off, so that vLLM allows the next one. There is no key-value cache until then."""
        self._weight_update_active = False

    def rljax_describe(self) -> dict[str, Any]:
        """Returns the facts that the trainer compares at the handshake, as plain JSON."""
        tied = "lm_head.weight" not in dict(self.model_runner.model.named_parameters())
        # tpu-inference reads no setting of the head's dtype, and this worker takes no other backend than itself.
        own = {"backend": BACKEND, "batch_invariant": False, "is_broken": self._kv_cache_freed}
        said = describe(self.vllm_config, tied=tied)
        return said | own | {"head_dtype": said["dtype"]}

    def rljax_pull(self, name: str) -> dict[str, Any] | None:
        """Pulls the version ``name`` into this machine's mirror. Returns None until that is done (``Pulls.pulled``)."""
        return self.rljax_weights.pulls.pulled(name)

    def rljax_checksums(self) -> dict[str, Any]:
        """Returns tag, checksums and seconds of the last update as plain JSON. The tag is empty unless it succeeded."""
        if not self.rljax_tag:
            return {"tag": "", "tensors": {}, "seconds": 0.0}
        began, held = time.monotonic(), published_tensors(self.model_runner)
        tensors = {name: dataclasses.astuple(array_checksum(array)) for name, array in held}
        return {"tag": self.rljax_tag, "tensors": tensors, "seconds": time.monotonic() - began}


def check_names(worker: Any, runner: Any, model: Any) -> None:
    """Raises RuntimeError, with the names, if tpu-inference lacks some that this module uses."""
    asked = {"worker": (worker, WORKER_NAMES), "runner": (runner, RUNNER_NAMES), "model": (model, MODEL_NAMES)}
    missing = [
        f"{name} of the {what}" for what, (owner, names) in asked.items() for name in names if not hasattr(owner, name)
    ]
    if not missing:
        missing = [
            f"{ORDER} of the weight_loader of {name}"
            for name, parameter in model.named_parameters()
            if ORDER not in getattr(parameter.get_metadata().get("weight_loader"), "keywords", {})
        ]
    if missing:
        said = f"tpu-inference has changed: rljax needs {missing[0]} as version {SEEN_IN} has it"
        raise RuntimeError(f"{said}; install vllm-tpu=={SEEN_IN} (install_vllm --tpu in a checkout)")


@contextlib.contextmanager
def programs_kept() -> Iterator[None]:
    """Keeps compiled programs in a ``with`` block, where tpu-inference's loader would drop them after each layer."""
    clear, jax.clear_caches = jax.clear_caches, lambda: None
    try:
        yield
    finally:
        jax.clear_caches = clear


def load_in_place(runner: Any, layout: tuple[Any, list[tuple[Any, ...]]], tensors: Iterable[tuple[str, Any]]) -> None:
    """Loads (name, torch tensor) pairs into the runner's model. Each array keeps the shape, dtype and sharding that
    ``layout`` has for it.

    Only the model holds the old arrays meanwhile, so each goes when its new one comes. RuntimeError is raised if an
    array would become another one.
    """
    structure, arrays = layout
    model = runner.model
    runner.state = runner.state_leaves = None
    with programs_kept(), jax.set_mesh(runner.mesh):
        model.load_weights(tensors)
    state = nnx.split(model)[1]
    if jax.tree.structure(state) != structure:
        raise RuntimeError("the loader changed the structure of the model")
    leaves = []
    for leaf, (shape, dtype, sharding) in zip(jax.tree.leaves(state), arrays, strict=True):
        if (leaf.shape, leaf.dtype) != (shape, dtype):
            raise RuntimeError(f"a parameter came as {leaf.dtype} {leaf.shape}, expected {dtype} {shape}")
        leaves.append(leaf if leaf.sharding == sharding else jax.device_put(leaf, sharding))
    bind(runner, jax.tree.unflatten(structure, leaves))


def bind(runner: Any, state: Any) -> None:
    """Makes ``state`` the arrays of the runner, its model and its programs. Returns once they are there."""
    runner.state = state
    nnx.update(runner.model, state)
    runner.refresh_state_leaves()
    jax.block_until_ready(runner.state_leaves)


def published_tensors(runner: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the Hugging Face name of each tensor, and its array with axes in the order of Hugging Face's files.

    The arrays are the ones that the compiled programs get.
    """
    state = jax.tree.unflatten(jax.tree.structure(runner.state), runner.state_leaves)
    own = dict(runner.model.named_parameters())
    for name, parameter in nnx.merge(nnx.graphdef(runner.model), state).named_parameters():
        array = np.asarray(jax.device_get(parameter.get_value()))
        order = own[name].get_metadata()["weight_loader"].keywords[ORDER]
        if order is None:  # the loader's own choice for these
            order = range(array.ndim)[::-1]
        yield name, array.transpose(np.argsort(order))
