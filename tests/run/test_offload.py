"""Runs with everything in the host's memory between updates have the same bits, and leave nothing on the devices."""

import gc
import itertools
import types

import jax
import numpy as np
import pytest
import scripted_runs
from scripted_engine import RowList, ScriptedEngine
from scripted_runs import MESH, POLICY, TOKENIZER, half_right, opened_parts
from toy_runs import TOY_BASE, without_clock

from rljax.policy.families import read_config
from rljax.policy.lora import LoraConfig, MergedPolicy, init_adapters
from rljax.policy.model import abstract_params
from rljax.policy.peft import save_adapters
from rljax.rollout.build import policy_functions
from rljax.run.build import starting_point
from rljax.run.loop import train
from rljax.run.training import check_offload
from rljax.sharding import HOST_MEMORY
from rljax.trainer.step import TrainStep

COUNT = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(POLICY)))
STEPS = 3
PROBES = [np.arange(1, 9, dtype=np.int32), np.arange(3, 8, dtype=np.int32)]


def settings(directory, *, offload, steps=STEPS, kl="none", **lora):
    served = {"engine": "vllm", "urls": ("http://127.0.0.1:1",), "colocated": offload, "dtype": "bfloat16"}
    changes = {"run": {"steps": steps}, "eval": {"every": 0}, "checkpoint": {"every": 1}, "rollout": served}
    loss = {"kl": kl, "kl_coefficient": 0.0 if kl == "none" else 0.1}
    return scripted_runs.settings(directory, loss=loss, lora=lora, **changes)


def on_the_devices():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if array.sharding.memory_kind != HOST_MEMORY)


class Watching(ScriptedEngine):
    """An engine that computes what a publish computes. It looks at the devices' memory when it samples."""

    def __init__(self):
        super().__init__(TOKENIZER, half_right)
        self.functions = policy_functions(POLICY, "bfloat16")
        self.before, self.seen, self.results = on_the_devices(), [], []

    def publish(self, params, policy_version):
        tensors = {name: array.tobytes() for name, array in self.functions.tensors(params)}
        parts = [(part.tensor, part.region, part.array.tobytes()) for part in self.functions.parts(params)]
        scores = [vector.tobytes() for vector in self.functions.score(params, PROBES)]
        self.results.append((tensors, parts, dict(self.functions.checksums(params)), scores))
        return super().publish(params, policy_version)

    def respond(self, *arguments):
        self.seen.append(on_the_devices() - self.before)
        yield from super().respond(*arguments)


def go_in(directory, **options):
    engine, rows = Watching(), RowList()
    with opened_parts(settings(directory, **options), engine) as (parts, _):
        state = train(parts, *starting_point(parts, MESH), rows)
    return types.SimpleNamespace(engine=engine, rows=rows, state=state)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns a run of three steps whose state moves, and that nothing disturbs."""
    return go_in(tmp_path_factory.mktemp("whole"), kl="k3", offload=True)


def assert_equal_states(one, other):
    for a, b in zip(jax.tree.leaves(jax.device_get(one)), jax.tree.leaves(jax.device_get(other)), strict=True):
        assert a.tobytes() == b.tobytes()


def on_devices_only(compute):
    """Returns ``compute`` with a check that no argument's array is in the host's memory, as a CPU would compute."""

    def checked(*arguments, **options):
        arrays = [leaf for leaf in jax.tree.leaves((arguments, options)) if isinstance(leaf, jax.Array)]
        assert not [array.shape for array in arrays if array.sharding.memory_kind == HOST_MEMORY]
        return compute(*arguments, **options)

    return checked


@pytest.fixture
def strict(monkeypatch):
    """Makes the trainer fail if it computes from any memory but the devices'."""
    for name in ("__call__", "forward"):
        monkeypatch.setattr(TrainStep, name, on_devices_only(getattr(TrainStep, name)))
    make = MergedPolicy.__init__

    def made(self, *arguments, **options):
        make(self, *arguments, **options)
        self._merge = on_devices_only(self._merge)

    monkeypatch.setattr(MergedPolicy, "__init__", made)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Returns the directory of adapters whose product is not zero."""
    path, shape, lora = tmp_path_factory.mktemp("adapters"), read_config(TOY_BASE), LoraConfig(rank=2)
    moved = jax.tree.map(lambda leaf: leaf + 0.01, init_adapters(shape, lora, 5))
    save_adapters(path, moved, shape, lora, TOY_BASE)
    return str(path)


@pytest.mark.harness  # the next test has the same bits
@pytest.mark.slow
@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(
    ("kl", "rank", "from_adapters"),
    [
        pytest.param("none", 0, False, id="weights"),
        pytest.param("k3", 0, False, id="weights, reference"),
        pytest.param("k3", 2, True, id="adapters from a file, reference"),
    ],
)
def test_steps_are_bit_for_bit_those_of_what_stays(tmp_path, adapters, kl, rank, from_adapters):
    options = {"kl": kl, "rank": rank, "adapter": adapters if from_adapters else None}
    stays, moves = (go_in(tmp_path / f"{moves}", offload=moves, **options) for moves in (False, True))
    assert_equal_states(stays.state, moves.state)
    assert stays.engine.results == moves.engine.results
    assert len(moves.engine.results) == STEPS + 1
    for row, other in zip(stays.rows, moves.rows, strict=True):
        assert other.keys() - row.keys() == {"time/reload_s", "time/offload_s"}
        assert other["time/reload_s"] + other["time/offload_s"] < other["time/train_s"]
    assert without_clock(stays.rows) == without_clock(moves.rows)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(moves.state)} == {HOST_MEMORY}
    kept, state = min(stays.engine.seen), sum(leaf.nbytes for leaf in jax.tree.leaves(moves.state))
    assert kept >= state + (4 * COUNT if rank or kl != "none" else 0)
    assert max(moves.engine.seen) < kept / 100, "something of the trainer is on the devices while the engine samples"


@pytest.mark.harness
def test_a_run_goes_on_from_its_checkpoints_with_or_without_it(tmp_path, whole):
    go_in(tmp_path, kl="k3", offload=True, steps=1)
    assert go_in(tmp_path, kl="k3", offload=False, steps=2).engine.published == [1, 2]
    assert_equal_states(go_in(tmp_path, kl="k3", offload=True).state, whole.state)


@pytest.mark.slow
def test_what_an_update_that_fails_was_given_is_saved(tmp_path, whole, monkeypatch, capsys):
    step, calls = TrainStep.__call__, itertools.count(1)

    def fails_at_the_third(self, *arguments, **options):
        """Takes the given state, as a step does, and fails at the third call."""
        updated = step(self, *arguments, **options)
        if next(calls) == 3:
            raise RuntimeError("planted")
        return updated

    monkeypatch.setattr(TrainStep, "__call__", fails_at_the_third)
    with pytest.raises(RuntimeError, match="planted"):
        go_in(tmp_path, kl="k3", offload=True)
    monkeypatch.undo()
    assert "step 2 is saved; the same command goes on from there" in capsys.readouterr().err
    again = go_in(tmp_path, kl="k3", offload=True)
    assert again.engine.published == [2, 3]
    assert_equal_states(again.state, whole.state)


def test_devices_without_such_memory_are_refused_in_one_line(tmp_path):
    device = types.SimpleNamespace(addressable_memories=list, platform="metal")
    mesh = types.SimpleNamespace(local_devices=[device])
    with pytest.raises(ValueError, match=r"rollout\.colocated needs .* pinned_host, .* \(metal\) .*: give false"):
        check_offload(settings(tmp_path, offload=True), mesh)
    check_offload(settings(tmp_path, offload=False), mesh)
    check_offload(settings(tmp_path, offload=True), MESH)
