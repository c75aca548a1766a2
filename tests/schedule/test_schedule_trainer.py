"""The callback runs in transformers' own Trainer, which trains a tiny model on a CPU and logs as TRL's trainers do."""

import json
import math
from types import SimpleNamespace

import pytest
from pages import run_block

from rljax.schedule import LengthTriggeredLR, SurgeConfig, SurgeTracker

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from rljax.schedule.torch import LengthTriggeredCallback  # noqa: E402

pytestmark = pytest.mark.slow

QUICK = SurgeConfig(window=12, warmup=6, smooth=3, persistence=1)
LENGTHS = [100.0] * 8 + [400.0] * 18  # the call is at step 10, and 1.2 times that is 12
KEY = "completions/mean_length"


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x, labels=None):
        return {"loss": (self.weight * x).sum() ** 2}


class Used(transformers.TrainerCallback):
    """A callback that notes the rate of the optimizer at each update."""

    def __init__(self):
        self.rates = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.rates.append(optimizer.param_groups[0]["lr"])


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
    used = Used()
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
        model=Tiny(),
        args=arguments,
        train_dataset=[{"x": torch.ones(3)}] * 64,
        callbacks=[callback, used],
        lengths=lengths,
        updates_per_batch=updates_per_batch,
    )
    trainer.train(resume_from_checkpoint=resume)
    return used.rates, trainer


def callback_of(**settings):
    return LengthTriggeredCallback(tracker=SurgeTracker(QUICK), **{"multiplier": 1.2} | settings)


def law(lengths, multiplier=1.2):
    controller = LengthTriggeredLR(1e-6, tracker=SurgeTracker(QUICK), multiplier=multiplier)
    return [controller.step(math.nan if length is None else length) for length in lengths]


def test_every_rate_is_the_laws(tmp_path):
    """A length of None counts as a step, and a callback may train twice."""
    lengths, callback = [*LENGTHS[:4], None, *LENGTHS[4:]], callback_of()
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


def test_the_recipe_of_the_docs():
    given = run_block("schedule.md", "# TRL\n", GRPOTrainer=dict, model=None, config=None, others={})["trainer"]
    (callback,) = given["callbacks"]
    assert isinstance(callback, LengthTriggeredCallback)
    assert isinstance(callback, transformers.TrainerCallback)
