"""A state saved on one device is restored onto a mesh, with each value where the mesh puts it."""

import contextlib

import jax
import numpy as np
import pytest

from rljax.policy.config import PolicyConfig
from rljax.policy.model import init_params, param_shardings
from rljax.run.checkpoint import Checkpointer
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.state import OptimizerConfig, abstract_state, create_state, make_optimizer

pytestmark = pytest.mark.mesh
CONFIG = PolicyConfig(32, 32, 64, 1, 4, 2, 8, tie_word_embeddings=True)


def test_a_state_moves_from_one_device_to_a_mesh(tmp_path):
    tx = make_optimizer(OptimizerConfig())
    saved = create_state(init_params(CONFIG, 0), CONFIG, tx, make_mesh(MeshConfig(1, 1)), dynamic_scale=True)
    mesh = make_mesh(MeshConfig(4, 2))
    with contextlib.closing(Checkpointer(tmp_path / "checkpoints")) as checkpointer:
        checkpointer.save(3, saved, {"step": 3})
    with contextlib.closing(Checkpointer(tmp_path / "checkpoints", read_only=True)) as checkpointer:
        state, host = checkpointer.restore(3, abstract_state(CONFIG, tx, mesh, dynamic_scale=True))
    assert host == {"step": 3}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(saved))
    for leaf, where in zip(*map(jax.tree.leaves, (state.params, param_shardings(CONFIG, mesh))), strict=True):
        assert leaf.sharding.is_equivalent_to(where, leaf.ndim), leaf.sharding
