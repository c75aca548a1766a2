"""The values of the operations of a transformers model, from hooks that are there only while a sequence is computed."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from rljax.compare.layers.operations import OperationValues, operations
from rljax.compare.scorers import load_hf
from rljax.policy.families import read_config

_OUTPUTS = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.q_norm": "query_norm",
    "self_attn.k_norm": "key_norm",
    "self_attn.o_proj": "attention_output",
    "linear_attn.in_proj_qkv": "delta_qkv",
    "linear_attn.in_proj_z": "delta_gate",
    "linear_attn.in_proj_b": "delta_rate",
    "linear_attn.in_proj_a": "delta_step",
    "linear_attn.out_proj": "attention_output",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp": "mlp",
    "": "residual",
}
"""The operation that each module of a block computes, by the name of the module."""
_INPUTS = {
    "self_attn.o_proj": "gated_attention",
    "linear_attn.out_proj": "gated_norm",
    "post_attention_layernorm": "attention_residual",
    "mlp.down_proj": "activation",
}
"""The operation whose value a module takes."""
_FUNCTIONS = {
    "apply_rotary_pos_emb": (("query_rope", "key_rope"), True),
    "causal_conv1d_fn": (("convolution",), True),
    "torch_chunk_gated_delta_rule": (("delta_rule",), False),
}
"""The operations of a model's functions, and whether the tokens of their results are on the third axis."""


class TorchTracer:
    """A transformers model on torch that shows the values of its operations (``Tracer``)."""

    def __init__(self, directory: str | Path, dtype: str, label: str, attention: str | None = None, rows: int = 1):
        """Loads the model. A forward computes a batch of ``rows`` rows, each with the same sequence.

        ``attention`` is a name of transformers, such as "eager" or "sdpa"; None means its default.

        Raises:
          ValueError: torch or transformers is missing, or the directory does not hold a model.
        """
        self.label, self.dtype, self._rows = label, dtype, rows
        self.config = read_config(directory)
        self._torch, self.model, self._device = load_hf(Path(directory), dtype, attention)

    def run(self, tokens: np.ndarray, given: Mapping[str, np.ndarray]) -> OperationValues:
        """Computes one sequence, int32 [t], in the model's dtype (``Tracer.run``)."""
        torch, found = self._torch, _Taps(self._torch, given)
        ids = torch.tensor(np.broadcast_to(tokens, (self._rows, len(tokens))).copy(), dtype=torch.long)
        with torch.inference_mode(), found.on(self.model):
            self.model(input_ids=ids.to(self._device), use_cache=False)
        found.values["logits"] = found.values["logits"][:-1]
        return {op.name: found.values[op.name] for op in operations(self.config) if op.name in found.values}


class _Taps:
    """The hooks of one forward, the values that they recorded, and the values that they put in."""

    def __init__(self, torch: Any, given: Mapping[str, np.ndarray]) -> None:
        self._torch, self._given = torch, given
        self.values: OperationValues = {}
        self._layer = 0  # the block that is computed

    def _tap(self, name: str, x: Any) -> Any:
        """Records a value [b, t, ...]. Returns the given value in its stead, if there is one."""
        first = x[0].float().cpu().numpy()
        self.values[name] = first.reshape(len(first), -1)
        if name not in self._given or name == "logits":
            return x
        return self._torch.tensor(self._given[name]).to(x).reshape(x.shape[1:]).expand(x.shape).clone()

    def _tap_all(self, names: Sequence[str], output: Any, turned: bool = False) -> Any:
        """Taps a result, or the first results of a tuple. ``turned``: their tokens are on the third axis."""

        def turn(x: Any) -> Any:
            return x.transpose(1, 2) if turned else x

        results = output if isinstance(output, tuple) else (output,)
        fed = [turn(self._tap(name, turn(x))) for name, x in zip(names, results, strict=False)]
        return (*fed, *results[len(names) :]) if isinstance(output, tuple) else fed[0]

    def _tapped(self, function: Callable[..., Any], names: Sequence[str], turned: bool = False) -> Callable[..., Any]:
        """Returns the function with taps of its first results in the block that is computed."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._tap_all([f"{self._layer}/{name}" for name in names], function(*args, **kwargs), turned)

        return call

    def _enter(self, layer: int, inputs: Any) -> None:
        self._layer = layer

    @contextlib.contextmanager
    def on(self, model: Any) -> Iterator[None]:
        """Puts the hooks into ``model``, and removes them at the end of the ``with`` block."""
        with contextlib.ExitStack() as stack:

            def after(part: Any, name: str) -> None:
                hook = part.register_forward_hook(lambda module, inputs, output: self._tap_all([name], output))
                stack.callback(hook.remove)

            def before(part: Any, act: Callable[[Any], Any]) -> None:
                stack.callback(part.register_forward_pre_hook(lambda module, inputs: act(inputs)).remove)

            after(model.model.embed_tokens, "embedding")
            for i, layer in enumerate(model.model.layers):
                before(layer, functools.partial(self._enter, i))
                for name, part in layer.named_modules():
                    if name in _OUTPUTS:
                        after(part, f"{i}/{_OUTPUTS[name]}")
                    if name in _INPUTS:
                        before(part, functools.partial(self._tap_all, [f"{i}/{_INPUTS[name]}"]))
            after(model.model.norm, "final_norm")
            after(model.lm_head, "logits")
            module: Any = importlib.import_module(type(model).__module__)
            for name, changed in self._functions(module):
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, changed)
            yield

    def _functions(self, module: Any) -> Iterator[tuple[str, Any]]:
        """Yields the functions of a model's module with taps, and the registry that gives its attention."""
        for name, (names, turned) in _FUNCTIONS.items():
            if hasattr(module, name):
                yield name, self._tapped(getattr(module, name), names, turned)
        registry = module.ALL_ATTENTION_FUNCTIONS
        yield (
            "ALL_ATTENTION_FUNCTIONS",
            SimpleNamespace(get_interface=lambda *chosen: self._tapped(registry.get_interface(*chosen), ["attention"])),
        )
