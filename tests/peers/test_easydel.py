"""The recipe of docs/schedule.md for EasyDeL, with its own training arguments and the optimizer it builds of them."""

import jax.numpy as jnp
import numpy as np
import pytest
from pages import run_block

from rljax.schedule import length_decay_schedule

easydel = pytest.importorskip("easydel")


def test_easydels_optimizer_follows_the_schedule(tmp_path):
    space = run_block(
        "schedule.md",
        "# EasyDeL",
        TrainingArguments=easydel.TrainingArguments,
        length_decay_schedule=length_decay_schedule,
        settings={"save_directory": str(tmp_path), "optimizer": "adamw", "weight_decay": 0.0},
    )
    optimizer, scheduler = space["arguments"].get_optimizer_and_scheduler(400)
    expected = np.float32([max(1e-6 * 0.5 ** (update // 198), 1e-7) for update in range(1, 401)])
    np.testing.assert_array_equal([scheduler(count) for count in range(400)], expected)
    params = {"w": jnp.ones(3)}
    state = optimizer.init(params)
    for count in range(200):
        updates, state = optimizer.update({"w": jnp.ones(3)}, state, params)
        # Equal gradients: Adam moves every weight by the rate.
        np.testing.assert_allclose(updates["w"], -expected[count], rtol=1e-4)
