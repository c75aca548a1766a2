"""The schedule runs in DeepSpeed's own engine with two processes on a CPU and sets the rate of each update."""

import pytest
from two_ranks import outputs_of_two_ranks

pytest.importorskip("deepspeed")

RANK = """
import json, os, sys
rank, port, stage, place = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}
import deepspeed
import torch
from rljax.schedule import SurgeConfig, SurgeTracker
from rljax.schedule.torch import LengthTriggeredScheduler, mean_over_ranks

deepspeed.init_distributed("gloo")
CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0}
CONFIG |= {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage}}


def build():
    model = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tracker = SurgeTracker(SurgeConfig(window=12, warmup=6, smooth=3, persistence=1))
    scheduler = LengthTriggeredScheduler(optimizer, tracker=tracker, multiplier=1.2)
    engine, *_, given = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=CONFIG)
    assert given is scheduler
    return engine, scheduler


engine, scheduler = build()
rates = []
for step in range(13):
    if step == 7:  # a restart: another engine and another scheduler take over
        engine.save_checkpoint(place)
        engine, scheduler = build()
        engine.load_checkpoint(place)
    # Rank 0 has one response, rank 1 has three: only their common mean grows four times, at step 9.
    length_sum, count = [(100, 1), (300, 3)][rank] if step < 8 else [(100, 1), (1500, 3)][rank]
    scheduler.observe(mean_over_ranks(length_sum, count))
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    rates += engine.get_lr()
print(json.dumps([rates, engine.module.weight.detach().unique().tolist(), scheduler.surge_step]))
"""


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_engine_updates_by_the_rate_of_the_law(stage, tmp_path):
    """The stages of ZeRO shard nothing, the optimizer's state, or the gradients as well."""
    first, second = outputs_of_two_ranks(RANK, str(stage), str(tmp_path), timeout=300)
    # The call is at update 10, so the period is 12. Two rows of ones give every weight the gradient 2, from 0 on.
    rates = [1.0] * 11 + [0.5] * 2
    assert first == second == [rates, [-2 * sum(rates)], 10]
