"""A step takes these bytes a parameter: 12 for masters and moments, 4 and 2 for gradients, and a copy of the weights.

XLA on a CPU multiplies in float32, so there the copy of the blocks has four bytes a parameter, not two.
"""

import math

import jax
import pytest
from tiny_step import make_step

from rljax.policy.config import PolicyConfig
from rljax.policy.model import abstract_params
from rljax.trainer.state import OptimizerConfig, make_optimizer

CONFIG = PolicyConfig(4096, 256, 768, 4, 4, 2, 64, tie_word_embeddings=True)


def bytes_a_parameter(micro_batches):
    how = {"count": 2, "limit": 8, "dtype": "bfloat16", "remat": "blocks"}
    step = make_step(make_optimizer(OptimizerConfig()), config=CONFIG, shape=(micro_batches, 1, 16), **how)
    memory = step.lower().compile().memory_analysis()
    assert memory.alias_size_in_bytes > 0.99 * memory.argument_size_in_bytes  # the state is donated
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(CONFIG)))
    return (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / parameters


@pytest.mark.slow
@pytest.mark.parametrize(("micro_batches", "most"), [pytest.param(1, 20.5, marks=pytest.mark.harness), (2, 25.0)])
def test_a_step_keeps_no_copies_that_it_does_not_need(micro_batches, most):
    assert 18.0 < bytes_a_parameter(micro_batches) < most
