"""``TrainStep.lower`` gives the program that a call of the step runs, from shapes alone, and so its memory."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from records import train_sequence
from tiny_step import MESH, fresh_state, make_step

from rljax.policy.config import PolicyConfig
from rljax.policy.model import abstract_params
from rljax.sharding import replicated
from rljax.trainer.micro_batches import over_micro_batches, place_batch
from rljax.trainer.packing import pack
from rljax.trainer.state import OptimizerConfig, make_optimizer
from rljax.trainer.totals import place_controls

ADAMW = make_optimizer(OptimizerConfig())
HOW = {"shape": (2, 1, 16), "count": 3, "limit": 8}


def make_batch(**more):
    one = train_sequence(np.arange(2), np.arange(5), np.full(5, -1.0), 1.0, **more)
    return pack([one] * 3, row_tokens=16, rows_per_micro_batch=1, micro_batches=2)


def of_shapes(tree):
    return jax.tree.map(lambda x: (tuple(x.shape), np.dtype(x.dtype)), tree)


@pytest.mark.parametrize("given", [(), ("old_logprobs", "reference_logprobs")])
def test_it_takes_what_the_packed_batches_have(given):
    step, batch = make_step(ADAMW, **HOW), make_batch(**dict.fromkeys(given, np.full(5, -1.0, np.float32)))
    state = jax.eval_shape(lambda: fresh_state(ADAMW))
    (lowered_state, lowered_batch, controls), _ = step.lower(*given).args_info
    assert of_shapes(lowered_state) == of_shapes(state)
    assert of_shapes(lowered_batch) == of_shapes(batch)
    assert of_shapes(controls) == of_shapes(place_controls(1e-3, True, False, replicated(MESH)))


@pytest.mark.slow
def test_its_executable_gives_what_a_call_gives():
    step, everywhere = make_step(ADAMW, **HOW), replicated(MESH)
    placed = place_batch(make_batch(), everywhere, everywhere)
    mine = step.lower().compile()(fresh_state(ADAMW), placed, place_controls(1e-3, True, False, everywhere))
    jax.tree.map(np.testing.assert_array_equal, mine, step(fresh_state(ADAMW), make_batch(), 1e-3, True))


@pytest.mark.parametrize("one", [False, True])
def test_a_micro_batch_is_traced_once(one):
    """Its numbers are added up, and its values kept. Their shapes and the loop come from one trace."""
    traced, batch = [], make_batch()

    def each(micro):
        traced.append(micro.tokens.shape)
        return micro.tokens.sum(), micro.positions + 1

    @jax.jit
    def total(batch):
        span = (0, 1 if one else batch.used)
        return over_micro_batches(batch, each, lambda shape: jnp.zeros(shape.shape, shape.dtype), jnp.add, span)

    numbers, values = total(batch)
    taken = slice(0, 1 if one else int(batch.used))
    assert traced == [batch.tokens.shape[1:]]
    assert int(numbers) == batch.tokens[taken].sum()
    np.testing.assert_array_equal(values[taken], batch.positions[taken] + 1)


LARGER = PolicyConfig(4096, 256, 768, 4, 4, 2, 64, tie_word_embeddings=True)


@pytest.mark.slow
@pytest.mark.parametrize(("micro_batches", "most"), [pytest.param(1, 20.5, marks=pytest.mark.harness), (2, 25.0)])
def test_a_step_keeps_no_copies_that_it_does_not_need(micro_batches, most):
    """Masters and moments take 12 bytes a parameter, gradients 4 and 2, and a copy of the weights the rest.

    XLA on a CPU multiplies in float32, so there the copy of the blocks has four bytes a parameter, not two.
    """
    how = {"count": 2, "limit": 8, "dtype": "bfloat16", "remat": "blocks", "shape": (micro_batches, 1, 16)}
    memory = make_step(ADAMW, config=LARGER, **how).lower().compile().memory_analysis()
    assert memory.alias_size_in_bytes > 0.99 * memory.argument_size_in_bytes  # the state is donated
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(LARGER)))
    assert 18.0 < (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / parameters < most
