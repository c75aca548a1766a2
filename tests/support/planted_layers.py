"""Faults that can be planted into a transformers model, each with the operation that a comparison must name."""

import importlib
from collections.abc import Callable

import torch


def _scale(tensor, factor):
    with torch.no_grad():
        tensor.mul_(factor)


def _projection(model):
    _scale(model.model.layers[1].self_attn.k_proj.weight, 1.01)


def _one_element(model):
    _scale(model.model.layers[1].input_layernorm.weight[5], 1.03)


def _swapped(model):
    mlp = model.model.layers[1].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


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
    modeling = importlib.import_module(type(model).__module__)
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    def attention(module, q, k, v, mask, **more):
        k, v = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (k, v))
        return modeling.eager_attention_forward(module, q, k, v, mask, **more)

    AttentionInterface.register("eight_bits", attention)
    AttentionMaskInterface.register("eight_bits", eager_mask)
    model.config._attn_implementation = "eight_bits"


def _head(model):
    head = model.lm_head
    other = torch.float32 if head.weight.dtype == torch.bfloat16 else torch.bfloat16
    head.forward = lambda x: torch.nn.functional.linear(x.to(other), head.weight.to(other)).float()


def _sum(model):
    def forward(linear):
        def halves(x):
            half = x.shape[-1] // 2
            parts = (slice(0, half), slice(half, None))
            sums = [torch.nn.functional.linear(x[..., at], linear.weight[:, at]).bfloat16() for at in parts]
            return (sums[0] + sums[1]).to(x)

        return halves

    for layer in model.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.forward = forward(linear)


FAULTS: dict[str, tuple[Callable, str]] = {
    "projection": (_projection, "layer 1, key projection"),
    "one element": (_one_element, "layer 1, norm before attention"),
    "swapped": (_swapped, "layer 1, gate projection"),
    "rope base": (_rope_base, "every layer, rotation of keys"),
    "eps": (_eps, "every layer, norm before attention"),
    "no norms": (_no_norms, "every layer, query norm"),
    "stale": (_stale, "layer 1"),
    "cache": (_cache, "every layer, attention"),
    "head": (_head, "logits"),
    "sum": (_sum, "every layer, output projection"),
}
"""The functions that plant a fault, each with the place that a finding must name."""
