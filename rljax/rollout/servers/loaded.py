"""The tensors and the sizes of a model inside a server, by their Hugging Face names. A server has no jax."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# The sizes of linear attention in config.json, which tell models apart that are otherwise equal.
_LINEAR = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
# The Hugging Face tensors of each expert in a parameter of vLLM's mixtures, by the name of the parameter.
_EXPERT_PARTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
_CHUNKS = "dual_chunk_attention_config"  # vLLM's setting of other rotary angles, which transformers does not read


class ModelTensors:
    """The tensors of a torch model as they are now, or this worker's parts of them.

    Fused parameters are split, and padding is cut off.
    """

    def __init__(self, model: Any, fused: Mapping[str, Sequence[str]]) -> None:
        """Reads the names of the layers of a torch model.

        ``fused`` has the Hugging Face names of the layers in each fused layer, by the name of the fused layer.
        """
        self._names = {layer: name for name, layer in model.named_modules()}
        self._fused = fused

    def of_model(self) -> Iterator[tuple[str, Any]]:
        """Yields (Hugging Face name, tensor) of all tensors in the parameters.

        A parameter that several layers share, such as a tied head, comes only under its first name.
        """
        seen = set()
        for layer in self._names:
            for own, parameter in layer.named_parameters(recurse=False):
                if id(parameter) not in seen:
                    yield from self._split(layer, own, parameter)
                seen.add(id(parameter))

    def of_layer(self, layer: Any) -> Iterator[tuple[str, Any]]:
        """Yields (Hugging Face name, tensor) of the tensors in a layer's own parameters."""
        for own, parameter in layer.named_parameters(recurse=False):
            yield from self._split(layer, own, parameter)

    def names_of_layer(self, layer: Any) -> list[str]:
        """Returns the names of the tensors in a layer's own parameters. It does not read their values."""
        return [name for own, _ in layer.named_parameters(recurse=False) for name in self._tensor_names(layer, own)]

    def _split(self, layer: Any, own: str, parameter: Any) -> Iterator[tuple[str, Any]]:
        names = self._tensor_names(layer, own)
        if own in _EXPERT_PARTS:
            yield from zip(names, _expert_parts(layer, own, parameter), strict=True)
            return
        rows = getattr(layer, "shard_indices", None)  # the rows of a vocabulary that this worker has
        whole = parameter if rows is None else parameter[: rows.num_org_elements]
        if len(names) == 1:
            yield names[0], whole
            return
        # The first tensor may have several sizes: in_proj_qkvz has two tensors, and sizes for q, k, v and z.
        sizes = list(layer.output_partition_sizes)
        first = len(sizes) - len(names) + 1
        yield from zip(names, whole.split([sum(sizes[:first]), *sizes[first:]]), strict=True)

    def _tensor_names(self, layer: Any, own: str) -> list[str]:
        """Returns the names of the tensors in one parameter: three for qkv_proj, one for most layers."""
        path = self._names[layer]
        if own in _EXPERT_PARTS:
            above, parts = path[: path.rindex(".experts")], _EXPERT_PARTS[own]
            return [f"{above}.experts.{expert}.{part}.weight" for expert, _ in _own_experts(layer) for part in parts]
        above, dot, last = path.rpartition(".")
        return [f"{above}{dot}{part}.{own}" for part in self._fused.get(last, [last])]


def _own_experts(layer: Any) -> Iterator[tuple[int, int]]:
    """Yields (number of an expert, its index in the parameters) for each expert of a mixture on this worker."""
    for expert in range(layer.global_num_experts):
        local = layer._map_global_expert_id_to_local_expert_id(expert)
        if local >= 0:
            yield expert, local


def _expert_parts(layer: Any, own: str, parameter: Any) -> Iterator[Any]:
    """Yields the tensors of each expert in a parameter of a mixture, in the order of ``_EXPERT_PARTS``.

    ``w13_weight`` [e, 2 f, d] holds gate and up of the experts on this worker, and ``w2_weight`` [e, d, f] holds down.
    Under tensor parallelism each holds a part of f. vLLM may have rounded d and f up.
    """
    sizes = layer.moe_config
    d, f = sizes.hidden_dim_unpadded, sizes.intermediate_size_per_partition_unpadded
    for _, local in _own_experts(layer):
        if own == "w2_weight":
            yield parameter[local][:d, :f]
        else:
            gate, up = parameter[local].chunk(2)
            yield from (gate[:f, :d], up[:f, :d])


def has_tied_head(model: Any, text: Any) -> bool:
    """Returns whether the LM head of a torch model multiplies with the embedding table.

    It does if both layers have the same parameter. The configuration ``text`` may say untied although vLLM tied the
    head after loading equal tensors. So ``text`` counts only on a worker that lacks one of the two parameters.
    """
    layers = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    head, table = (getattr(layer, "weight", None) for layer in layers)
    if head is None or table is None:
        return bool(getattr(text, "tie_word_embeddings", False))
    return head is table


def described_shape(text: Any, head_dim: int, *, tied: bool) -> dict[str, Any]:
    """Returns the sizes and rotary settings of a model that the handshake compares, by the names of ``config.json``.

    ``text`` is the language model's configuration, as transformers reads it. ``tied``: See :func:`has_tied_head`.
    """
    return {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": getattr(text, "intermediate_size", None),
        "num_hidden_layers": text.num_hidden_layers,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", text.num_attention_heads),
        "head_dim": head_dim,
        "num_experts": getattr(text, "num_experts", None),
        "num_experts_per_tok": getattr(text, "num_experts_per_tok", None),
        "moe_intermediate_size": getattr(text, "moe_intermediate_size", None),
        "tie_word_embeddings": tied,
        "rope_parameters": _described_rope(text),
        "layer_types": getattr(text, "layer_types", None) if hasattr(text, "linear_num_key_heads") else None,
        **{f"linear_{size}": getattr(text, f"linear_{size}", None) for size in _LINEAR},
    }


def _described_rope(text: Any) -> dict[str, Any]:
    """Returns the rotary settings of a configuration, without settings that change nothing.

    Before version 5 transformers has them in ``rope_scaling`` and ``rope_theta``. The ``mrope_`` keys of Qwen3.5 divide
    the features between three positions of a token, which are equal in text.
    """
    rope = getattr(text, "rope_parameters", None)
    rope = rope or {"rope_theta": getattr(text, "rope_theta", None), **(getattr(text, "rope_scaling", None) or {})}
    rope = {"rope_type": rope.get("type", "default"), **rope, _CHUNKS: getattr(text, _CHUNKS, None)}
    idle = {"type": rope["rope_type"], "partial_rotary_factor": 1.0}
    if hasattr(text, "linear_num_key_heads"):
        rope = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    return {name: value for name, value in rope.items() if value not in (None, idle.get(name))}
