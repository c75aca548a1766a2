"""The values of the operations of a running vLLM server, from hooks that its plugin puts in for one request."""

from __future__ import annotations

import math
import os
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from rljax.compare.layers.operations import OperationValues, operations, value_shapes
from rljax.policy.families import read_config
from rljax.rollout.servers.fleet import Fleet
from rljax.rollout.servers.vllm.client import GENERATE, VllmBackend
from rljax.rollout.servers.vllm.server import GIVEN, PROBE
from rljax.rollout.types import ClientLimits, RolloutConfig

_TIMEOUT_S = 300.0


class VllmTracer:
    """A vLLM server that shows the values of its operations by hooks, which its plugin puts in for one request."""

    def __init__(self, url: str, directory: str | os.PathLike[str] | None) -> None:
        """Asks the server for its description. ``directory`` is used if its model directory cannot be read here.

        Raises:
          ValueError: The server has no plugin, or its model directory cannot be read and ``directory`` is None.
          ServerError: The server does not answer.
        """
        backend = VllmBackend()
        self._fleet = Fleet(RolloutConfig(urls=(url,), limits=ClientLimits(request_timeout_s=_TIMEOUT_S)), backend)
        (self._server,) = self._fleet.servers
        try:
            info = self._fleet.wait(backend.describe(self._server))
            if not info.dtype:
                raise ValueError(f"{url}: {backend.without_plugin}")
            readable = (Path(info.root) / "config.json").is_file()
            if not readable and directory is None:
                raise ValueError(f"{url}: its model directory {info.root} cannot be read here, so --model is needed")
            self.config = read_config(Path(info.root if readable else directory or ""))
        except BaseException:
            self._fleet.close()
            raise
        self._backend, self._model = backend, info.model
        self.label, self.dtype = f"vllm:{info.dtype}", info.dtype

    def run(self, tokens: np.ndarray, given: Mapping[str, np.ndarray]) -> OperationValues:
        """Computes one sequence (``Tracer.run``) by one request.

        Raises:
          ValueError: The server cannot show its operations. The message says why.
          ServerError: The server does not answer, or refuses the request.
        """
        request = f"rljax-layers-{uuid.uuid4().hex}"
        with tempfile.TemporaryDirectory(prefix="rljax-layers-", ignore_cleanup_errors=True) as made:
            directory = Path(made)  # only this user can read it
            (directory / PROBE).write_text(request)
            if given:
                save_file({name: np.ascontiguousarray(value) for name, value in given.items()}, directory / GIVEN)
            self._check(self._ask("rljax_tap", str(directory), request))
            try:
                self._compute(tokens, request)
            finally:
                answers = self._ask("rljax_untap")
            self._check(answers)
            ranks = [load_file(directory / f"rank{rank}.safetensors") for rank in range(len(answers))]
        shapes = value_shapes(self.config)
        found = {op.name: _joined(ranks, op.name, math.prod(shapes[op.name])) for op in operations(self.config)}
        values = {name: value for name, value in found.items() if value is not None}
        short = [name for name, value in values.items() if len(value) != len(tokens) - (name == "logits")]
        if short or "logits" not in values:
            fault = f"{len(tokens)} tokens: {short or 'no logits'}"
            raise ValueError(f"the values that {self._server.url} recorded do not fit {fault}")
        return values

    def close(self) -> None:
        """Closes the connection to the server."""
        self._fleet.close()

    def _compute(self, tokens: np.ndarray, request: str) -> None:
        """Sends the sequence as a prompt. Its keys and values stay out of the prefix cache of other requests."""
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "ignore_eos": True}
        body = {"model": self._model, "token_ids": tokens.tolist(), "sampling_params": sampling}
        extra = {"request_id": request, "cache_salt": request}
        self._fleet.wait(self._server.call("POST", GENERATE, timeout_s=_TIMEOUT_S, json=body | extra))

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        return self._fleet.wait(self._backend.ask_plugin(self._server, method, *arguments))

    def _check(self, answers: list[Any]) -> None:
        errors = [answer["error"] for answer in answers if answer["error"]]
        if errors:
            raise ValueError(f"{self._server.url} cannot show its operations: {errors[0]}")


def _joined(ranks: list[dict[str, np.ndarray]], name: str, width: int) -> np.ndarray | None:
    """Joins the parts of a value that the workers hold. Workers may hold equal parts. None: no worker has it."""
    if name not in ranks[0]:
        return None
    parts = max(1, width // ranks[0][name].shape[1])
    each = [ranks[i * len(ranks) // parts][name] for i in range(parts)]
    return np.concatenate(each, axis=1)[:, :width]
