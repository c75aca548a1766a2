"""Hooks on the modules of a vLLM worker, which are removed together and never end its server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger(__name__)


class Hooks:
    """Hooks on modules. The first error inside a hook removes all hooks, and the forward goes on without them."""

    def __init__(self) -> None:
        self.error = ""  # the error that ended the hooks, or ""
        self._handles: list[Any] = []

    def before(self, module: torch.nn.Module, act: Callable[[Any, Any], Any]) -> None:
        """Adds a hook that calls ``act(args, kwargs)`` before each forward of ``module``.

        ``act`` returns the (args, kwargs) that take the place of the two, or None to keep them.
        """
        hook = self._safe(lambda module, args, kwargs: act(args, kwargs))
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after(self, module: torch.nn.Module, act: Callable[[Any, Any], Any]) -> None:
        """Adds a hook that calls ``act(args, output)`` after each forward of ``module``.

        ``act`` returns the output that takes the place of ``output``, or None to keep it.
        """
        hook = self._safe(lambda module, args, output: act(args, output))
        self._handles.append(module.register_forward_hook(hook))

    def remove(self) -> None:
        """Removes all hooks. It may be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _safe(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a hook that never raises. After an error it does nothing."""

        def hook(*args: Any) -> Any:
            if self.error:  # another hook has failed in the same forward
                return None
            try:
                return act(*args)
            except Exception as error:  # an error would end the server
                self.error = f"{type(error).__name__}: {error}"
                log.warning("the hooks of rljax are removed, nothing else changes: %s", self.error)
                self.remove()
                return None

        return hook
