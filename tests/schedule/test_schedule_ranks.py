"""The mean length over ranks in two processes with gloo, and the rates of a model under DDP and FSDP2."""

import pytest
from two_ranks import outputs_of_two_ranks

pytest.importorskip("torch")

RANK = """
import datetime, json, sys
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from rljax.schedule import SurgeConfig, SurgeTracker
from rljax.schedule.torch import LengthTriggeredScheduler, mean_over_ranks

rank, port, wrapper = int(sys.argv[1]), sys.argv[2], sys.argv[3]
distributed.init_process_group(
    "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
)
model = torch.nn.Linear(4, 4, bias=False)
torch.nn.init.zeros_(model.weight)
if wrapper == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
else:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
tracker = SurgeTracker(SurgeConfig(window=12, warmup=6, smooth=3, persistence=1))
scheduler = LengthTriggeredScheduler(optimizer, tracker=tracker, multiplier=1.2)
means, rates, moved = [], [], []


def weights():
    # The whole matrix: under FSDP2 each rank holds two of its four rows.
    (weight,) = model.parameters()
    if wrapper == "fsdp2":
        assert tuple(weight.to_local().shape) == (2, 4)
        weight = weight.full_tensor()
    return weight.detach().clone()


for step in range(13):
    # Rank 0 has one response, rank 1 has three: only their common mean triples at step 9.
    length_sum, count = [(100, 1), (300, 3)][rank] if step < 8 else [(100, 1), (1500, 3)][rank]
    means.append(mean_over_ranks(length_sum, count))
    scheduler.observe(means[-1])
    model(torch.ones(2, 4)).sum().backward()
    rates.append(optimizer.param_groups[0]["lr"])
    before = weights()
    optimizer.step()
    moved += (before - weights()).unique().tolist()
    optimizer.zero_grad()
    scheduler.step()
print(json.dumps([means, rates, moved, scheduler.surge_step, mean_over_ranks(0, 0) != mean_over_ranks(0, 0)]))
distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.harness
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_two_ranks_take_the_same_rates(wrapper):
    """Two rows of ones give each weight the gradient 2 on both ranks."""
    first, second = outputs_of_two_ranks(RANK, wrapper, timeout=180)
    rates = [1.0] * 11 + [0.5] * 2
    assert first == second == [[100.0] * 8 + [400.0] * 5, rates, [2 * rate for rate in rates], 10, True]
