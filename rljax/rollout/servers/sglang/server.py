"""The command line and environment of an SGLang server, and its start from Python (``rljax serve sglang``).

It needs only the standard library, so that it runs under the trainer's interpreter and under SGLang's.

``python -m rljax.rollout.servers.sglang.server``, with SGLang's own arguments, runs SGLang on a CPU. SGLang's kernel
package has builds only for CUDA, so a stand-in takes its place. The functions of the stand-in can be imported, and
fail when they are called. The native torch back ends call none of them. The processes that SGLang spawns run this
module again, so that each of them has the stand-in.
"""

from __future__ import annotations

import importlib.machinery
import runpy
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rljax.rollout.servers import process
from rljax.rollout.servers.process import start as start

_CPU_ARGS = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
# --max-total-tokens alone sets the size of the cache. --mem-fraction-static is a share of the machine's memory. SGLang
# ends if other programs take more than that share while it loads.
_CPU_ARGS += ["--disable-overlap-schedule", "--mem-fraction-static", "0.5", "--max-total-tokens", "32768"]
_KERNELS = "sgl_kernel"
ANSWER = "rljax"
"""The key of the plugin's answer, which is JSON, among the checksums in a reply of /weights_checker."""
ROOM = 8
"""The number of tokens of the context that SGLang does not give to prompt and response."""


@dataclass(frozen=True)
class SglangConfig(process.ServerConfig):
    """The configuration of an SGLang server."""

    kind: ClassVar[str] = "SGLang"
    gpu_install: ClassVar[str] = "install_sglang in a new environment"
    cpu_environment: ClassVar[Mapping[str, str]] = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    needed_environment: ClassVar[Mapping[str, str]] = {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # otherwise /health samples, and waits during a pause
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # allows a context that is longer by ``ROOM``
    }

    def command(self, port: int, *, gpu: bool) -> list[str]:
        """Returns the SGLang command line on ``port``. ``gpu``: Whether the machine has a GPU."""
        program = "sglang.launch_server" if gpu else "rljax.rollout.servers.sglang.server"
        args = [self.python, "-m", program, "--model-path", self.model, "--served-model-name", "policy"]
        # Without --dtype the key-value cache of a float32 checkpoint would be float16.
        args += ["--port", str(port), "--dtype", self.dtype, "--random-seed", "0"]
        args += ["--max-running-requests", str(self.max_num_seqs), "--skip-tokenizer-init", "--skip-server-warmup"]
        args += ["--sampling-defaults", "openai", "--log-level-http", "warning"]
        if self.max_model_len is not None:
            args += ["--context-length", str(self.max_model_len + ROOM)]
        if self.head_dtype == "float32":
            args.append("--enable-fp32-lm-head")
        if self.batch_invariant:
            args.append("--enable-deterministic-inference")
        return [*args, *([] if gpu else _CPU_ARGS), *self.extra_args, "--host", self.host]


CONFIG = SglangConfig
"""The configuration of this kind of server, under the name that all kinds have."""


class _Kernels(types.ModuleType):
    """A module in which every name is a function that fails."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{_KERNELS}.{name} is not there on a CPU")

        return missing


def stand_in() -> Any:
    """Installs the stand-in for SGLang's kernels, and the torchvision operators that a build without CUDA lacks.

    Returns the library of the operators. They exist only as long as this object is referenced.
    """
    import torch

    if _KERNELS not in sys.modules:
        kernels = _Kernels(_KERNELS)
        kernels.__path__ = []
        kernels.__spec__ = importlib.machinery.ModuleSpec(_KERNELS, None)
        sys.modules[_KERNELS] = kernels
    operators = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        try:
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        except RuntimeError:  # torchvision has them
            continue
    return operators


if __name__ in ("__main__", "__mp_main__"):  # the latter in a process that multiprocessing spawns
    _operators = stand_in()
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
