"""Faults that can be planted into a transformers model, each with the operation that a comparison must name."""

import functools
import importlib
from types import SimpleNamespace

import torch

PLACES = {
    "projection": "layer 1, key projection",
    "one element": "layer 1, norm before attention",
    "swapped": "layer 1, gate projection",
    "rope base": "every layer, rotation of keys",
    "eps": "every layer, norm before attention",
    "no norms": "every layer, query norm",
    "stale": "layer 1",
    "cache": "every layer, attention",
    "head": "logits",
    "sum": "every layer, output projection",
}
HYBRID_PLACES = {
    "taps": "layer 1, short convolution",
    "swapped": "layer 4, rate projection of a delta net",
    "gate": "every layer, attention times its gate",
    "state": "every layer, delta rule",
    "offset": "layer 3, norm before attention",
}


@torch.no_grad()
def plant(model, *, fault):
    """Plants a fault of ``PLACES``."""
    layers, modeling = model.model.layers, importlib.import_module(type(model).__module__)
    match fault:
        case "projection":
            layers[1].self_attn.k_proj.weight.mul_(1.01)
        case "one element":
            layers[1].input_layernorm.weight[5].mul_(1.03)
        case "swapped":
            mlp = layers[1].mlp
            mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj
        case "rope base":
            frequencies = model.model.rotary_emb.inv_freq
            width = 2 * len(frequencies)
            frequencies.copy_(1 / 11_000 ** (torch.arange(0, width, 2).float() / width))
        case "eps":
            for layer in layers:
                layer.input_layernorm.variance_epsilon = 1e-3
        case "no norms":
            for layer in layers:
                layer.self_attn.q_norm, layer.self_attn.k_norm = torch.nn.Identity(), torch.nn.Identity()
        case "stale":
            draw = torch.Generator().manual_seed(1)
            for parameter in layers[1].parameters():
                if parameter.dim() == 2:
                    noise = torch.randn(parameter.shape, generator=draw).to(parameter)
                    parameter.add_(0.02 * parameter.std() * noise)
        case "cache":
            from transformers import AttentionInterface, AttentionMaskInterface
            from transformers.masking_utils import eager_mask

            def attention(module, q, k, v, mask, **more):
                k, v = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (k, v))
                return modeling.eager_attention_forward(module, q, k, v, mask, **more)

            AttentionInterface.register("eight_bits", attention)
            AttentionMaskInterface.register("eight_bits", eager_mask)
            model.config._attn_implementation = "eight_bits"
        case "head":
            head = model.lm_head
            other = torch.float32 if head.weight.dtype == torch.bfloat16 else torch.bfloat16
            head.forward = lambda x: torch.nn.functional.linear(x.to(other), head.weight.to(other)).float()
        case "sum":
            for layer in layers:
                for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                    linear.forward = functools.partial(in_halves, linear.weight)


def in_halves(weight, x):
    """Returns the product as a sum of two parts that are rounded to bfloat16."""
    half = x.shape[-1] // 2
    parts = (slice(0, half), slice(half, None))
    first, second = (torch.nn.functional.linear(x[..., at], weight[:, at]).bfloat16() for at in parts)
    return (first + second).to(x)


@torch.no_grad()
def plant_in_hybrid(model, patch, *, fault):
    """Plants a fault of ``HYBRID_PLACES`` into a hybrid of 8 layers; ``patch`` is pytest's monkeypatch."""
    layers, modeling = model.model.layers, importlib.import_module(type(model).__module__)
    match fault:
        case "taps":
            weight = layers[1].linear_attn.conv1d.weight
            weight.data = weight.data.flip(-1)
        case "swapped":
            net = layers[4].linear_attn
            net.in_proj_a, net.in_proj_b = net.in_proj_b, net.in_proj_a
        case "gate":
            patch.setattr(modeling, "torch", SimpleNamespace(**vars(torch) | {"sigmoid": torch.ones_like}))
        case "state":
            step = modeling.torch_recurrent_gated_delta_rule

            def rule(query, key, value, g, beta, **more):
                state, found = None, []
                for token in zip(*(x.split(1, dim=1) for x in (query, key, value, g, beta)), strict=True):
                    y, state = step(*token, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
                    state = state.bfloat16().float()
                    found.append(y)
                return torch.cat(found, dim=1), None

            patch.setattr(modeling, "torch_chunk_gated_delta_rule", rule)
        case "offset":
            layers[3].input_layernorm.weight.data -= 1


# The functions (model), and (model, monkeypatch), that plant a fault, each with the place that a finding must name.
FAULTS = {fault: (functools.partial(plant, fault=fault), place) for fault, place in PLACES.items()}
HYBRID_FAULTS = {
    fault: (functools.partial(plant_in_hybrid, fault=fault), place) for fault, place in HYBRID_PLACES.items()
}
