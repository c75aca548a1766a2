"""Trains a tiny model with TRL's own trainers on a CPU, and reads each update's rate from the optimizer.

    python tests/peers/trl_updates.py '{"model": DIRECTORY, "out": DIRECTORY}'

As a program it needs the patched TRL. It gives the trainers a scheduler, and prints a JSON object of results by case.
With RANK and WORLD_SIZE in the environment it is one of several processes that train together.
"""

import json
import os
import sys
from pathlib import Path

import torch
import trl
from datasets import Dataset
from torch.optim.lr_scheduler import LinearLR, SequentialLR
from transformers import AutoModelForCausalLM, TrainerCallback

from rljax.schedule import SurgeConfig, SurgeTracker
from rljax.schedule.torch import LengthTriggeredCallback, LengthTriggeredScheduler

RATE, BATCHES = 1e-4, 12
LENGTH, TRUNCATED = "completions/mean_length", "completions/clipped_ratio"
# Any growth over the smallest length so far is a surge, so a random model's lengths cause the call.
LEVELS = {"ratio": 1.001, "held_ratio": 0.001, "baseline_quantile": 0.0, "max_truncated": 1.0}
RULES = SurgeConfig(window=16, warmup=2, smooth=1, persistence=1, **LEVELS)


class Used(TrainerCallback):
    """A callback that notes the rate of the optimizer at each update."""

    def __init__(self):
        self.rates = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.rates.append(optimizer.param_groups[0]["lr"])


def trained(model, out, *, trainer="GRPO", scheduler_of=None, callbacks=(), resume=None, **settings):
    """Trains for 12 rollout batches; returns what was logged of them, and each update's rate used and logged."""
    used = Used()
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE)
    optimizers = (optimizer, scheduler_of(optimizer)) if scheduler_of else (None, None)
    if trainer == "Distillation":
        goal = {"teacher_model": AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)}
    else:
        goal = {"reward_funcs": lambda completions, **_: [float(len(text)) for text in completions]}
        settings["num_generations"] = 2
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    sizes = {"per_device_train_batch_size": 4, "max_completion_length": 24, "logging_steps": 1, "seed": 0}
    sizes["max_steps"] = BATCHES * settings.get("num_iterations", 1)
    plain = {"output_dir": str(out), "learning_rate": RATE, "lr_scheduler_type": "constant"}
    made = getattr(trl, f"{trainer}Trainer")(
        model=policy,
        args=getattr(trl, f"{trainer}Config")(**quiet | sizes | plain | settings),
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(8)]}),
        callbacks=[*callbacks, used],
        optimizers=optimizers,
        **goal,
    )
    made.train(resume_from_checkpoint=resume)
    rows = [row for row in made.state.log_history if "learning_rate" in row]
    batches = [row for row in rows if LENGTH in row]
    return {
        "lengths": [row[LENGTH] for row in batches],
        "truncated": [row[TRUNCATED] for row in batches],
        "used": used.rates,
        "logged": [row["learning_rate"] for row in rows],
    }


def with_scheduler(multiplier):
    """Returns a function from an optimizer to its length-triggered scheduler."""
    return lambda optimizer: LengthTriggeredScheduler(optimizer, tracker=SurgeTracker(RULES), multiplier=multiplier)


def with_warm_up(optimizer):
    """Returns a warm-up over four updates, followed by the length-triggered rates."""
    warmup = LinearLR(optimizer, start_factor=0.25, total_iters=4)
    own = with_scheduler(2.0)(optimizer)

    class Warmed(SequentialLR):
        def observe(self, length, truncated_fraction=None):
            return own.observe(length, truncated_fraction)

    return Warmed(optimizer, [warmup, own], milestones=[4])


def of_one_process(model, out):
    own = with_scheduler(1.0)
    saving = {"save_strategy": "steps", "save_steps": 5}
    return {
        "one update": trained(model, out / "one", scheduler_of=own, **saving),
        "two updates": trained(model, out / "two", scheduler_of=own, num_iterations=2),
        "two micro-batches": trained(model, out / "micro", scheduler_of=own, gradient_accumulation_steps=2),
        "warm-up": trained(model, out / "warm", scheduler_of=with_warm_up),
        "RLOO": trained(model, out / "rloo", trainer="RLOO", scheduler_of=own),
        "Distillation": trained(model, out / "distillation", trainer="Distillation", scheduler_of=own),
        "resumed": trained(model, out / "one", scheduler_of=own, resume=str(out / "one/checkpoint-5"), **saving),
    }


def of_several_processes(model, out):
    callback = LengthTriggeredCallback(tracker=SurgeTracker(RULES), multiplier=2.0)
    return {
        "callback": trained(model, out / "callback", callbacks=[callback], ddp_backend="gloo"),
        "scheduler": trained(model, out / "scheduler", scheduler_of=with_scheduler(1.0), ddp_backend="gloo"),
    }


def main():
    given = json.loads(sys.argv[1])
    results = of_several_processes if "WORLD_SIZE" in os.environ else of_one_process
    print(json.dumps(results(given["model"], Path(given["out"]))))


if __name__ == "__main__":
    main()
