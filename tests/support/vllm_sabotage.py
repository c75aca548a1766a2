"""An extension of the test servers' workers: it breaks them in ways that a check must notice."""

import functools
import json
import time

import torch
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from rljax.rollout.servers.vllm import plugin as vllm_plugin

_REPAIR = vllm_plugin.repair_tied_head
_REPACK = vllm_plugin.repack_experts

SpinCondition.__init__.__defaults__ = (0.05,)  # seconds instead of 1: a waiting worker leaves its core to other tests


def replace(module, forward, undo):
    """Replaces a module's forward by ``forward(original, *arguments)``."""
    original = module.forward
    module.forward = lambda *args, **kwargs: forward(original, *args, **kwargs)
    undo.append(lambda: vars(module).pop("forward"))


def plant(model, fault, undo):
    """Plants a fault of ``planted_layers`` into the modules of a worker; ``undo`` gets what takes it out."""
    layers, table = model.model.layers, model.model.embed_tokens.weight  # the head is tied to the table
    attention, mlp = layers[1].self_attn, layers[1].mlp
    other = torch.float32 if table.dtype == torch.bfloat16 else torch.bfloat16

    def scaled_key(original, x):
        out, bias = original(x)
        out[..., attention.q_size : attention.q_size + attention.kv_size] *= 1.01
        return out, bias

    def swapped(original, x):
        out, bias = original(x)
        return torch.cat(out.chunk(2, -1)[::-1], -1), bias

    def eight_bits(original, q, k, v, **more):
        k, v = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (k, v))
        return original(q, k, v, **more)

    def in_halves(original, x):
        first = torch.arange(x.shape[-1]) < x.shape[-1] // 2
        sums = [original(x * half.to(x))[0].bfloat16() for half in (first, ~first)]
        return (sums[0] + sums[1]).to(x), None

    def other_head(original, head, hidden, *more):
        return (hidden.to(other) @ table.to(other).T).float()

    parts = [layer.self_attn for layer in layers]
    replaced = {
        "projection": (scaled_key, [attention.qkv_proj]),
        "swapped": (swapped, [mlp.gate_up_proj]),
        "no norms": (lambda original, x: x, [norm for part in parts for norm in (part.q_norm, part.k_norm)]),
        "cache": (eight_bits, [part.attn for part in parts]),
        "head": (other_head, [model.logits_processor]),
        "sum": (in_halves, [linear for layer in layers for linear in (layer.self_attn.o_proj, layer.mlp.down_proj)]),
    }
    forward, modules = replaced.get(fault, (None, []))
    for module in modules:
        replace(module, forward, undo)
    if fault == "eps":
        for norm in [layer.input_layernorm for layer in layers]:
            undo.append(functools.partial(setattr, norm, "variance_epsilon", norm.variance_epsilon))
            norm.variance_epsilon = 1e-3
    if fault == "one element":
        weight = layers[1].input_layernorm.weight.data
        undo.append(functools.partial(weight[5].copy_, weight[5].clone()))
        weight[5] *= 1.03
    if fault == "rope base":
        rotary = layers[0].self_attn.rotary_emb

        def fill(base):
            rotary.base = base
            for name in ("cos_sin_cache", "cos_sin_cache_bf16"):
                if getattr(rotary, name, None) is not None:
                    getattr(rotary, name).copy_(rotary._compute_cos_sin_cache())

        undo.append(functools.partial(fill, rotary.base))
        fill(1.1 * rotary.base)


class Sabotage(vllm_plugin.WorkerExtension):
    def sabotage_tied_head(self, state: str) -> None:
        vllm_plugin.repair_tied_head = _REPAIR if state == "off" else (lambda model: None)

    def sabotage_layers(self, fault: str) -> dict[str, int]:
        """Plants a fault, or takes all faults out ("off"); returns the number of hooks."""
        model = self.model_runner.model
        with torch.no_grad():
            for undo in getattr(self, "planted", []):
                undo()
            self.planted = []
            if fault != "off":
                plant(model, fault, self.planted)
        return {"hooks": sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())}

    def sabotage_repack(self, state: str) -> None:
        vllm_plugin.repack_experts = _REPACK if state == "off" else (lambda layer, kernel: None)

    def head_is_stale(self) -> dict[str, bool]:
        """Whether the tied head computes with other weights than the embedding's: some processors pack a copy."""
        model = self.weight_transfer_engine.model
        head, table = model.lm_head, model.model.embed_tokens.weight
        x = torch.randn(4, table.shape[1], generator=torch.Generator().manual_seed(0)).to(table.dtype)
        got = head.quant_method.apply(head, x).float()
        expected = x.float() @ table.float().T
        return {"stale": bool((got - expected).norm() > 0.1 * expected.norm())}

    def sabotage_load(self, how: str, of: str) -> None:
        """Makes the model load other tensors than it is given, from now on.

        ``skip`` leaves out the tensor ``of``, or "all". ``previous`` loads the tensors of the version that was loaded
        while this was "off". ``through`` converts each tensor to the dtype ``of`` and back.
        """
        model = self.weight_transfer_engine.model
        load = type(model).load_weights.__get__(model)

        def load_others(weights):
            weights = dict(weights)
            if how == "skip":
                weights = {name: tensor for name, tensor in weights.items() if of not in (name, "all")}
            elif how == "through":
                other = getattr(torch, of)
                weights = {name: tensor.to(other).to(tensor.dtype) for name, tensor in weights.items()}
            elif how == "previous":
                weights = self.previous
            else:
                self.previous = {name: tensor.clone() for name, tensor in weights.items()}
            return load(weights.items())

        model.load_weights = load_others

    def sabotage_load_of(self, rank: str, how: str, of: str) -> None:
        if self.rank == int(rank):
            self.sabotage_load(how, of)

    def sabotage_finish(self, state: str) -> None:
        """Makes the next update end in an error."""
        engine = self.weight_transfer_engine
        finish = engine.finish_weight_update

        def fail() -> None:
            engine.finish_weight_update = finish
            raise RuntimeError("planted")

        engine.finish_weight_update = fail

    def sabotage_pace(self, seconds: str) -> None:
        """Makes each forward take so many seconds longer from now on, so that responses stay under way."""
        model = self.weight_transfer_engine.model
        vars(model).pop("forward", None)
        forward, pause = model.forward, float(seconds)

        def paced(*args, **kwargs):
            time.sleep(pause)
            return forward(*args, **kwargs)

        if pause:
            model.forward = paced

    def sabotage_restore(self, state: str) -> None:
        """Makes each later update end with the parameters that the model has now, like a copy kept over a sleep."""
        engine, model = self.weight_transfer_engine, self.weight_transfer_engine.model
        vars(engine).pop("finish_weight_update", None)
        if state == "off":
            return
        kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        finish = engine.finish_weight_update

        def finish_and_restore() -> None:
            finish()
            for name, parameter in model.named_parameters():
                parameter.data.copy_(kept[name])

        engine.finish_weight_update = finish_and_restore

    def sabotage_logprobs_mode(self, mode: str) -> None:
        sampler = self.model_runner.sampler
        sampler.logprobs_mode = mode
        sampler.topk_topp_sampler.__init__(mode)

    def sabotage_head_dtype(self, dtype: str) -> None:
        """Sets what ``--hf-overrides`` sets before the start: the description, and the dtype of the head."""
        config = self.vllm_config.model_config
        config.hf_config.head_dtype = dtype
        self.model_runner.model.logits_processor.head_dtype = config.head_dtype

    def sabotage_rope(self, settings: str) -> None:
        """Sets the rotary settings that ``--hf-overrides`` sets before the start, but only in the description."""
        self.vllm_config.model_config.hf_text_config.rope_parameters = json.loads(settings)

    def sabotage_logits(self, fault: str, size: str = "1") -> None:
        """Divides the logits by ``size`` ("temperature") or keeps the ``size`` likeliest tokens ("cut") from now on."""
        model = self.model_runner.model
        vars(model).pop("compute_logits", None)
        compute = model.compute_logits

        def changed(*args, **kwargs):
            logits = compute(*args, **kwargs)
            if fault == "temperature":
                return logits / float(size)
            least = logits.topk(int(size), dim=-1).values[..., -1:]
            return logits.masked_fill(logits < least, float("-inf"))

        if fault != "off":
            model.compute_logits = changed
