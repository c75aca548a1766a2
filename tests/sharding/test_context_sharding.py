"""Rows whose tokens are split over devices have the numbers of one device, even work, and one compilation."""

import functools

import jax
import numpy as np
import pytest
from cut_batches import with_supports
from jax.sharding import NamedSharding, PartitionSpec
from packed_rows import gradients, heads, row
from records import train_sequence
from sharded_step import CONFIG, CORRECTION, COUNT, LOSS, batch, gradient_keeper, shape

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.policy.attention import attention_of_parts
from rljax.policy.context import fold, unfold
from rljax.policy.flash import block_attention
from rljax.policy.model import init_params
from rljax.sharding import MeshConfig, constrain, make_mesh
from rljax.trainer.measure import DiagnosisConfig
from rljax.trainer.objective import Objective
from rljax.trainer.packing import pack
from rljax.trainer.precision import PrecisionConfig
from rljax.trainer.state import create_state
from rljax.trainer.step import TrainStep

pytestmark = pytest.mark.mesh

SEGMENTS = np.stack([row(96, each) for each in ([96], [20, 30], [16] * 6, [], [1, 63], [7, 30, 50], [5, 6, 7], [95])])


def on_parts(attention, parts):
    """Returns attention of whole rows whose parts lie on devices."""

    def of_rows(q, k, v, segments):
        out = attention(*(fold(x, parts) for x in (q, k, v)), segments)
        return constrain(unfold(out, parts), None, None, None, None)

    return of_rows


def of_whole_rows(q, k, v, segments):
    return block_attention(q, k, v, segments, block=16)


def gathered(block, parts):
    return functools.partial(block_attention, block=block, parts=parts)


def exchanged(block, parts):
    return functools.partial(attention_of_parts, functools.partial(block_attention, block=block), parts)


# Blocks of 6 tokens (8 devices) and 12 are padded to 8 and 16. Two key-value heads on 4 devices are not split.
@pytest.mark.parametrize(
    ("mesh", "attention"),
    [
        (MeshConfig(1, context=8), gathered),
        (MeshConfig(2, 2, context=2), gathered),
        (MeshConfig(1, context=8), exchanged),  # one query head each, of two key-value heads
        (MeshConfig(1, 4, context=2), exchanged),
        (MeshConfig(1, 2, context=3), exchanged),  # 4 query heads: 2 each, and zeros on the third device
        *(
            pytest.param(mesh, attention, marks=pytest.mark.harness)
            for mesh, attention in [
                (MeshConfig(2, context=4), gathered),
                (MeshConfig(2, context=4), exchanged),
                (MeshConfig(2, 2, context=2), exchanged),
            ]
        ),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_attention_of_parts_is_that_of_whole_rows(mesh, attention):
    arrays = heads(SEGMENTS, num_heads=8)
    expected = gradients(of_whole_rows, arrays, SEGMENTS)
    mesh = make_mesh(mesh)
    parts = mesh.shape["context"]
    with jax.set_mesh(mesh):
        placed = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec("fsdp")))
        got = gradients(on_parts(attention(8, parts), parts), placed, SEGMENTS)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6, rtol=0)


MEASURED = DiagnosisConfig()


def run(mesh, made, *, correction=CORRECTION, cut=False, remat="none", keep_gathered=False, measured=MEASURED, steps=1):
    mesh, tx = make_mesh(mesh), gradient_keeper()
    step = TrainStep(
        CONFIG,
        tx,
        mesh,
        precision=PrecisionConfig(compute_dtype="float32", remat=remat),
        objective=Objective(LOSS, correction, COUNT, 16, has_tail=not cut),
        batch_shape=made.tokens.shape,
        diagnosis=measured,
        keep_gathered=keep_gathered,
        cut=cut,
    )
    state = create_state(init_params(CONFIG, 0), CONFIG, tx, mesh, dynamic_scale=False)
    for _ in range(steps):
        state, metrics, values = step(state, made, 0.1, True)
    assert step.compilations == 1
    return jax.device_get((state.opt_state.inner_state.trace, metrics, values.logprobs))


def check_equal(found, expected):
    for g, wanted in zip(jax.tree.leaves(found[0]), jax.tree.leaves(expected[0]), strict=True):
        assert np.abs(wanted).max() > 0
        assert np.abs(g - wanted).max() / np.abs(wanted).max() <= 1e-5
    assert found[1].keys() == expected[1].keys()
    for name, value in found[1].items():
        np.testing.assert_allclose(value, expected[1][name], rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(found[2], expected[2], atol=2e-5, rtol=0)


@pytest.fixture(scope="module")
def alone():
    return run(MeshConfig(1), batch())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (MeshConfig(1, replica=2, context=2), {"keep_gathered": True}),
        *(
            pytest.param(mesh, options, marks=pytest.mark.harness)
            for mesh, options in [
                (MeshConfig(1, context=8), {"remat": "blocks"}),
                (MeshConfig(1, replica=2, context=4), {"keep_gathered": True}),
                (MeshConfig(2, 2, context=2), {"remat": "dots"}),
                (MeshConfig(4, context=2), {}),
                (MeshConfig(2, context=4), {"remat": "blocks"}),
                (MeshConfig(1, 4, context=2), {"remat": "blocks"}),
                (MeshConfig(1, 2, context=2, replica=2), {}),
            ]
        ),
    ],
    ids=str,
)
def test_gradients_and_metrics_do_not_depend_on_the_parts(mesh, options, alone):
    check_equal(run(mesh, batch(), **options), alone)


def long_batch():
    """Returns a batch.

    One sequence fills a row, another ends in the middle of a block, and short ones fill a third row.
    """
    rng = np.random.default_rng(3)
    lengths = [(8, 32), (5, 28), *[(3, 5)] * 5]
    sequences = [
        train_sequence(
            *(rng.integers(0, 32, n).astype(np.int32) for n in (p, r)),
            *(rng.normal(-3.0, 0.5, r).astype(np.float32), float(rng.normal()), True),
            **{name: rng.normal(-3.0, 0.5, r).astype(np.float32) for name in ("old_logprobs", "reference_logprobs")},
        )
        for p, r in lengths
    ]
    return pack(sequences, row_tokens=40, rows_per_micro_batch=2, micro_batches=2)


@pytest.mark.slow
def test_long_sequences_in_odd_blocks_have_equal_gradients():
    split = run(MeshConfig(1, context=4), long_batch(), measured=None, steps=2, remat="blocks")
    check_equal(split, run(MeshConfig(1), long_batch(), measured=None, steps=2))


@pytest.mark.slow
def test_likeliest_tokens_of_cut_distributions_agree():
    centered = CorrectionConfig(level="token", threshold=1.2, score_centering=True)
    made = with_supports(batch(), CONFIG.vocab_size, 6)
    options = {"correction": centered, "cut": True, "measured": None}
    split = run(MeshConfig(1, 2, context=2), made, remat="dots", **options)
    check_equal(split, run(MeshConfig(1), made, **options))


def test_weights_are_split_over_the_devices_of_a_row():
    mesh = make_mesh(MeshConfig(2, context=4))
    state = create_state(init_params(CONFIG, 0), CONFIG, gradient_keeper(), mesh, dynamic_scale=False)
    query = state.params["layers"]["attention"]["query"]
    assert query.addressable_shards[0].data.shape == (2, 4, 4, 8)


def test_rows_that_the_devices_cannot_share_are_refused():
    made = batch()
    with pytest.raises(ValueError, match=r"mesh.context = 8 splits rows into 16 blocks.* rows of 56 tokens"):
        run(MeshConfig(1, context=8), jax.tree.map(lambda x: x[:, :, :56] if x.ndim else x, made))
    assert shape() == made.tokens.shape
