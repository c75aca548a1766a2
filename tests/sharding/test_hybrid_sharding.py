"""A hybrid of delta nets and attention has the same gradients, metrics and log-probabilities on every mesh."""

import functools

import pytest
from hybrids import tiny_hybrid
from sharded_step import check_equal, outcome

from rljax.sharding import MeshConfig

CONFIG = tiny_hybrid(vocab_size=32, initializer_range=0.05)
pytestmark = [pytest.mark.mesh, pytest.mark.slow]


@functools.cache
def alone():
    return outcome(MeshConfig(1), config=CONFIG)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (MeshConfig(2, 2), {"remat": "blocks"}),
        *(
            pytest.param(mesh, options, marks=pytest.mark.harness)
            for mesh, options in [(MeshConfig(8), {}), (MeshConfig(1, 2, replica=2), {"remat": "dots"})]
        ),
    ],
    ids=str,
)
def test_gradients_and_metrics_do_not_depend_on_the_mesh(mesh, options):
    check_equal(outcome(mesh, config=CONFIG, **options), alone())
