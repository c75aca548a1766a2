"""Hooks inside a vLLM worker that record the results of one request's operations, or replace them by given values.

They exist only between ``rljax_tap`` and ``rljax_untap``, so otherwise a server is as fast as without them. No hook
raises: the first error ends the recording and leaves the server as it was. A recording that is not ended is removed
after ``EXPIRES_S`` seconds, before the next forward.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rljax.rollout.servers.vllm.hooks import Hooks
from rljax.rollout.servers.vllm.server import GIVEN, PROBE

EXPIRES_S = 120.0
_OUTPUTS = {
    "self_attn.qkv_proj": ("query", "key", "value"),
    "self_attn.q_norm": ("query_norm",),
    "self_attn.k_norm": ("key_norm",),
    "self_attn.attn": ("attention",),
    "self_attn.o_proj": ("attention_output",),
    "linear_attn.in_proj_qkvz": ("delta_qkv", "delta_gate"),
    "linear_attn.in_proj_ba": ("delta_rate", "delta_step"),
    "linear_attn.out_proj": ("attention_output",),
    "mlp.gate_up_proj": ("gate", "up"),
    "mlp.act_fn": ("activation",),
    "mlp": ("mlp",),
}
"""The operations that a module of a block computes, beside each other in its output, by the name of the module."""
_INPUTS = {
    "self_attn.attn": ("query_rope", "key_rope"),
    "self_attn.o_proj": ("gated_attention",),
    "linear_attn.norm": ("delta_rule",),  # one kernel computes the convolution and the rule
    "linear_attn.out_proj": ("gated_norm",),
}
"""The operations whose values are the first inputs of a module."""


def refusal(config: Any, runner: Any) -> str:
    """Returns the reason why the operations of a worker cannot be recorded, or "" if they can."""
    compilation = config.compilation_config
    if int(compilation.mode or 0) or not config.model_config.enforce_eager:
        return (
            f"its model is compiled or captured in graphs (compilation mode {compilation.mode!s}), where hooks do not "
            "run: start it with --enforce-eager"
        )
    if config.parallel_config.pipeline_parallel_size > 1:
        return "its layers are split over pipeline stages, expected one stage"
    if not hasattr(runner, "input_batch") or not hasattr(runner, "query_start_loc"):
        return "its model runner does not tell which rows belong to a request: start it with VLLM_USE_V2_MODEL_RUNNER=0"
    layers = getattr(getattr(runner.model, "model", None), "layers", None)
    if layers is None or not hasattr(runner.model, "logits_processor"):
        return f"its model {type(runner.model).__name__} is not of a family whose operations are known"
    if config.parallel_config.tensor_parallel_size > 1 and any(hasattr(layer, "linear_attn") for layer in layers):
        return "its delta nets are split over workers, expected --tensor-parallel-size 1"
    return ""


class Taps(Hooks):
    """The hooks of one recording. Values have the shape [tokens of this request, features of this worker]."""

    def __init__(self, runner: Any, directory: Path, request: str, rank: int, workers: int) -> None:
        """Installs the hooks in the model runner of worker ``rank`` of ``workers`` that share the model.

        ``directory`` has the files of the recording: ``PROBE``, and ``GIVEN`` if values are replaced. ``request`` is a
        part of the id of the request that is recorded.
        """
        super().__init__()
        self._runner, self._request, self._rank, self._workers = runner, request, rank, workers
        self._directory = directory
        given = directory / GIVEN
        self._given = load_file(given) if given.exists() else {}
        self._parts: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._rows = self._positions = torch.empty(0, dtype=torch.long)  # the request's rows in this forward
        self._final: torch.Tensor | None = None  # the output of the final norm for all rows of this forward
        self._ends = time.monotonic() + EXPIRES_S
        try:
            self._install()
        except BaseException:
            self.remove()
            raise

    def save(self) -> None:
        """Writes the values, float32, ordered by position, to ``rank{rank}.safetensors``."""
        arrays = {}
        for name, parts in self._parts.items():
            positions, values = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
            # If a position was computed twice, the later row counts.
            latest = {position: row for row, position in enumerate(positions.tolist())}
            arrays[name] = values[[latest[position] for position in sorted(latest)]].contiguous()
        save_file(arrays, self._directory / f"rank{self._rank}.safetensors")

    # ---- The rows of the request ----

    def _begin(self, args: Any, kwargs: Any) -> None:
        if time.monotonic() > self._ends:
            self.error = f"nobody ended the recording within {EXPIRES_S:g} s"
            self.remove()
            return
        batch = self._runner.input_batch
        names = list(batch.req_ids[: batch.num_reqs])
        starts = self._runner.query_start_loc.np[: len(names) + 1].tolist()
        mine = [range(starts[i], starts[i + 1]) for i, name in enumerate(names) if self._request in name]
        positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
        rows = [row for part in mine for row in part]
        self._rows = torch.tensor(rows, dtype=torch.long, device=positions.device)
        self._positions = positions[self._rows].clone()
        self._final = None

    def _tap(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Records the request's rows of ``x`` [n, ...]. Returns ``x``, with the given values, if any, in these rows."""
        if not len(self._rows):
            return x
        places = self._positions.cpu()
        self._keep(name, places, x[self._rows])
        if name not in self._given:
            return x
        value = self._given[name][places]
        width = x[0].numel()
        if value.shape[1] > width:  # the worker has a part of the features
            parts = value.shape[1] // width
            first = self._rank * parts // self._workers * width
            value = value[:, first : first + width]
        changed = x.clone()
        changed[self._rows] = value.to(changed).reshape(len(self._rows), *x.shape[1:])
        return changed

    def _keep(self, name: str, positions: torch.Tensor, values: torch.Tensor) -> None:
        self._parts.setdefault(name, []).append((positions, values.float().flatten(1).cpu()))

    # ---- The hooks ----

    def _install(self) -> None:
        model = self._runner.model
        body = model.model
        self.before(model, self._begin)
        self.after(body.embed_tokens, lambda args, x: self._tap("embedding", x))
        for i, layer in enumerate(body.layers):
            self._install_layer(layer, i)
        last = f"{len(body.layers) - 1}/residual"
        self.after(body.norm, lambda args, output: self._finish(self._norm("final_norm", last, output)))
        self.after(model.logits_processor, lambda args, output: self._logits(args[1], output))

    def _install_layer(self, layer: Any, i: int) -> None:
        mixer = "linear_attn" if hasattr(layer, "linear_attn") else "self_attn"
        for name, kinds in _INPUTS.items():
            if name.startswith(mixer):
                self._tap_inputs(layer.get_submodule(name), [f"{i}/{kind}" for kind in kinds])
        for name, module in layer.named_modules():
            if name in _OUTPUTS:
                self._tap_outputs(module, [f"{i}/{kind}" for kind in _OUTPUTS[name]])
        first, second = layer.input_layernorm, layer.post_attention_layernorm
        self.after(first, lambda args, output: self._norm(f"{i}/attention_norm", f"{i - 1}/residual", output))
        self.after(second, lambda args, output: self._norm(f"{i}/mlp_norm", f"{i}/attention_residual", output))

    def _tap_inputs(self, module: Any, names: Sequence[str]) -> None:
        def act(args: Any, kwargs: Any) -> Any:
            fed = [self._tap(name, x) for name, x in zip(names, args, strict=False)]
            return (*fed, *args[len(names) :]), kwargs

        self.before(module, act)

    def _tap_outputs(self, module: Any, names: Sequence[str]) -> None:
        """Taps a module's output, or the first result of a tuple."""

        def act(args: Any, output: Any) -> Any:
            first, *more = output if isinstance(output, tuple) else (output,)
            sizes = getattr(module, "base_layer", module).output_partition_sizes[1 - len(names) :] if names[1:] else []
            parts = first.split([first.shape[-1] - sum(sizes), *sizes], -1)
            fed = torch.cat([self._tap(name, part) for name, part in zip(names, parts, strict=True)], -1)
            return (fed, *more) if isinstance(output, tuple) else fed

        self.after(module, act)

    def _norm(self, name: str, residual: str, output: Any) -> Any:
        """Records the output of a norm, and from the second norm on also the residual stream before it.

        Such a norm returns a pair, because vLLM's norms add to the residual stream first.
        """
        if not isinstance(output, tuple):
            return self._tap(name, output)
        return self._tap(name, output[0]), self._tap(residual, output[1])

    def _finish(self, output: Any) -> Any:
        self._final = output[0]
        return output

    def _logits(self, hidden: torch.Tensor, logits: torch.Tensor | None) -> None:
        """Records the logits of a prompt. Its hidden states are a view of the final norm's output in this forward."""
        final, mine = self._final, self._rows
        if logits is None or final is None or not len(mine):
            return
        if hidden.untyped_storage().data_ptr() != final.untyped_storage().data_ptr():
            return  # these are the last positions of requests, for their next tokens
        first = hidden.storage_offset() // final.stride(0)
        if first == int(mine[0]):
            self._keep("logits", self._positions[: len(logits)].cpu(), logits)


class TapMethods:
    """The methods of a worker that begin and end a recording. They raise nothing."""

    vllm_config: Any
    model_runner: Any
    rank: int
    _taps: Taps | None = None

    def rljax_tap(self, directory: str, request: str) -> dict[str, Any]:
        """Begins to record the request whose id contains ``request``. Returns {"error": ...}, with "" on success.

        ``directory`` is the directory of the recording.
        """
        try:
            self._end_tap()
            place, error = Path(directory), refusal(self.vllm_config, self.model_runner)
            if error:
                return {"error": error}
            if not (place / PROBE).is_file() or (place / PROBE).read_text() != request:
                return {"error": f"it does not see {directory}: set TMPDIR to a directory that both sides see"}
            workers = self.vllm_config.parallel_config.tensor_parallel_size
            self._taps = Taps(self.model_runner, place, request, self.rank % workers, workers)
        except Exception as error:
            self._end_tap()
            return {"error": f"its model has no hooks for {type(error).__name__}: {error}"}
        return {"error": ""}

    def rljax_untap(self) -> dict[str, Any]:
        """Ends the recording, removes the hooks and writes the values. Returns {"error": ...}, with "" on success."""
        taps, error = self._end_tap(), "there is no recording"
        if taps is None:
            return {"error": error}
        try:
            if not taps.error:
                taps.save()
            return {"error": taps.error}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _end_tap(self) -> Taps | None:
        taps, self._taps = self._taps, None
        if taps is not None:
            taps.remove()
        return taps
