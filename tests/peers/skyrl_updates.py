"""Trains the toy base by SkyRL's own trainer, dispatch and worker on a CPU and prints the rate of each update as JSON.

    python skyrl_updates.py SETTINGS

SETTINGS is JSON with ``model``, ``overrides`` (of SkyRL's configuration), ``lengths``, ``resume_at`` and ``directory``.
Each rollout batch has one of the lengths. After ``resume_at`` batches a new worker continues from a checkpoint.
The patched skyrl comes first in PYTHONPATH. Three things need a GPU and are replaced: the worker's process group, the
wrapping by FSDP, and the forward pass. The loss here is the mean square of the logits.
"""

import json
import socket
import sys
from types import SimpleNamespace

import ray
import torch
from skyrl.backends.skyrl_train.distributed.dispatch import ActorInfo, MeshRank, WorkerOutput
from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase, PPORayActorGroup
from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.trainer import RayPPOTrainer

PROMPTS, SAMPLES, EPOCHS = 2, 2, 2


class CpuStrategy(FSDPStrategy):
    """A strategy like SkyRL's without the wrapping, which needs a mesh of CUDA devices."""

    def _fsdp_init_model(self, model, is_train=True, is_wrapped=False):
        return model


class CpuWorker(PolicyWorkerBase):
    """A policy worker of SkyRL in its own process group."""

    def __init__(self, cfg, model):
        from transformers import AutoModelForCausalLM

        torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None  # the strategy calls them at each save
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        self.cfg, self.record_memory, self.profiler, self._local_rank = cfg, False, None, 0
        policy = cfg.policy
        self.strategy = CpuStrategy(policy.fsdp_config, policy.optimizer_config, policy.model, num_training_steps=99)
        self.strategy.world_size = 1
        policy_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model, self.optimizer, self.scheduler = self.strategy.prepare((policy_model, None, None))
        self.used = []
        self.optimizer.register_step_pre_hook(lambda *_: self.used.append(self.optimizer.param_groups[0]["lr"]))

    def forward_backward(self, data, *_, **__):
        loss = self.model(data["sequences"][:, -8:]).logits.square().mean()
        self.strategy.backward(loss, self.model, self.optimizer)
        return WorkerOutput(metrics={"policy_lr": self.scheduler.get_last_lr()[0]})

    def found(self):
        return self.used, self.scheduler.surge_step


def trainer_of(cfg, worker):
    """Returns SkyRL's trainer without its cluster. It has what the way from a generator's output to an update reads."""
    group = PPORayActorGroup.__new__(PPORayActorGroup)
    group.actor_infos = [ActorInfo(worker, MeshRank(0, 0, 0, 0, world_size=1, dp_size=1, pp_size=1))]
    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.cfg, trainer.dispatch = cfg, WorkerDispatch(cfg, group)
    trainer.tokenizer = SimpleNamespace(pad_token_id=15)
    trainer.global_step, trainer.all_metrics, trainer.all_timings = 1, {}, {}
    return trainer


def generated(mean):
    """Returns a generator's output: four responses with this mean length."""
    lengths = [int(mean) + shift for shift in (-9, -3, 5, 7)]
    return {
        "prompt_token_ids": [[1, 2]] * 4,
        "response_ids": [[3] * length for length in lengths],
        "rewards": [[0.0] * (length - 1) + [1.0] for length in lengths],
        "loss_masks": [[1] * length for length in lengths],
    }


def main(settings):
    used, logged, cfg = [], [], SkyRLTrainConfig.from_cli_overrides(settings["overrides"])
    cfg.trainer.placement.colocate_all = False
    cfg.trainer.train_batch_size, cfg.generator.n_samples_per_prompt = PROMPTS, SAMPLES
    cfg.trainer.policy_mini_batch_size, cfg.trainer.update_epochs_per_batch = 1, EPOCHS
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)

    def started():
        return ray.remote(num_cpus=0)(CpuWorker).remote(cfg.trainer, settings["model"])

    worker = started()
    trainer = trainer_of(cfg, worker)
    for number, mean in enumerate(settings["lengths"]):
        if number == settings["resume_at"]:
            trainer.dispatch.save_checkpoint("policy", settings["directory"])
            used += ray.get(worker.found.remote())[0]
            worker = started()
            trainer = trainer_of(cfg, worker)
            trainer.dispatch.load_checkpoint("policy", settings["directory"])
        data = trainer.convert_to_training_input(generated(mean), ["a", "a", "b", "b"])
        data["advantages"] = data["rewards"]
        logged.append(trainer.train_critic_and_policy(data)["policy_lr"])
    rates, surge_step = ray.get(worker.found.remote())
    ray.shutdown()
    print(json.dumps({"used": used + rates, "logged": logged, "surge_step": surge_step}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
