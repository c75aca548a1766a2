"""Faults that can be planted into the modules of a vLLM worker and taken out again."""

import torch


def _replace(module, forward, undo):
    """Replaces a module's forward by ``forward(original, *arguments)``."""
    original = module.forward
    module.forward = lambda *args, **kwargs: forward(original, *args, **kwargs)
    undo.append(lambda: vars(module).pop("forward"))


def _set(module, name, value, undo):
    before = getattr(module, name)
    setattr(module, name, value)
    undo.append(lambda: setattr(module, name, before))


def _projection(model, undo):
    attention = model.model.layers[1].self_attn

    def forward(original, x):
        out, bias = original(x)
        out[..., attention.q_size : attention.q_size + attention.kv_size] *= 1.01
        return out, bias

    _replace(attention.qkv_proj, forward, undo)


def _one_element(model, undo):
    weight = model.model.layers[1].input_layernorm.weight.data
    before = weight[5].clone()
    weight[5] *= 1.03
    undo.append(lambda: weight[5].copy_(before))


def _swapped(model, undo):
    def forward(original, x):
        out, bias = original(x)
        return torch.cat(out.chunk(2, -1)[::-1], -1), bias

    _replace(model.model.layers[1].mlp.gate_up_proj, forward, undo)


def _rope_base(model, undo):
    rotary = model.model.layers[0].self_attn.rotary_emb
    before = rotary.base
    caches = [getattr(rotary, name, None) for name in ("cos_sin_cache", "cos_sin_cache_bf16")]

    def fill(base):
        rotary.base = base
        for cache in filter(lambda cache: cache is not None, caches):
            cache.copy_(rotary._compute_cos_sin_cache())

    fill(1.1 * before)
    undo.append(lambda: fill(before))


def _eps(model, undo):
    for layer in model.model.layers:
        _set(layer.input_layernorm, "variance_epsilon", 1e-3, undo)


def _no_norms(model, undo):
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            _replace(norm, lambda original, x: x, undo)


def _cache(model, undo):
    def forward(original, q, k, v, **more):
        k, v = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (k, v))
        return original(q, k, v, **more)

    for layer in model.model.layers:
        _replace(layer.self_attn.attn, forward, undo)


def _head(model, undo):
    table = model.model.embed_tokens.weight  # the head is tied to it
    other = torch.float32 if table.dtype == torch.bfloat16 else torch.bfloat16

    def forward(original, head, hidden, *more):
        return (hidden.to(other) @ table.to(other).T).float()

    _replace(model.logits_processor, forward, undo)


def _sum(model, undo):
    def forward(original, x):
        first = torch.arange(x.shape[-1]) < x.shape[-1] // 2
        sums = [original(x * half.to(x))[0].bfloat16() for half in (first, ~first)]
        return (sums[0] + sums[1]).to(x), None

    for layer in model.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            _replace(linear, forward, undo)


FAULTS = {
    "projection": _projection,
    "one element": _one_element,
    "swapped": _swapped,
    "rope base": _rope_base,
    "eps": _eps,
    "no norms": _no_norms,
    "cache": _cache,
    "head": _head,
    "sum": _sum,
}


def plant(model, fault):
    """Plants a fault into the model, and returns the functions that take it out."""
    undo = []
    FAULTS[fault](model, undo)
    return undo


def count_hooks(model):
    """Returns the number of forward hooks of all modules."""
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())
