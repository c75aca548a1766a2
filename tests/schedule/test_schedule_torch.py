"""The torch scheduler has the rates of the optax form to the last float32 bit, and works as torch's schedulers do.

The callback runs in transformers' own Trainer, which trains a tiny model on a CPU and logs as TRL's trainers do.
"""

import io
import json
import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from length_streams import CONFIGS, compiled, streams
from pages import run_block
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR, LRScheduler, SequentialLR
from two_ranks import outputs_of_two_ranks

from rljax.schedule import LengthTriggeredLR, SurgeConfig, SurgeTracker
from rljax.schedule.torch import LengthTriggeredCallback, LengthTriggeredScheduler, mean_over_ranks

pytestmark = pytest.mark.slow

QUICK = SurgeConfig(window=12, warmup=6, smooth=3, persistence=1)
LENGTHS = [100.0] * 8 + [400.0] * 40  # called at step 10, so multiplier 1.2 gives the period 12


def optimizer_of(*rates):
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups)


def scheduler_of(optimizer, config=QUICK, **settings):
    return LengthTriggeredScheduler(optimizer, tracker=SurgeTracker(config), **settings)


def rates_used(optimizer, scheduler, lengths, fractions=None, updates=1):
    """Returns the rate of each group at each update of a batch, read from the optimizer when it updates."""
    used = []
    for length, fraction in zip(lengths, fractions or [None] * len(lengths), strict=True):
        scheduler.observe(length, fraction)
        for _ in range(updates):
            used.append([float(group["lr"]) for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
    return used


# The initial rate, the rule, the multiplier, the factor and the floor. The optax form is compiled for each.
ARGUMENTS = [
    (1e-12, CONFIGS[0], 1.0, 0.5, 0.1),
    (0.7318469, CONFIGS[1], 1.5, 0.37, 0.0),
    (1.2345678e-4, CONFIGS[3], 2.1, 0.99, 1.0),
    (1e-6, CONFIGS[5], 1e12, 0.5, 0.0),
]


@settings(max_examples=40, deadline=None)
@given(arguments=st.sampled_from(ARGUMENTS), stream=streams())
def test_rates_equal_the_optax_form_to_the_bit(arguments, stream):
    init_value, config, multiplier, factor, floor = arguments
    lengths, fractions = stream
    optimizer = optimizer_of(init_value)
    scheduler = scheduler_of(optimizer, config, multiplier=multiplier, decay_factor=factor, floor_ratio=floor)
    used = rates_used(optimizer, scheduler, lengths, [None if math.isnan(f) else f for f in fractions])
    with np.errstate(over="ignore"):
        batches = (np.asarray(lengths, np.float32), np.asarray(fractions, np.float32))
    _, (rates, periods, _) = compiled(arguments)(batches)
    np.testing.assert_array_equal(np.float32(used)[:, 0], np.asarray(rates))
    assert int(periods[-1]) == min(scheduler.decay_period or 0, 2**31 - 1)


def test_each_group_decays_from_its_own_rate():
    """The updates of a batch share its rate."""
    optimizer = optimizer_of(1e-2, 4e-3, 0.0)
    scheduler = scheduler_of(optimizer, multiplier=1.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of another order of calls
        used = rates_used(optimizer, scheduler, LENGTHS, updates=3)
    assert isinstance(scheduler, LRScheduler)
    assert (scheduler.surge_step, scheduler.decay_period) == (10, 12)
    assert used[:69] == [[1e-2, 4e-3, 0.0]] * 33 + [[5e-3, 2e-3, 0.0]] * 36
    assert used[69] == [2.5e-3, 1e-3, 0.0]
    assert used[-1] == scheduler.get_last_lr() == [1e-3, 4e-4, 0.0]  # a sixteenth is below the floor of a tenth


def test_a_rate_in_a_tensor_is_written_in_place():
    rate = torch.tensor(1.0)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=rate, capturable=True)
    group_rate = optimizer.param_groups[0]["lr"]
    scheduler = scheduler_of(optimizer, multiplier=1.0)
    for length in LENGTHS[:10]:
        scheduler.observe(length)
    assert optimizer.param_groups[0]["lr"] is group_rate
    assert group_rate.item() == 0.5
    assert scheduler.get_last_lr()[0] is not group_rate


@pytest.mark.parametrize("cut", [0, 9, 10, 30])
def test_a_resumed_run_has_the_same_rates(cut):
    def build():
        optimizer = optimizer_of(1e-2, 4e-3)
        return optimizer, scheduler_of(optimizer, multiplier=1.2)

    whole = rates_used(*build(), LENGTHS)
    optimizer, scheduler = build()
    rates_used(optimizer, scheduler, LENGTHS[:cut])
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert json.loads(json.dumps(saved["scheduler"])) == saved["scheduler"]
    optimizer, resumed = build()
    optimizer.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["scheduler"])
    assert resumed.get_last_lr() == scheduler.get_last_lr()
    assert rates_used(optimizer, resumed, LENGTHS[cut:]) == whole[cut:]


@pytest.mark.parametrize("save_at", [None, 2, 4, 20])
def test_a_warm_up_by_sequential_lr(save_at):
    """Lengths of the warm-up count, so the call is at update 10 with and without it."""

    def build():
        optimizer = optimizer_of(1.0)
        warmup = LinearLR(optimizer, start_factor=0.25, total_iters=4)
        own = scheduler_of(optimizer, multiplier=1.2)
        return optimizer, own, SequentialLR(optimizer, [warmup, own], milestones=[4])

    (optimizer, own, both), used = build(), []
    for t, length in enumerate(LENGTHS[:24]):
        if t == save_at:
            states = optimizer.state_dict(), both.state_dict()
            optimizer, own, both = build()
            optimizer.load_state_dict(states[0])
            both.load_state_dict(states[1])
        own.observe(length)
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        both.step()
    assert own.surge_step == 10
    assert used[:4] == pytest.approx([0.25, 0.4375, 0.625, 0.8125])
    assert used[4:] == [1.0] * 7 + [0.5] * 12 + [0.25]


def test_in_a_chained_scheduler_the_own_rate_replaces_a_warm_up():
    optimizer = optimizer_of(1.0)
    warmup, own = LinearLR(optimizer, start_factor=0.25, total_iters=4), scheduler_of(optimizer)
    chained = ChainedScheduler([warmup, own])
    for length in LENGTHS[:4]:
        own.observe(length)
        assert optimizer.param_groups[0]["lr"] == 1.0
        optimizer.step()
        chained.step()


def test_in_accelerate_more_steps_of_the_wrapper_change_nothing():
    """The optimizer and scheduler of accelerate act only in the last of three micro-steps, each with the gradient 2."""
    accelerate = pytest.importorskip("accelerate")
    optimizer, moved = optimizer_of(1.0), []
    (weight,) = optimizer.param_groups[0]["params"]
    own = scheduler_of(optimizer, multiplier=1.2)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, wrapped_optimizer, wrapped = accelerator.prepare(torch.nn.ParameterList([weight]), optimizer, own)
    for length in LENGTHS[:13]:
        own.observe(length)
        before = weight.detach().clone()
        for _ in range(3):
            with accelerator.accumulate(model):
                accelerator.backward(2 * weight.sum())
                wrapped_optimizer.step()
                wrapped.step()
                wrapped_optimizer.zero_grad()
        moved += (before - weight.detach()).unique().tolist()
    assert moved == pytest.approx([2.0] * 11 + [1.0] * 2)
    assert wrapped.get_last_lr() == [0.5]
    fresh = scheduler_of(optimizer_of(1.0), multiplier=1.2)
    accelerator.prepare(fresh).load_state_dict(wrapped.state_dict())
    assert fresh.decay_period == 12


def test_the_recipe_of_the_docs():
    """The call is at step 66, so the period is 119. The rate of an update is written after its backward pass."""
    optimizer, used = optimizer_of(1e-6), []
    run_block(
        "schedule.md",
        "# torch\n",
        optimizer=optimizer,
        batches=[SimpleNamespace(length_sum=4 * mean, responses=4) for mean in [1000.0] * 60 + [3500.0] * 60],
        backward=lambda batch: used.append(optimizer.param_groups[0]["lr"]),
    )
    assert used == [1e-6] * 119 + [5e-7]
    assert math.isnan(mean_over_ranks(0, 0))


def test_the_recipe_for_a_patched_trl():
    names = {"AdamW": torch.optim.AdamW, "GRPOTrainer": dict, "model": torch.nn.Linear(2, 2)}
    trainer = run_block("torch_peers.md", "# TRL with the patch\n", config=None, others={}, **names)["trainer"]
    optimizer, scheduler = trainer["optimizers"]
    assert scheduler.optimizer is optimizer
    assert scheduler.observe(1000.0) == [1e-6]


KEY = "completions/mean_length"


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x, labels=None):
        return {"loss": (self.weight * x).sum() ** 2}


class LoggingTrainer(transformers.Trainer):
    """A trainer that adds a length to the log of each update that begins a batch. Like TRL, it overrides ``log``."""

    def __init__(self, *args, lengths=(), updates_per_batch=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.lengths, self.every = lengths, updates_per_batch

    def log(self, logs, start_time=None):
        batch, rest = divmod(self.state.global_step - 1, self.every)
        if "loss" in logs and rest == 0:
            logs |= {KEY: self.lengths[batch], "completions/clipped_ratio": 0.0}
        super().log(logs, start_time)


def trained(tmp_path, callback, steps, lengths=LENGTHS, updates_per_batch=1, resume=None, **settings):
    """Returns the rate of each update, read from the optimizer, and the trainer."""
    pytest.importorskip("accelerate")
    model, used = Tiny(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    optimizer.register_step_pre_hook(lambda *_: used.append(optimizer.param_groups[0]["lr"]))
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=steps,
        per_device_train_batch_size=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **{"learning_rate": 1e-6, "lr_scheduler_type": "constant", "save_strategy": "no"} | settings,
    )
    trainer = LoggingTrainer(
        model=model,
        args=arguments,
        train_dataset=[{"x": torch.ones(3)}] * 64,
        callbacks=[callback],
        optimizers=(optimizer, None),
        lengths=lengths,
        updates_per_batch=updates_per_batch,
    )
    trainer.train(resume_from_checkpoint=resume)
    return used, trainer


def callback_of(**settings):
    return LengthTriggeredCallback(tracker=SurgeTracker(QUICK), **{"multiplier": 1.2} | settings)


def law(lengths, multiplier=1.2):
    controller = LengthTriggeredLR(1e-6, tracker=SurgeTracker(QUICK), multiplier=multiplier)
    return [controller.step(math.nan if length is None else length) for length in lengths]


def test_every_rate_is_the_laws(tmp_path):
    """A length of None counts as a step, and a callback may train twice."""
    lengths, callback = [*LENGTHS[:4], None, *LENGTHS[4:26]], callback_of()
    for run in ("first", "second"):
        rates, trainer = trained(tmp_path / run, callback, 27, lengths=lengths)
        assert rates == law(lengths) == [1e-6] * 12 + [5e-7] * 13 + [2.5e-7] * 2
        assert (callback.surge_step, callback.decay_period, callback.tracker.ignored) == (11, 13, 1)
        assert [row["learning_rate"] for row in trainer.state.log_history if KEY in row] == rates


def test_multiplier_1_decays_from_the_update_after_the_call(tmp_path):
    rates, _ = trained(tmp_path, callback_of(multiplier=1.0), 12)
    expected = law(LENGTHS[:12], multiplier=1.0)
    assert (expected[9], rates[9]) == (5e-7, 1e-6)
    assert rates[:9] + rates[10:] == expected[:9] + expected[10:]


def test_a_resumed_run_reads_the_lengths_from_its_log(tmp_path):
    whole, _ = trained(tmp_path / "whole", callback_of(), 26)
    settings = {"save_strategy": "steps", "save_steps": 11}
    first, _ = trained(tmp_path / "cut", callback_of(), 11, **settings)
    rows = json.loads((tmp_path / "cut/checkpoint-11/trainer_state.json").read_text())["log_history"]
    assert [row[KEY] for row in rows if KEY in row] == LENGTHS[:11]
    callback = callback_of()
    second, _ = trained(tmp_path / "cut", callback, 26, resume=str(tmp_path / "cut/checkpoint-11"), **settings)
    assert first + second == whole
    assert callback.surge_step == 10


def test_updates_on_one_batch_share_its_rate_after_a_warm_up(tmp_path):
    settings = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4}
    rates, _ = trained(tmp_path, callback_of(updates_per_batch=2), 26, updates_per_batch=2, **settings)
    assert rates[:4] == pytest.approx([0.0, 2.5e-7, 5e-7, 7.5e-7])
    assert rates[4:] == [rate for rate in law(LENGTHS[:13]) for _ in range(2)][4:]


def test_the_updates_of_a_batch_come_from_trls_arguments(tmp_path):
    """Two generations of four micro-steps each, at an accumulation of two, make four updates on one batch."""
    of_trl = {"steps_per_generation": 4, "num_iterations": 2, "gradient_accumulation_steps": 2}
    arguments, callback = SimpleNamespace(**of_trl, learning_rate=1.0), callback_of()
    group = {"lr": 1.0, "initial_lr": 1.0}
    state, used = SimpleNamespace(log_history=(), global_step=0), []
    callback.on_train_begin(arguments, state, None)
    for batch in range(13):
        for update in range(4):
            callback.on_step_begin(arguments, state, None, optimizer=SimpleNamespace(param_groups=[group]))
            used.append(group["lr"])
            state.global_step += 1
            assert callback.on_step_end(arguments, state, SimpleNamespace(should_log=False)).should_log
            callback.on_log(arguments, state, None, logs={KEY: LENGTHS[batch]} if update == 0 else {"loss": 0.0})
    assert used == [1.0] * 44 + [0.5] * 8


@pytest.mark.parametrize(("every", "updates"), [(1, 1), (10, 1), (10, 4), (3, 2)])
def test_a_log_with_gaps_has_the_steps_of_all_updates(every, updates):
    """A run of 60 updates was logged every few of them, without this callback, and is resumed with it."""
    callback = callback_of(updates_per_batch=updates)
    entries = [{"step": step, KEY: 100.0} for step in range(every, 61, every)]
    callback.on_train_begin(None, SimpleNamespace(log_history=entries, global_step=60), None)
    assert callback.tracker.step == (entries[-1]["step"] - 1) // updates + 1


def test_the_recipe_for_trl():
    given = run_block("schedule.md", "# TRL\n", GRPOTrainer=dict, model=None, config=None, others={})["trainer"]
    (callback,) = given["callbacks"]
    assert isinstance(callback, LengthTriggeredCallback)
    assert isinstance(callback, transformers.TrainerCallback)


RANK = """
import json, sys
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from rljax.schedule import SurgeConfig, SurgeTracker
from rljax.schedule.torch import LengthTriggeredScheduler, mean_over_ranks

rank, port, wrapper = int(sys.argv[1]), sys.argv[2], sys.argv[3]
distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
model = torch.nn.Linear(4, 4, bias=False)
torch.nn.init.zeros_(model.weight)
if wrapper == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
else:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
tracker = SurgeTracker(SurgeConfig(window=12, warmup=6, smooth=3, persistence=1))
scheduler = LengthTriggeredScheduler(optimizer, tracker=tracker, multiplier=1.2)
means, rates = [], []
for step in range(13):
    # Rank 0 has one response, rank 1 has three: only their common mean triples at step 9.
    length_sum, count = [(100, 1), (300, 3)][rank] if step < 8 else [(100, 1), (1500, 3)][rank]
    means.append(mean_over_ranks(length_sum, count))
    scheduler.observe(means[-1])
    model(torch.ones(2, 4)).sum().backward()
    rates.append(optimizer.param_groups[0]["lr"])
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
(weight,) = model.parameters()
if wrapper == "fsdp2":  # each rank holds two of the four rows
    assert tuple(weight.to_local().shape) == (2, 4)
    weight = weight.full_tensor()
print(json.dumps([means, rates, weight.detach().unique().tolist(), scheduler.surge_step]))
distributed.destroy_process_group()
"""


@pytest.mark.harness
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_two_ranks_take_the_same_rates(wrapper):
    """Two rows of ones give each weight the gradient 2 on both ranks, and each starts at 0."""
    first, second = outputs_of_two_ranks(RANK, wrapper, timeout=180)
    rates = [1.0] * 11 + [0.5] * 2
    assert first == second == [[100.0] * 8 + [400.0] * 5, rates, [-2 * sum(rates)], 10]
