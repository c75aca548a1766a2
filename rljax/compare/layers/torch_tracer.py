"""The values of the operations of a transformers model, from hooks that are there only while a sequence is computed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rljax.compare.layers.operations import OperationValues, check_shown, operations
from rljax.compare.scorers import load_hf
from rljax.policy.families import read_config


class TorchTracer:
    """The tracer of a transformers model on torch."""

    def __init__(self, directory: str | Path, dtype: str, label: str, attention: str | None = None, rows: int = 1):
        """Loads the model. The sequence is in each of the ``rows`` of a batch.

        ``attention`` is a name of transformers, such as "eager" or "sdpa"; None: its default.

        Raises:
          ValueError: torch or transformers is missing, or the directory does not hold a model.
        """
        self.label, self.dtype, self._rows = label, dtype, rows
        self.config = read_config(directory)
        check_shown(self.config, label)
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

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(module: Any, inputs: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (self._tap(name, output[0]), *output[1:])
            return self._tap(name, output)

        return hook

    def _before(self, name: str) -> Callable[..., Any]:
        def hook(module: Any, inputs: Any) -> Any:
            return (self._tap(name, inputs[0]), *inputs[1:])

        return hook

    def _enter(self, layer: int) -> Callable[..., Any]:
        def hook(module: Any, inputs: Any) -> None:
            self._layer = layer

        return hook

    def _rotate(self, rotate: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the rotary function with taps. Heads come before tokens in its arrays."""

        def rotated(*args: Any, **kwargs: Any) -> Any:
            q, k = (x.transpose(1, 2) for x in rotate(*args, **kwargs))
            q, k = self._tap(f"{self._layer}/query_rope", q), self._tap(f"{self._layer}/key_rope", k)
            return q.transpose(1, 2), k.transpose(1, 2)

        return rotated

    @contextlib.contextmanager
    def on(self, model: Any) -> Iterator[None]:
        """Puts the hooks into ``model``, and removes them at the end of the block."""
        module: Any = importlib.import_module(type(model).__module__)
        rotate = module.apply_rotary_pos_emb
        with contextlib.ExitStack() as stack:

            def after(part: Any, name: str) -> None:
                if part is not None:
                    stack.callback(part.register_forward_hook(self._after(name)).remove)

            def before(part: Any, name: str) -> None:
                stack.callback(part.register_forward_pre_hook(self._before(name)).remove)

            after(model.model.embed_tokens, "embedding")
            for i, layer in enumerate(model.model.layers):
                stack.callback(layer.register_forward_pre_hook(self._enter(i)).remove)
                self._on_layer(layer, f"{i}/", after, before)
            after(model.model.norm, "final_norm")
            after(model.lm_head, "logits")
            module.apply_rotary_pos_emb = self._rotate(rotate)
            stack.callback(setattr, module, "apply_rotary_pos_emb", rotate)
            yield

    def _on_layer(self, layer: Any, prefix: str, after: Callable[..., None], before: Callable[..., None]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        after(layer.input_layernorm, prefix + "attention_norm")
        for name, part in (("query", "q"), ("key", "k"), ("value", "v")):
            after(getattr(attention, f"{part}_proj"), prefix + name)
            after(getattr(attention, f"{part}_norm", None), f"{prefix}{name}_norm")
        before(attention.o_proj, prefix + "attention")
        after(attention.o_proj, prefix + "attention_output")
        before(layer.post_attention_layernorm, prefix + "attention_residual")
        after(layer.post_attention_layernorm, prefix + "mlp_norm")
        if hasattr(mlp, "gate_proj"):
            after(mlp.gate_proj, prefix + "gate")
            after(mlp.up_proj, prefix + "up")
            before(mlp.down_proj, prefix + "activation")
        after(mlp, prefix + "mlp")
        after(layer, prefix + "residual")
