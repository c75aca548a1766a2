"""Random tiny models of transformers, and the logits of a model in transformers and in JAX."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch

from rljax.policy.families import read_config
from rljax.policy.hf import SINGLE_NAME, load_params
from rljax.policy.model import hidden_states, lm_head_table
from rljax.policy.score import segment_ends

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# vocab, d, f, layers, h, g, head_dim, tied, theta
SHAPES = [
    (16, 64, 128, 2, 4, 2, 16, True, 10_000.0),
    (97, 48, 80, 3, 6, 1, 8, False, 1_000_000.0),
    (64, 32, 96, 1, 4, 4, 32, True, 500.0),
    (130, 40, 72, 4, 2, 2, 20, False, 10_000.0),
    (51, 24, 40, 2, 8, 2, 6, True, 5_000_000.0),
]
# A Qwen2 has heads of width d / h.
SHAPES_QWEN2 = [
    (16, 64, 128, 2, 4, 2, 16, True, 10_000.0),
    (97, 48, 80, 3, 6, 1, 8, False, 1_000_000.0),
    (51, 40, 40, 2, 2, 2, 20, False, 500.0),
]
# Scaled rotary embeddings. The original length is shorter than the sequences of the tests.
SHORT = {"original_max_position_embeddings": 16}
ROPES = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SHORT},
    {"rope_type": "yarn", "factor": 4.0, **SHORT},
    {"rope_type": "yarn", "factor": 2.5, "attention_factor": 1.3, "beta_fast": 9.0, "truncate": False, **SHORT},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_slow": 2.0, **SHORT},
]
# The number of experts, the experts of a token, their width, and whether the gates are normalised.
MIXTURES = [(8, 2, 32, True), (4, 1, 24, False), (16, 8, 8, True), (5, 3, 40, False), (3, 3, 16, True)]


def hf_config(shape, family, rope=None, **more):
    *sizes, theta = shape
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "tie_word_embeddings")
    more |= {"rope_parameters": {"rope_theta": theta, **(rope or {"rope_type": "default"})}, "initializer_range": 0.1}
    sized = dict(zip(names, sizes, strict=True))
    return getattr(transformers, f"{family}Config")(**sized, attn_implementation="eager", **more)


def hf_model(shape, family="Qwen3", seed=0, rope=None, **more):
    config = hf_config(shape, family, rope, **more)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.copy_(("norm" in name) + 0.3 * torch.randn_like(parameter))
    return model


def saved(model, directory: Path):
    """Saves a model of transformers; returns its configuration and parameters as a policy reads them."""
    model.save_pretrained(directory)
    config = read_config(directory)
    return config, load_params(directory, config)


def repeat_head(directory: Path) -> None:
    """Writes the embedding table a second time, as the LM head, as in the published files of Qwen3-0.6B and 1.7B."""
    tensors = safetensors.torch.load_file(directory / SINGLE_NAME)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(tensors, directory / SINGLE_NAME, metadata={"format": "pt"})


def jax_logits(params, config, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    with jax.default_matmul_precision("highest"):
        return np.asarray(_logits(params, config, tokens, np.ones(tokens.shape, np.int32), positions))


@functools.partial(jax.jit, static_argnames="config")
def _logits(params, config, tokens, segments, positions):
    hidden, _ = hidden_states(params, config, tokens, segment_ends(segments), positions)
    return jnp.einsum("btd,vd->btv", hidden, lm_head_table(params))


def torch_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


def mixture(experts, k, width, normalized):
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    return dict(zip(names, (experts, k, width, normalized), strict=True))
