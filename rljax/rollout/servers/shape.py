"""The sizes of a model that trainer and server compare at the handshake. The plugins load it where there is no jax."""

from __future__ import annotations

from typing import Any


def described_shape(text: Any, head_dim: int) -> dict[str, Any]:
    """Returns the sizes of a model that the handshake compares, by the names of ``config.json``.

    Args:
      text: The configuration of the language model, as transformers reads it.
      head_dim: The size of an attention head.
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
        "tie_word_embeddings": bool(getattr(text, "tie_word_embeddings", False)),
    }
