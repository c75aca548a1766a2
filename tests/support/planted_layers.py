"""Faults that can be planted into a transformers model, each with the operation that a comparison must name."""

import importlib
from types import SimpleNamespace

import torch


def _modeling(model):
    return importlib.import_module(type(model).__module__)


def _scale(tensor, factor):
    with torch.no_grad():
        tensor.mul_(factor)


def _swap(module, one, other):
    first, second = getattr(module, one), getattr(module, other)
    setattr(module, one, second)
    setattr(module, other, first)


def _rope_base(model):
    frequencies = model.model.rotary_emb.inv_freq
    width = 2 * len(frequencies)
    frequencies.copy_(1 / 11_000 ** (torch.arange(0, width, 2).float() / width))


def _eps(model):
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 1e-3


def _no_norms(model):
    for layer in model.model.layers:
        layer.self_attn.q_norm, layer.self_attn.k_norm = torch.nn.Identity(), torch.nn.Identity()


def _stale(model):
    draw = torch.Generator().manual_seed(1)
    for parameter in model.model.layers[1].parameters():
        if parameter.dim() == 2:
            noise = torch.randn(parameter.shape, generator=draw).to(parameter)
            parameter.data.add_(0.02 * parameter.std() * noise)


def _cache(model):
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    def attention(module, q, k, v, mask, **more):
        k, v = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (k, v))
        return _modeling(model).eager_attention_forward(module, q, k, v, mask, **more)

    AttentionInterface.register("eight_bits", attention)
    AttentionMaskInterface.register("eight_bits", eager_mask)
    model.config._attn_implementation = "eight_bits"


def _head(model):
    head = model.lm_head
    other = torch.float32 if head.weight.dtype == torch.bfloat16 else torch.bfloat16
    head.forward = lambda x: torch.nn.functional.linear(x.to(other), head.weight.to(other)).float()


def _sum(model):
    def in_halves(linear):
        def forward(x):
            half = x.shape[-1] // 2
            parts = (slice(0, half), slice(half, None))
            sums = [torch.nn.functional.linear(x[..., at], linear.weight[:, at]).bfloat16() for at in parts]
            return (sums[0] + sums[1]).to(x)

        linear.forward = forward

    for layer in model.model.layers:
        in_halves(layer.self_attn.o_proj)
        in_halves(layer.mlp.down_proj)


FAULTS = {
    "projection": (
        lambda model: _scale(model.model.layers[1].self_attn.k_proj.weight, 1.01),
        "layer 1, key projection",
    ),
    "one element": (
        lambda model: _scale(model.model.layers[1].input_layernorm.weight[5], 1.03),
        "layer 1, norm before attention",
    ),
    "swapped": (lambda model: _swap(model.model.layers[1].mlp, "gate_proj", "up_proj"), "layer 1, gate projection"),
    "rope base": (_rope_base, "every layer, rotation of keys"),
    "eps": (_eps, "every layer, norm before attention"),
    "no norms": (_no_norms, "every layer, query norm"),
    "stale": (_stale, "layer 1"),
    "cache": (_cache, "every layer, attention"),
    "head": (_head, "logits"),
    "sum": (_sum, "every layer, output projection"),
}
"""The functions that plant a fault, each with the place that a finding must name."""


def _taps(model, patch):
    weight = model.model.layers[1].linear_attn.conv1d.weight
    weight.data = weight.data.flip(-1)


def _no_gate(model, patch):
    patch.setattr(_modeling(model), "torch", SimpleNamespace(**vars(torch) | {"sigmoid": torch.ones_like}))


def _rounded_state(model, patch):
    step = _modeling(model).torch_recurrent_gated_delta_rule

    def rule(query, key, value, g, beta, **more):
        state, found = None, []
        for token in zip(*(x.split(1, dim=1) for x in (query, key, value, g, beta)), strict=True):
            y, state = step(*token, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
            state = state.bfloat16().float()
            found.append(y)
        return torch.cat(found, dim=1), None

    patch.setattr(_modeling(model), "torch_chunk_gated_delta_rule", rule)


def _no_offset(model, patch):
    model.model.layers[3].input_layernorm.weight.data -= 1


HYBRID_FAULTS = {
    "taps": (_taps, "layer 1, short convolution"),
    "swapped": (
        lambda model, patch: _swap(model.model.layers[4].linear_attn, "in_proj_a", "in_proj_b"),
        "layer 4, rate projection of a delta net",
    ),
    "gate": (_no_gate, "every layer, attention times its gate"),
    "state": (_rounded_state, "every layer, delta rule"),
    "offset": (_no_offset, "layer 3, norm before attention"),
}
"""The functions (model, monkeypatch) that plant a fault into a hybrid of 8 layers, each with its place."""
