"""Trains the toy base by verl's own worker on a CPU and prints the rate of each update as JSON.

    python verl_updates.py SETTINGS

SETTINGS is JSON with ``model``, ``overrides`` (of verl's configuration), ``lengths``, ``resume_at`` and ``directory``.
Each rollout batch has one of the lengths. After ``resume_at`` batches a new worker continues from a checkpoint.
The patched verl comes first in PYTHONPATH, and the environment names the platform of ``verl_on_cpu``.
"""

import functools
import json
import os
import socket
import sys

import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig, FSDPEngineConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

SEQUENCES, MINI_BATCHES, EPOCHS = 4, 2, 2


def new_worker(settings):
    """Returns verl's worker whose optimizer has a user's command line of ``main_ppo``."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=settings["overrides"])
    eager = {"enable_gradient_checkpointing": False, "override_config": {"attn_implementation": "eager"}}
    plain = {"use_dynamic_bsz": False, "use_torch_compile": False, "use_remove_padding": False}
    precision = {"mixed_precision": {"param_dtype": "fp32"}}
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=settings["model"], use_remove_padding=False, **eager),
            engine_config=FSDPEngineConfig(strategy="fsdp2", micro_batch_size_per_gpu=2, **plain, **precision),
            optimizer_config=omega_conf_to_dataclass(config.actor_rollout_ref.actor.optim),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=2, use_dynamic_bsz=False)
    worker.set_loss_fn(functools.partial(ppo_loss, config=actor))
    return worker


def rows(seed):
    """Returns a batch of sequences of four tokens in verl's nested form. Two tokens of each are sampled."""
    draw = torch.Generator().manual_seed(seed)

    def nested(parts):
        return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)

    tokens = torch.randint(0, 14, (SEQUENCES, 4), generator=draw)
    ones = torch.ones(SEQUENCES, 2, dtype=torch.long)
    tensors = {"input_ids": tokens, "position_ids": torch.arange(4).repeat(SEQUENCES, 1)}
    tensors |= {"prompts": tokens[:, :2], "responses": tokens[:, 2:], "response_mask": ones, "loss_mask": ones}
    tensors |= {"old_log_probs": torch.full((SEQUENCES, 2), -2.0)}
    tensors |= {"advantages": torch.randn(SEQUENCES, 2, generator=draw)}
    return TensorDict({name: nested(parts) for name, parts in tensors.items()}, batch_size=[SEQUENCES])


class Workers:
    """A group of one worker, which passes the batch on as verl's group does: tensors with the extra information."""

    def __init__(self, worker):
        self.worker = worker

    def update_actor(self, batch):
        data = rows(len(batch.tags))
        tu.assign_non_tensor(data, **batch.extra_info)
        return {"metrics": tu.get(self.worker.train_mini_batch(data), "metrics")}


def trainer_of(worker):
    """Returns verl's trainer without its cluster, with the parts that ``_update_actor`` reads."""
    trainer = PPOTrainerSync.__new__(PPOTrainerSync)
    actor = {"calculate_entropy": False, "entropy_coeff": 0.0, "ppo_mini_batch_size": SEQUENCES // MINI_BATCHES}
    actor |= {"ppo_epochs": EPOCHS, "data_loader_seed": 42, "shuffle": False}
    trainer.config = OmegaConf.create({"actor_rollout_ref": {"actor": actor, "rollout": {"n": 1, "temperature": 1.0}}})
    trainer.actor_rollout_wg = Workers(worker)
    return trainer


def batch_of(mean):
    """Returns three responses with this mean length, and a row of padding, which does not count."""
    tags = [{"response_len": length} for length in (int(mean) - 300, int(mean), int(mean) + 300)]
    tags.append({"response_len": 1, "is_padding": True})
    return KVBatchMeta(keys=list("abcd"), tags=tags, partition_id="train", extra_info={})


def main(settings):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    used, logged = [], []

    def started():
        worker = new_worker(settings)
        worker.engine.optimizer.register_step_pre_hook(
            lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"])
        )
        return worker

    worker = started()
    for number, mean in enumerate(settings["lengths"]):
        if number == settings["resume_at"]:
            worker.save_checkpoint(settings["directory"])
            worker = started()
            worker.load_checkpoint(settings["directory"])
        trainer_of(worker)._update_actor(batch_of(mean), metrics := {})
        logged.append(metrics["actor/lr"])
    print(json.dumps({"used": used, "logged": logged, "surge_step": worker.engine.lr_scheduler.surge_step}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
