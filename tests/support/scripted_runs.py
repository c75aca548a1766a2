"""Small runs of ``train`` in this process, with an engine whose responses are known."""

import contextlib
import dataclasses
from pathlib import Path

import jax
from changed_configs import changed
from toy_problems import load_once
from toy_runs import TOY_BASE
from toy_texts import toy_config

from rljax.data.prompts import DataConfig
from rljax.data.toy import build_tokenizer
from rljax.rollout.types import RolloutConfig
from rljax.run.build import Inputs, build, starting_point
from rljax.run.checkpoint import CheckpointConfig, Checkpointer
from rljax.run.config import Config, EvalConfig, ModelConfig, RunConfig
from rljax.run.loop import train
from rljax.run.rate import ScheduleConfig
from rljax.run.stop import StopRequest
from rljax.run.training import make_update
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.packing import PackingConfig
from rljax.trainer.state import OptimizerConfig, PrecisionConfig

TOKENIZER, POLICY, MESH = build_tokenizer(), toy_config(), make_mesh(MeshConfig(1, 1))


def settings(directory, **changes):
    """Returns the configuration of four steps. ``changes`` has fields by section."""
    config = Config(
        run=RunConfig(dir=str(directory), steps=4),
        model=ModelConfig(path=str(TOY_BASE)),
        data=DataConfig(batch_size=2, max_prompt_tokens=8),
        rollout=RolloutConfig(group_size=2, max_response_tokens=8, dtype="float32"),
        precision=PrecisionConfig(compute_dtype="float32"),
        packing=PackingConfig(row_tokens=16, rows_per_micro_batch=2, share_prefixes=False),  # compiles less
        mesh=MeshConfig(1, 1),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        schedule=ScheduleConfig(kind="length_decay", decay_period=3),
        eval=EvalConfig(every=2),
        checkpoint=CheckpointConfig(every=3),
    )
    return changed(config, **changes)


def sum_of(prompt):
    return str(sum(int(term) for term in prompt.rstrip("=").split("+")))


def half_right(prompt, sample, seed):
    """Returns a right answer for a prompt's first response. The second is 7777777, seven tokens and the end."""
    return f"{sum_of(prompt)}$" if sample == 0 else "7777777$"


def compiled_step(directory, **changes):
    return make_update(settings(directory, **changes), POLICY, MESH, None)


class Stop(StopRequest):
    """A request to stop that also comes if ``is_over`` says so."""

    def __init__(self, grace_s, is_over):
        super().__init__(grace_s)
        self.is_over = is_over

    def is_requested(self):
        return super().is_requested() or self.is_over()


@contextlib.contextmanager
def opened_parts(config, engine, *, update=None, stop=None, checkpointer=Checkpointer, keep=9):
    """Yields the parts of a run that saves in its directory, and its checkpoints. ``update``: None for its own one."""
    with contextlib.closing(checkpointer(Path(config.run.dir) / "checkpoints", keep=keep)) as saves:
        problems = load_once(config, TOKENIZER)
        parts = build(Inputs(config, POLICY, TOKENIZER, MESH), engine, saves, problems, stop or StopRequest())
        with contextlib.closing(parts.source):
            yield dataclasses.replace(parts, update=update or parts.update), saves


def trained(parts, rows, last_row=None, stop=None):
    """Trains from where the checkpoints are; returns the progress, and the weights before and after."""
    state, progress = starting_point(parts, MESH)
    before = jax.device_get(state.params)
    with stop or contextlib.nullcontext():
        state = train(parts, state, progress, rows, last_row)
    return progress, before, jax.device_get(state.params)
