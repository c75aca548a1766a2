"""The batch on the devices is the same from parts as from whole arrays, and is shared with one CPU device."""

import jax
import numpy as np
import pytest
from cut_batches import with_supports
from sharded_step import CONFIG, ROW, ROWS, batch, sequences

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.data.prompts import DataConfig
from rljax.rollout.types import RolloutConfig
from rljax.run.config import Config
from rljax.run.packing import make_pack
from rljax.sharding import MeshConfig, make_mesh, named_sharding, replicated
from rljax.tokens import TOPS
from rljax.trainer.micro_batches import BATCH_AXES, place_batch, place_used
from rljax.trainer.packing import pack


def where(mesh, packed):
    return named_sharding(mesh, BATCH_AXES, packed.tokens.shape), replicated(mesh)


@pytest.mark.mesh
@pytest.mark.parametrize("micro_batches", [1, 3, 11, 16])
def test_parts_make_the_same_batch(micro_batches):
    """With one micro-batch it has all rows. The other numbers leave micro-batches without tokens."""
    rows = 8 * ROWS if micro_batches == 1 else ROWS
    packed = pack(sequences(), row_tokens=ROW, rows_per_micro_batch=rows, micro_batches=micro_batches)
    packed = with_supports(packed, CONFIG.vocab_size, 3)
    unused = {name: np.array(getattr(packed, name)) for name in ("top_ids", "top_logprobs")}
    for array in unused.values():
        array[int(packed.used) :] = 0
    packed = packed._replace(**unused)
    shardings = where(make_mesh(MeshConfig(4, 2)), packed)
    whole, parts = place_batch(packed, *shardings), place_used(packed, *shardings)
    for name, array in parts._asdict().items():
        expected = getattr(whole, name)
        if expected is None:
            assert array is None
            continue
        np.testing.assert_array_equal(array, expected, err_msg=name)
        assert (array.dtype, array.sharding) == (expected.dtype, expected.sharding), name


def test_one_device_shares_the_memory_of_the_batch():
    packed = batch()
    placed = place_batch(packed, *where(make_mesh(MeshConfig(1, 1), jax.devices()[:1]), packed))
    pairs = zip(jax.tree.leaves(packed), jax.tree.leaves(placed), strict=True)
    assert all(array.unsafe_buffer_pointer() == host.ctypes.data for host, array in pairs if host.ndim)


@pytest.mark.parametrize("centers", [False, True])
def test_only_what_the_loss_reads_is_packed(centers):
    every = [s.add({name: np.zeros((len(s.response), 2)) for name in TOPS}) for s in sequences()]
    config = Config(
        data=DataConfig(batch_size=12, max_prompt_tokens=9),
        rollout=RolloutConfig(group_size=4, max_response_tokens=22, top_logprobs=2),
        correction=CorrectionConfig(score_centering=centers),
    )
    packed = make_pack(config, CONFIG, config.num_sequences)(every)
    assert (packed.top_ids is not None) == (packed.top_logprobs is not None) == centers
