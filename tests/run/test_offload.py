"""Runs whose state is in the host's memory between updates: the same bits, and nothing of it on the devices."""

import contextlib
import dataclasses
import gc
import types

import jax
import numpy as np
import pytest
from scripted_engine import ScriptedEngine
from toy_runs import TOY_BASE

from rljax.data.prompts import DataConfig
from rljax.data.toy import build_tokenizer, policy_config
from rljax.policy.model import abstract_params
from rljax.rollout.build import policy_functions
from rljax.rollout.types import RolloutConfig
from rljax.run.build import build, check_offload, load_problems, starting_point
from rljax.run.checkpoint import CheckpointConfig, Checkpointer
from rljax.run.config import Config, EvalConfig, ModelConfig, RunConfig
from rljax.run.dry_run import dry_run
from rljax.run.loop import train
from rljax.sharding import HOST_MEMORY, MeshConfig, make_mesh
from rljax.trainer.packing import PackingConfig
from rljax.trainer.state import OptimizerConfig
from rljax.trainer.step import PrecisionConfig

TOKENIZER, POLICY, MESH = build_tokenizer(), policy_config(), make_mesh(MeshConfig(1, 1))
PROBES = [np.arange(1, 9, dtype=np.int32), np.arange(3, 8, dtype=np.int32)]


def settings(directory, *, offload, steps=3, **lora):
    config = Config(
        run=RunConfig(dir=str(directory), steps=steps),
        model=ModelConfig(path=str(TOY_BASE)),
        data=DataConfig(batch_size=2, max_prompt_tokens=8),
        rollout=RolloutConfig(
            engine="vllm",
            urls=("http://127.0.0.1:1",),
            colocated=True,
            offload_state=offload,
            group_size=2,
            max_response_tokens=8,
            dtype="bfloat16",
        ),
        precision=PrecisionConfig(compute_dtype="float32"),
        packing=PackingConfig(row_tokens=16, rows_per_micro_batch=2),
        mesh=MeshConfig(1, 1),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        eval=EvalConfig(every=0),
        checkpoint=CheckpointConfig(every=1),
    )
    return dataclasses.replace(config, lora=dataclasses.replace(config.lora, **lora))


def on_the_devices():
    """Bytes of the arrays that live in the devices' own memory."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if array.sharding.memory_kind != HOST_MEMORY)


def sum_of(prompt):
    return str(sum(int(term) for term in prompt.rstrip("=").split("+")))


class Watching(ScriptedEngine):
    """Computes what a publish computes, and looks at the devices' memory when it samples and has published."""

    def __init__(self):
        super().__init__(TOKENIZER, lambda prompt, sample, seed: "7777777$" if sample else f"{sum_of(prompt)}$")
        self.functions = policy_functions(POLICY, "bfloat16")
        self.before, self.seen, self.results = on_the_devices(), [], []

    def publish(self, params, policy_version):
        super().publish(params, policy_version)
        tensors = {name: array.tobytes() for name, array in self.functions.tensors(params)}
        parts = [(part.tensor, part.region, part.array.tobytes()) for part in self.functions.parts(params)]
        sums = dict(self.functions.checksums(params))
        scores = [vector.tobytes() for vector in self.functions.score(params, PROBES)]
        self.results.append((tensors, parts, sums, scores))

    def generate(self, *arguments, **options):
        self.seen.append(on_the_devices() - self.before)
        yield from super().generate(*arguments, **options)


@pytest.fixture
def go(tmp_path):
    def run(name, *, change=lambda update: update, **options):
        config, engine, rows = settings(tmp_path / name, **options), Watching(), []
        with contextlib.ExitStack() as stack:
            checkpointer = Checkpointer(tmp_path / name / "checkpoints", keep=9)
            stack.callback(checkpointer.close)
            problems = load_problems(config, TOKENIZER)
            components = build(config, POLICY, TOKENIZER, MESH, engine, checkpointer, problems)
            components.update = change(components.update)
            stack.callback(components.rewards.close)
            state, progress = starting_point(components, MESH)
            state = train(components, state, progress, lambda row, histograms: rows.append(row))
        return types.SimpleNamespace(engine=engine, rows=rows, state=state, saved=checkpointer.all_steps())

    return run


def assert_equal_states(one, other):
    for a, b in zip(jax.tree.leaves(jax.device_get(one)), jax.tree.leaves(jax.device_get(other)), strict=True):
        assert a.tobytes() == b.tobytes()


def state_bytes(state):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


@pytest.mark.slow
def test_steps_are_bit_for_bit_those_of_a_state_that_stays(go):
    stays, moves = go("stays", offload=False), go("moves", offload=True)
    assert_equal_states(stays.state, moves.state)
    assert stays.engine.results == moves.engine.results
    assert len(moves.engine.results) == 4
    clock = ("time/", "perf/")
    for row, other in zip(stays.rows, moves.rows, strict=True):
        assert other.keys() - row.keys() == {"time/reload_s", "time/offload_s"}
        assert other["time/reload_s"] + other["time/offload_s"] < other["time/train_s"]
        assert {k: v for k, v in row.items() if not k.startswith(clock)} == {
            k: v for k, v in other.items() if not k.startswith(clock)
        }
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(moves.state)} == {HOST_MEMORY}
    size = state_bytes(moves.state)
    assert min(stays.engine.seen) >= size
    assert max(moves.engine.seen) < size / 100, "of the state something is on the devices while the engine samples"


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoints_with_or_without_it(go):
    whole = go("whole", offload=True, steps=4)
    go("first", offload=True, steps=2)
    again = go("first", offload=False, steps=3)
    assert again.engine.published == [2, 3]
    assert_equal_states(go("first", offload=True, steps=4).state, whole.state)


@pytest.mark.slow
def test_what_an_update_that_fails_was_given_is_saved(go, capsys):
    whole = go("whole", offload=True, steps=2)

    class Failing:
        """Takes the state that it was given, as a step does, and fails."""

        def __init__(self, update):
            self.inner, self.pack, self.calls = update._update, update._update.pack, 0
            update._update, self.update = self.take, update

        def take(self, *arguments):
            self.calls += 1
            updated = self.inner(*arguments)
            if self.calls == 3:
                raise RuntimeError("planted")
            return updated

        def __call__(self, *arguments):
            return self.update(*arguments)

    with pytest.raises(RuntimeError, match="planted"):
        go("fails", offload=True, change=Failing, steps=3)
    assert "step 2 is saved; the same command goes on from there" in capsys.readouterr().err
    again = go("fails", offload=True, steps=2)
    assert again.engine.published == [2]
    assert_equal_states(again.state, whole.state)


@pytest.mark.slow
def test_adapters_stay(go):
    run = go("adapters", offload=True, rank=2)
    assert "time/offload_s" not in run.rows[0]
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(run.state)} == {"device"}


def test_devices_without_such_memory_are_refused_in_one_line(tmp_path):
    device = types.SimpleNamespace(addressable_memories=list, platform="metal")
    mesh = types.SimpleNamespace(local_devices=[device])
    with pytest.raises(ValueError, match=r"rollout\.offload_state needs .* pinned_host, .* \(metal\) .*: give false"):
        check_offload(settings(tmp_path, offload=True), mesh)
    check_offload(settings(tmp_path, offload=False), mesh)
    check_offload(settings(tmp_path, offload=True), MESH)


def test_the_dry_run_says_what_servers_find_beside_them(tmp_path):
    def said(**options):
        (line,) = [line for line in dry_run(settings(tmp_path, **options)).splitlines() if "while servers" in line]
        return line.removeprefix("while servers sample").strip()

    count = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(POLICY)))
    state = f"{12 * count / 1024**2:.2f} MiB"
    assert said(offload=True) == f"0 B of the trainer on each device; {state} of state wait in the host's memory"
    assert said(offload=False) == f"{state} of the trainer on each device"
    config = settings(tmp_path, offload=True)
    plain = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, colocated=False))
    assert "while servers sample" not in dry_run(plain)
