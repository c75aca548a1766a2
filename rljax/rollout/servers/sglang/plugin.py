"""The part of rljax that runs inside SGLang's processes: it guards the weights, and describes the server.

SGLang calls :func:`register` in each of its processes through the entry-point group ``sglang.srt.plugins``. It wraps
three functions of SGLang:

- ``ModelRunner.check_weights``, behind ``/weights_checker``: :class:`Worker` answers the actions ``rljax_*``.
- ``update_weights_from_disk`` of the scheduler. It loads a version only from a directory that a trainer has shown, and
  only under its tag.
- ``ModelConfig._get_hf_eos_token_id``: The model's end-of-sequence tokens are dropped. They would end responses
  besides the tokens that a request names.

With a key file ``rljax.weights.access`` guards every route. There is no jax in SGLang's environment.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import sglang
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from rljax.rollout.servers.loaded import ModelTensors, described_shape, has_tied_head
from rljax.rollout.servers.sglang.server import ANSWER, ROOM
from rljax.weights.access import KEY_FILE, RequireKey
from rljax.weights.format import PROTOCOL
from rljax.weights.sums import tensor_checksum
from rljax.weights.worker import WorkerWeights

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Worker:
    """The plugin's answers in one scheduler process of SGLang, and the weights that the process may load."""

    def __init__(self) -> None:
        self.weights = WorkerWeights()
        self.tag = ""  # the tag of the last loaded version; "" before the first update and after a failed one

    def rljax_describe(self, runner: Any) -> dict[str, Any]:
        """Returns the facts that the trainer compares at the handshake, as plain JSON."""
        model, args = runner.model_config, runner.server_args
        dtype, text = _name(model.dtype), model.hf_text_config
        return {
            "protocol": PROTOCOL,
            "sglang": sglang.__version__,
            "dtype": dtype,
            "kv_cache_dtype": _name(runner.kv_cache_dtype),
            "head_dtype": "float32" if args.enable_fp32_lm_head else dtype,
            "quantization": model.quantization,
            "batch_invariant": bool(getattr(args, "enable_deterministic_inference", False)),
            "max_model_len": min(model.context_len, runner.max_total_num_tokens) - ROOM,
            "block_size": runner.page_size or 1,
            "has_prefix_cache": not args.disable_radix_cache,
            "preferred_sampling": args.preferred_sampling_params,
            "shape": described_shape(text, model.head_dim, tied=has_tied_head(runner.model, text)),
        }

    def rljax_show(self, runner: Any, probe: Mapping[str, Any]) -> None:
        """Stores where a trainer's versions are. ``probe`` has the arguments of ``WorkerWeights.show``."""
        self.weights.show(**probe)

    def rljax_pull(self, runner: Any, name: str) -> dict[str, Any] | None:
        """Pulls the version ``name`` into this machine's mirror. Returns None until that is done (``Pulls.pulled``)."""
        return self.weights.pulls.pulled(name)

    def rljax_checksums(self, runner: Any) -> dict[str, Any]:
        """Returns the tag, the checksum of each tensor as it is now, and the seconds that the checksums took."""
        began, parts = time.monotonic(), ModelTensors(runner.model, _FUSED).of_model()
        tensors = {name: dataclasses.astuple(tensor_checksum(part)) for name, part in parts}
        return {"tag": self.tag, "tensors": tensors, "seconds": time.monotonic() - began}

    def check_weights(self, original: Callable[..., Any], runner: Any, action: str, *args: Any, **kwargs: Any) -> Any:
        """Wraps ``ModelRunner.check_weights``, and calls a method ``rljax_*`` if ``action`` names one.

        The request's list of tensors to skip carries the arguments of the method, each as JSON.
        """
        if not action.startswith("rljax_"):
            return original(runner, action, *args, **kwargs)
        given = [json.loads(argument) for argument in kwargs.get("skip_tensor_list") or ()]
        answer = json.dumps(getattr(self, action)(runner, *given))
        names = ("tp_rank", "tp_size", "dp_rank", "dp_size", "pp_rank", "pp_size", "rank", "size")
        place = {"role": kwargs.get("role", "target"), **dict.fromkeys(names, 0)}
        return {"checksums": {ANSWER: answer}, "per_gpu_checksum": "", "parallelism_info": place}

    def update_weights(self, original: Callable[..., Any], updater: Any, request: Any) -> Any:
        """Wraps ``update_weights_from_disk``, and loads only versions in places that a trainer has shown."""
        self.tag = ""
        try:
            with self.weights.version(request.model_path, request.weight_version or "") as (directory, _):
                request.model_path = str(directory)
                done = original(updater, request)
        except Exception as error:  # SGLang loads files with an error a second time, which would end its scheduler
            message = f"{type(error).__name__}: {error}"
            return UpdateWeightFromDiskReqOutput(success=False, message=message, num_paused_requests=0)
        if done.success:
            self.tag = request.weight_version
        return done


def register() -> None:
    """Registers the hooks of this process, which SGLang then puts around its functions."""
    worker = Worker()
    scheduler = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    hooks: dict[str, Callable[..., Any]] = {
        "model_executor.model_runner.ModelRunner.check_weights": worker.check_weights,
        f"{scheduler}.update_weights_from_disk": worker.update_weights,
        "configs.model_config.ModelConfig._get_hf_eos_token_id": no_eos,
    }
    if os.environ.get(KEY_FILE):
        hooks["entrypoints.http_server._setup_and_run_http_server"] = lock
    for name, hook in hooks.items():
        HookRegistry.register(f"sglang.srt.{name}", hook, HookType.AROUND)


def no_eos(original: Callable[..., Any], config: Any) -> set[int]:
    """Returns no end-of-sequence token, so that only the tokens that a request names end its response."""
    return set()


def lock(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps the start of the HTTP server, and makes every route but /health ask for the key."""
    from sglang.srt.entrypoints.http_server import app

    app.add_middleware(RequireKey)
    return original(*args, **kwargs)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
