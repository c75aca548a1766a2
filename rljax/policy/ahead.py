"""Programs traced for a Hopper GPU that is not here: what JAX would ask the process's own GPU, answered for one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax

from rljax.policy.attention_cudnn import CAPABILITY, CUDNN

_SMS = 132  # streaming multiprocessors of an H100 SXM


class _JaxOfHopper:
    """The module ``jax`` for a kernel that asks the first device for its number of multiprocessors."""

    def devices(self) -> list[Any]:
        return [SimpleNamespace(core_count=_SMS)]

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)


@contextlib.contextmanager
def compiled_for_hopper() -> Iterator[None]:
    """Inside, a program is traced for a Hopper GPU: its compute capability, its cuDNN, its multiprocessors.

    JAX asks the process's own GPU for these; ahead of time there is none, and it would refuse.
    """
    from jax._src.cudnn import fused_attention_stablehlo as attention
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as outer

    answers: list[tuple[Any, dict[str, Any]]] = [
        (attention, {"check_compute_capability": lambda asked: asked <= CAPABILITY}),
        (attention, {"check_cudnn_version": lambda: CUDNN}),
        (outer, {"jax": _JaxOfHopper()}),
    ]
    own = [(module, {name: getattr(module, name) for name in given}) for module, given in answers]
    for module, given in answers:
        vars(module).update(given)
    try:
        yield
    finally:
        for module, given in own:
            vars(module).update(given)
