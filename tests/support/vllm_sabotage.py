"""Loaded into the test servers' workers: ways to break them that must not pass unnoticed."""

import json

from rljax.rollout.vllm import plugin as vllm_plugin

_REPAIR = vllm_plugin.repair_tied_head


class Sabotage(vllm_plugin.WorkerExtension):
    def sabotage_tied_head(self, state: str) -> None:
        vllm_plugin.repair_tied_head = _REPAIR if state == "off" else (lambda model: None)

    def sabotage_logprobs_mode(self, mode: str) -> None:
        sampler = self.model_runner.sampler
        sampler.logprobs_mode = mode
        sampler.topk_topp_sampler.__init__(mode)

    def sabotage_default_sampling(self, params: str) -> None:
        self.vllm_config.model_config.override_generation_config = json.loads(params)
