"""``TrainStep.lower`` gives the program that a call of the step runs, from shapes alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from records import train_sequence

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.policy.config import PolicyConfig
from rljax.policy.model import init_params
from rljax.sharding import MeshConfig, make_mesh, replicated
from rljax.trainer.micro_batches import over_micro_batches, place_batch
from rljax.trainer.objective import Objective
from rljax.trainer.packing import pack
from rljax.trainer.state import OptimizerConfig, PrecisionConfig, create_state, make_optimizer
from rljax.trainer.step import TrainStep
from rljax.trainer.totals import place_controls

CONFIG = PolicyConfig(24, 32, 64, 1, 4, 2, 8, tie_word_embeddings=True)
SHAPE = (2, 1, 16)


def make_step(mesh):
    objective = Objective(LossConfig(), CorrectionConfig(), 3, 8)
    precision, tx = PrecisionConfig(compute_dtype="float32"), make_optimizer(OptimizerConfig())
    return TrainStep(CONFIG, tx, mesh, precision=precision, objective=objective, batch_shape=SHAPE, diagnosis=None), tx


def make_batch(**more):
    r = np.arange(5, dtype=np.int32)
    one = train_sequence(r[:2], r, np.full(5, -1.0, np.float32), 1.0, True, **more)
    return pack([one] * 3, row_tokens=16, rows_per_micro_batch=1, micro_batches=2)


def of_shapes(tree):
    return jax.tree.map(lambda x: (tuple(x.shape), np.dtype(x.dtype)), tree)


@pytest.mark.parametrize("given", [(), ("old_logprobs",), ("old_logprobs", "reference_logprobs")])
def test_it_takes_what_the_packed_batches_have(given):
    mesh = make_mesh(MeshConfig(1, 1))
    step, tx = make_step(mesh)
    batch = make_batch(**dict.fromkeys(given, np.full(5, -1.0, np.float32)))
    state = jax.eval_shape(lambda: create_state(init_params(CONFIG, 0), CONFIG, tx, mesh, dynamic_scale=False))
    (lowered_state, lowered_batch, controls), _ = step.lower(*given).args_info
    assert of_shapes(lowered_state) == of_shapes(state)
    assert of_shapes(lowered_batch) == of_shapes(batch)
    assert of_shapes(controls) == of_shapes(place_controls(1e-3, True, False, replicated(mesh)))


@pytest.mark.slow
def test_its_executable_gives_what_a_call_gives():
    mesh = make_mesh(MeshConfig(1, 1))
    step, tx = make_step(mesh)
    everywhere = replicated(mesh)

    def state():
        return create_state(init_params(CONFIG, 0), CONFIG, tx, mesh, dynamic_scale=False)

    compiled = step.lower().compile()
    placed = place_batch(make_batch(), everywhere, everywhere)
    mine = compiled(state(), placed, place_controls(1e-3, True, False, everywhere))
    jax.tree.map(np.testing.assert_array_equal, mine, step(state(), make_batch(), 1e-3, True))


@pytest.mark.parametrize("span", [(0, "used"), (0, 1)])
def test_a_micro_batch_is_traced_once(span):
    """Its numbers are added up, and its values kept. Their shapes and the loop come from one trace."""
    traced = []

    def each(micro):
        traced.append(micro.tokens.shape)
        return micro.tokens.sum(), micro.positions + 1

    @jax.jit
    def total(batch):
        ends = [getattr(batch, end) if isinstance(end, str) else end for end in span]
        return over_micro_batches(batch, each, lambda shape: jnp.zeros(shape.shape, shape.dtype), jnp.add, ends)

    batch = make_batch()
    numbers, values = total(batch)
    taken = slice(0, 1) if span[1] == 1 else slice(0, int(batch.used))
    assert traced == [batch.tokens.shape[1:]]
    assert int(numbers) == batch.tokens[taken].sum()
    np.testing.assert_array_equal(values[taken], batch.positions[taken] + 1)
