"""SGLang without a GPU: ``python -m rljax.rollout.servers.sglang.launch_on_cpu`` and SGLang's own arguments.

SGLang's kernel package has builds for CUDA alone. A stand-in takes its place. Its functions can be imported, and fail
when they are called; the native torch back ends call none of them. The processes that SGLang spawns import this module
again, so that each of them has the stand-in.
"""

from __future__ import annotations

import importlib.machinery
import runpy
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_KERNELS = "sgl_kernel"


class _Kernels(types.ModuleType):
    """A module in which every name is a function that fails."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{_KERNELS}.{name} is not there on a CPU")

        return missing


def stand_in() -> torch.library.Library:
    """Puts the stand-in, and the operators of torchvision that a build without CUDA lacks, where SGLang finds them.

    Returns:
      The library of the operators, which exist for as long as it is kept.
    """
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


_operators = stand_in()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
