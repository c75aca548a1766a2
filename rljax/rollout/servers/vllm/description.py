"""The description that a vLLM worker gives of its server. The trainer compares it at the handshake."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import vllm
from vllm import envs
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.platforms import current_platform
from vllm.transformers_utils.repo_utils import try_get_local_file

from rljax.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from rljax.rollout.servers.loaded import described_shape
from rljax.weights.format import PROTOCOL


def describe(config: Any, *, tied: bool) -> dict[str, Any]:
    """Returns the description of the worker's server as plain JSON.

    ``config`` is the worker's ``VllmConfig``. ``tied`` says whether the LM head multiplies with the embedding table.
    """
    model, cache, transfer = config.model_config, config.cache_config, config.weight_transfer_config
    outputs = getattr(config, "aux_output_config", None) or model
    return {
        "protocol": PROTOCOL,
        "vllm": str(getattr(vllm, "__version__", "unknown")),
        "platform": current_platform.device_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "head_dtype": str(model.head_dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "kv_cache_dtype": str(cache.cache_dtype),
        "state_dtype": recurrent_state_dtype(config),
        "state_cache": cache.mamba_cache_mode,
        "batch_invariant": is_batch_invariant(),
        "max_model_len": model.max_model_len,
        "max_logprobs": model.max_logprobs,
        "block_size": cache.block_size if cache.enable_prefix_caching else 1,
        "backend": transfer.backend if transfer is not None else None,
        "head_sizes": supported_head_sizes(),
        "reads_images": bool(model.is_multimodal_model),
        "returns_routes": bool(getattr(outputs, "enable_return_routed_experts", False)),
        "shape": described_shape(model.hf_text_config, model.get_head_size(), tied=tied),
    }


def recurrent_state_dtype(config: Any) -> str | None:
    """Returns the dtype in which linear attention keeps its recurrent state, or None if the model has none."""
    layers = config.compilation_config.static_forward_context.values()
    dtypes = {layer.get_state_dtype()[-1] for layer in layers if isinstance(layer, MambaBase)}
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or None


def describe_tokens(model: Any) -> dict[str, Any]:
    """Returns the model's end-of-sequence tokens, and the hash of the tokenizer ("" if none can be read).

    ``model`` is the worker's ``ModelConfig``.
    """
    ends = model.try_get_generation_config().get("eos_token_id")
    file, digest = try_get_local_file(model.tokenizer, TOKENIZER_FILE, model.tokenizer_revision), ""
    with contextlib.suppress(ValueError):
        digest = load_tokenizer(file.parent).digest() if isinstance(file, Path) else ""
    return {"tokenizer": digest, "stop_token_ids": sorted([ends] if isinstance(ends, int) else ends or [])}


def is_batch_invariant() -> bool:
    """Returns whether vLLM is set to compute tokens with bits that do not depend on the batch around them.

    On a CPU the setting is that attention never splits the keys and values of small batches.
    """
    if current_platform.is_cpu():
        return not getattr(envs, "VLLM_CPU_ATTN_SPLIT_KV", True)
    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))


def supported_head_sizes() -> list[int] | None:
    """Returns the head sizes that vLLM's attention supports on a CPU, or None on another device.

    On a CPU vLLM does not check the head size: the server starts, and its engine ends at the first request.
    """
    if not current_platform.is_cpu():
        return None
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return list(CPUAttentionBackend.get_supported_head_sizes())
