"""With a sharded state in the host's memory, each device has its shards, steps keep their bits, and nothing is left."""

import functools

import jax
import numpy as np
import pytest
from records import train_sequence

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.policy.config import PolicyConfig
from rljax.policy.model import init_params
from rljax.run.fingerprint import array_checksums
from rljax.sharding import HOST_MEMORY, MeshConfig, make_mesh, on_devices, on_host
from rljax.trainer.objective import Objective
from rljax.trainer.packing import max_micro_batches, pack
from rljax.trainer.state import OptimizerConfig, PrecisionConfig, create_state, make_optimizer
from rljax.trainer.step import TrainStep
from rljax.trainer.update import OffloadedUpdate, SingleUpdate, UpdateOptions

pytestmark = pytest.mark.mesh

CONFIG = PolicyConfig(32, 32, 64, 2, 4, 2, 8, tie_word_embeddings=True, initializer_range=0.2)
COUNT, ROW, ROWS = 16, 64, 8


def sequences():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(COUNT):
        prompt, response = (rng.integers(0, 32, int(rng.integers(2, 16))).astype(np.int32) for _ in range(2))
        logprobs = rng.normal(-3, 0.5, len(response)).astype(np.float32)
        found.append(train_sequence(prompt, response, logprobs, float(rng.normal()), True))
    return found


def make(mesh):
    tx = make_optimizer(OptimizerConfig(learning_rate=1e-2))
    shape = max_micro_batches(COUNT, 32, ROW, ROWS), ROWS, ROW
    step = TrainStep(
        CONFIG,
        tx,
        mesh,
        precision=PrecisionConfig(compute_dtype="bfloat16"),
        objective=Objective(LossConfig(), CorrectionConfig().resolved(), COUNT, 16),
        batch_shape=shape,
        diagnosis=None,
    )
    packs = functools.partial(pack, row_tokens=ROW, rows_per_micro_batch=ROWS, micro_batches=shape[0])
    state = create_state(init_params(CONFIG, 0), CONFIG, tx, mesh, dynamic_scale=False)
    return SingleUpdate(step, step.forward, packs), state


def bytes_on_devices(tree_only=None):
    leaves = jax.live_arrays() if tree_only is None else jax.tree.leaves(tree_only)
    return sum(leaf.nbytes for leaf in leaves if leaf.sharding.memory_kind != HOST_MEMORY)


@pytest.mark.parametrize(
    "shape",
    [
        MeshConfig(2, 2, replica=2),
        pytest.param(MeshConfig(8, 1), marks=pytest.mark.harness),
        pytest.param(MeshConfig(4, 2), marks=pytest.mark.harness),
    ],
    ids=str,
)
def test_later_steps_are_bit_equal_and_device_buffers_freed(shape):
    mesh = make_mesh(shape)
    update, stays = make(mesh)
    _, given = make(mesh)
    before = [leaf.sharding for leaf in jax.tree.leaves(given)]
    taken = jax.tree.leaves(given)
    moves = on_host(given)
    assert all(leaf.is_deleted() for leaf in taken)
    assert on_host(moves) is not None, "what is there already stays usable"
    offloaded, options = OffloadedUpdate(update), UpdateOptions(1e-2, 0, False)
    for _ in range(3):
        batch = update.pack(sequences())
        stays = update(stays, batch, sequences(), options).state
        old, free = moves, bytes_on_devices() - bytes_on_devices(stays)
        updated = offloaded(moves, batch, sequences(), options)
        moves = updated.state
        assert bytes_on_devices(moves) == 0
        assert bytes_on_devices() - bytes_on_devices(stays) - free < bytes_on_devices(stays) / 10
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(old)), "a save may still read it"
        assert {"time/reload_s", "time/offload_s"} <= updated.row.keys()
        for one, other, sharding in zip(jax.tree.leaves(stays), jax.tree.leaves(moves), before, strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
            assert other.sharding == sharding.with_memory_kind(HOST_MEMORY)
            assert [s.data.shape for s in one.addressable_shards] == [s.data.shape for s in other.addressable_shards]
    assert array_checksums(stays) == array_checksums(moves)
    back = jax.tree.leaves(on_devices(moves.params))
    assert all(leaf.sharding.memory_kind == "device" for leaf in back)
    assert update.step.compilations == 1
