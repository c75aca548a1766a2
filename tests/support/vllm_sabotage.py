"""An extension of the test servers' workers: it breaks them in ways that a check must notice."""

import json
import time

import planted_in_vllm
import torch
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from rljax.rollout.servers.vllm import plugin as vllm_plugin

_REPAIR = vllm_plugin.repair_tied_head
_REPACK = vllm_plugin.repack_experts

SpinCondition.__init__.__defaults__ = (0.05,)  # seconds instead of 1: a waiting worker leaves its core to other tests


class Sabotage(vllm_plugin.WorkerExtension):
    def sabotage_tied_head(self, state: str) -> None:
        vllm_plugin.repair_tied_head = _REPAIR if state == "off" else (lambda model: None)

    def sabotage_layers(self, fault: str) -> dict[str, int]:
        """Plants a fault of ``planted_in_vllm``, or takes all faults out ("off"); returns the number of hooks."""
        model = self.model_runner.model
        with torch.no_grad():
            for undo in getattr(self, "planted", []):
                undo()
            self.planted = [] if fault == "off" else planted_in_vllm.plant(model, fault)
        return {"hooks": planted_in_vllm.count_hooks(model)}

    def sabotage_repack(self, state: str) -> None:
        vllm_plugin.repack_experts = _REPACK if state == "off" else (lambda layer, kernel: None)

    def head_is_stale(self) -> dict[str, bool]:
        """Whether the tied head computes with other weights than the embedding's.

        Some processors need a packed copy of the table, which can become stale. Others multiply with the table itself.
        """
        model = self.weight_transfer_engine.model
        head, table = model.lm_head, model.model.embed_tokens.weight
        x = torch.randn(4, table.shape[1], generator=torch.Generator().manual_seed(0)).to(table.dtype)
        got = head.quant_method.apply(head, x).float()
        expected = x.float() @ table.float().T
        return {"stale": bool((got - expected).norm() > 0.1 * expected.norm())}

    def sabotage_load(self, how: str, of: str) -> None:
        """Makes the model load other tensors than it is given, from now on.

        Args:
          how: The change. ``skip`` leaves out the tensor ``of``, or all tensors. ``previous`` loads the tensors of the
            version that was loaded while this was "off". ``through`` converts each tensor to the dtype ``of`` and back.
          of: The name of a tensor, "all", or the name of a dtype.
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
        """Calls ``sabotage_load`` in the worker of this rank only."""
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
        """Changes the logits from now on.

        Args:
          fault: The change. ``temperature`` divides them by ``size``. ``cut`` keeps the ``size`` likeliest tokens.
            ``off`` takes it out.
          size: A number.
        """
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
