"""Forced decoding inside a vLLM worker: the tokens of a request replace the tokens that the sampler draws.

A request carries its tokens in ``sampling_params.extra_args``. Two hooks on the sampler replace the drawn tokens by
them, with their log-probabilities at temperature 1. So the server decodes given tokens step by step, through its cache,
in the same way as its own. Other requests do not change.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from rljax.rollout.servers.vllm.hooks import Hooks
from rljax.rollout.servers.vllm.server import FORCED_TOKENS

IDLE_S = 600.0
"""The time without a forced token after which the hooks are removed (seconds)."""


class ForcedSampler(Hooks):
    """The hooks on the sampler of one worker."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner
        self._used = time.monotonic()  # the time of the last forced token, or of the beginning
        self._rows: list[tuple[int, int, torch.Tensor]] = []  # (row, token, its log-probability) each
        self.before(runner.sampler, self._before)
        self.after(runner.sampler, self._after)

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Stores the forced token of each row, with its log-probability, before the sampler draws.

        A token outside the vocabulary ends the forcing with an error. The hooks go if none was forced for long.
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
        now = time.monotonic()
        if self._rows:
            self._used = now
        elif now - self._used > IDLE_S:
            self.remove()

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
        """Begins forced decoding, until ``IDLE_S`` after the last forced token. Returns ``way`` and ``reason``.

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
