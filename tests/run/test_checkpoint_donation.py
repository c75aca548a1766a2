"""A save goes on while the next steps run, though the saved arrays are donated to them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from rljax.run.checkpoint import Checkpointer

SHAPE = (4, 2**18)


def live_bytes():
    """Returns the bytes of all buffers, each counted once."""
    return sum({array.unsafe_buffer_pointer(): array.nbytes for array in jax.live_arrays()}.values())


@functools.partial(jax.jit, donate_argnums=0)
def step(state):
    return jax.tree.map(lambda x: x * 2.0 + 1.0, state)


def test_later_steps_do_not_reach_into_a_save(tmp_path):
    """On a CPU, orbax reads the arrays' own memory while it writes.

    The restored arrays must have the values from before.
    """
    state = {f"{i}": jnp.full(SHAPE, float(i)) for i in range(8)}
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    checkpointer.save(1, state, {})
    for _ in range(3):
        state = step(state)
    jax.block_until_ready(state)
    checkpointer.close()
    restored, _ = Checkpointer(tmp_path / "checkpoints", read_only=True).restore(1, jax.eval_shape(lambda: state))
    for i in range(8):
        np.testing.assert_array_equal(restored[f"{i}"], np.full(SHAPE, float(i), np.float32))


def test_without_room_for_a_copy_the_save_is_waited_for(tmp_path):
    state = {f"{i}": jnp.full(SHAPE, float(i)) for i in range(8)}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    checkpointer = Checkpointer(tmp_path / "checkpoints", free_memory=lambda: size)
    before = live_bytes()
    checkpointer.save(1, state, {})
    assert live_bytes() < before + size / 2
    assert checkpointer.last_save_s() is not None  # the files of the save are complete
    state = step(state)
    checkpointer.close()
    restored, _ = Checkpointer(tmp_path / "checkpoints", read_only=True).restore(1, jax.eval_shape(lambda: state))
    for i in range(8):
        np.testing.assert_array_equal(restored[f"{i}"], np.full(SHAPE, float(i), np.float32))
