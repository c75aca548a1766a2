"""Hooks on the modules of a vLLM worker, which are removed together and never end its server.

Forced decoding is made of them: the tokens of a request replace the tokens that the sampler draws. A request carries
its tokens in ``sampling_params.extra_args``. Two hooks on the sampler replace the drawn tokens by them, with their
log-probabilities at temperature 1. So the server decodes given tokens step by step, through its cache, in the same way
as its own. Other requests do not change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from rljax.rollout.servers.vllm.server import FORCED_TOKENS

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


class ForcedSampler(Hooks):
    """The hooks of forced decoding, on the sampler of one worker."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner
        self._rows: list[tuple[int, int, torch.Tensor]] = []  # (row, token, its log-probability) each
        self.before(runner.sampler, self._before)
        self.after(runner.sampler, self._after)

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Stores the forced token of each row, with its log-probability, before the sampler draws.

        A token outside the vocabulary ends the forcing with an error.
        """
        self._rows = []
        logits = kwargs["logits"] if "logits" in kwargs else args[0]
        for row, name in enumerate(self._runner.input_batch.req_ids[: len(logits)]):
            request = self._runner.requests[name]
            tokens = (getattr(request.sampling_params, "extra_args", None) or {}).get(FORCED_TOKENS, ())
            place = len(request.output_token_ids)
            if place < len(tokens):
                token, logprobs = int(tokens[place]), torch.log_softmax(logits[row].float(), dim=-1)
                if not 0 <= token < len(logprobs):  # the engine would end at it
                    raise ValueError(f"token {token} is outside the vocabulary of {len(logprobs)}")
                self._rows.append((row, token, logprobs[token]))

    def _after(self, args: tuple[Any, ...], output: Any) -> None:
        """Replaces drawn tokens by the forced ones that ``_before`` has noted."""
        scored = output.logprobs_tensors
        for row, token, logprob in self._rows:
            output.sampled_token_ids[row, 0] = token
            if scored is not None:
                scored.logprob_token_ids[row, 0] = token
                scored.logprobs[row, 0] = logprob


class ForcedDecoding:
    """The method of a worker that begins forced decoding."""

    vllm_config: Any
    model_runner: Any
    rljax_forced_sampler: ForcedSampler | None = None

    def rljax_force(self) -> dict[str, str]:
        """Begins forced decoding, until an error or the server's end. Returns ``way`` and ``reason``.

        ``way`` names the sampling setting that carries the tokens: extra_args for the hooks, trace_decode_token_ids for
        vLLM's own trace replay. If it is empty, ``reason`` says why this server cannot decode given tokens.
        """
        runner = self.model_runner
        if self.vllm_config.speculative_config is not None:
            return {"way": "", "reason": "it decodes with speculation (--speculative-config)"}
        if not (hasattr(runner, "input_batch") and hasattr(runner, "requests")):  # Model Runner V2
            if getattr(self.vllm_config.model_config, "enable_trace_replay", False):
                return {"way": "trace_decode_token_ids", "reason": ""}
            return {"way": "", "reason": "its Model Runner V2 needs --enable-trace-replay for that"}
        if self.rljax_forced_sampler is not None:
            self.rljax_forced_sampler.remove()
        self.rljax_forced_sampler = ForcedSampler(runner)
        return {"way": "extra_args", "reason": ""}
