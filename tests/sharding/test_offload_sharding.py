"""With a sharded state in the host's memory, each device has its shards, steps keep their bits, and nothing is left."""

import jax
import numpy as np
import pytest
from sharded_step import batch, make_step, sequences

from rljax.run.fingerprint import array_checksums
from rljax.sharding import HOST_MEMORY, MeshConfig, on_devices, on_host
from rljax.trainer.state import OptimizerConfig, make_optimizer
from rljax.trainer.update import OffloadedUpdate, SingleUpdate, UpdateOptions

pytestmark = pytest.mark.mesh


def make(sizes):
    tx = make_optimizer(OptimizerConfig(learning_rate=1e-2))
    step, state = make_step(sizes, tx=tx, dtype="bfloat16", diagnosis=None)
    return SingleUpdate(step, step.forward, lambda _: batch()), state


def bytes_on_devices(tree_only=None):
    leaves = jax.live_arrays() if tree_only is None else jax.tree.leaves(tree_only)
    return sum(leaf.nbytes for leaf in leaves if leaf.sharding.memory_kind != HOST_MEMORY)


def test_later_steps_are_bit_equal_and_device_buffers_freed():
    (update, stays), (_, given) = (make(MeshConfig(2, 2, replica=2)) for _ in range(2))
    before = [leaf.sharding for leaf in jax.tree.leaves(given)]
    taken = jax.tree.leaves(given)
    moves = on_host(given)
    assert all(leaf.is_deleted() for leaf in taken)
    assert on_host(moves) is not None, "what is there already stays usable"
    offloaded, options = OffloadedUpdate(update), UpdateOptions(1e-2, 0, False)
    for _ in range(3):
        packed = update.pack(sequences())
        stays = update(stays, packed, sequences(), options).state
        old, free = moves, bytes_on_devices() - bytes_on_devices(stays)
        updated = offloaded(moves, packed, sequences(), options)
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
