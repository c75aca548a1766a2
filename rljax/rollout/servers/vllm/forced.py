"""Forced decoding inside a vLLM worker: the tokens of a request replace the tokens that the sampler draws.

A request carries its tokens in ``sampling_params.extra_args``. Two hooks on the sampler replace the drawn tokens by
them, with their log-probabilities at temperature 1. So the server decodes given tokens step by step, through its cache,
in the same way as its own. The hooks exist only while a client needs them. Other requests do not change.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from rljax.rollout.servers.vllm.hooks import Hooks
from rljax.rollout.servers.vllm.server import FORCED_TOKENS


class ForcedSampler(Hooks):
    """The hooks on the sampler of one worker."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner
        self.deadlines: dict[str, float] = {}  # the time at which each client counts as gone (``time.monotonic``)
        self._rows: list[tuple[int, int, torch.Tensor, int]] = []  # (row, token, its log-probability, its rank) each
        self.before(runner.sampler, self._before)
        self.after(runner.sampler, self._after)

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Stores the forced token of each row, with its log-probability and rank, before the sampler draws.

        A token outside the vocabulary ends the forcing with an error. After the last deadline the hooks are removed.
        """
        self._rows = []
        if time.monotonic() > max(self.deadlines.values(), default=0.0):
            self.remove()
            return
        logits = kwargs["logits"] if "logits" in kwargs else args[0]
        for row, name in enumerate(self._runner.input_batch.req_ids[: len(logits)]):
            request = self._runner.requests[name]
            tokens = (getattr(request.sampling_params, "extra_args", None) or {}).get(FORCED_TOKENS, ())
            place = len(request.output_token_ids)
            if place < len(tokens):
                token, logprobs = int(tokens[place]), torch.log_softmax(logits[row].float(), dim=-1)
                if not 0 <= token < len(logprobs):  # the engine would end at it
                    raise ValueError(f"token {token} is outside the vocabulary of {len(logprobs)}")
                rank = int((logprobs >= logprobs[token]).sum())
                self._rows.append((row, token, logprobs[token], rank))

    def _after(self, args: tuple[Any, ...], output: Any) -> None:
        """Replaces drawn tokens by the forced ones that ``_before`` has noted."""
        scored = output.logprobs_tensors
        for row, token, logprob, rank in self._rows:
            output.sampled_token_ids[row, 0] = token
            if scored is not None:
                scored.logprob_token_ids[row, 0] = token
                scored.logprobs[row, 0] = logprob
                scored.selected_token_ranks[row] = rank


class ForcedDecoding:
    """The methods of a worker that begin and end forced decoding."""

    vllm_config: Any
    model_runner: Any
    rljax_forced_sampler: ForcedSampler | None = None

    def rljax_force(self, client: str, seconds: float) -> dict[str, str]:
        """Begins forced decoding for ``client``, for at most ``seconds``. Returns ``way`` and ``reason``.

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
        forced = self.rljax_forced_sampler
        if forced is None or not forced.is_installed:
            forced = self.rljax_forced_sampler = ForcedSampler(runner)
        forced.deadlines[client] = time.monotonic() + seconds
        return {"way": "extra_args", "reason": ""}

    def rljax_end_force(self, client: str) -> str:
        """Ends forced decoding for ``client``. After the last client the hooks are removed.

        Returns the error that has ended the hooks, or "" if there was none.
        """
        forced = self.rljax_forced_sampler
        if forced is None:
            return ""
        forced.deadlines.pop(client, None)
        if not forced.deadlines:
            forced.remove()
            self.rljax_forced_sampler = None
        return forced.error
