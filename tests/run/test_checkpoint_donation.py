"""A save goes on while the next steps run, which get the saved arrays donated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from rljax.run.checkpoint import Checkpointer

SHAPE = (4, 2**18)


@functools.partial(jax.jit, donate_argnums=0)
def step(state):
    return jax.tree.map(lambda x: x * 2.0 + 1.0, state)


def test_later_steps_do_not_reach_into_a_save(tmp_path):
    """Where arrays lie in the host's memory, which orbax reads while it writes; a damaged one would not be restored."""
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
