"""A batch is shared with one CPU device, and has only what the loss reads."""

import jax
import numpy as np
import pytest
from sharded_step import CONFIG, batch, sequences

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.data.prompts import DataConfig
from rljax.rollout.types import RolloutConfig
from rljax.run.config import Config
from rljax.run.packing import make_pack
from rljax.sharding import MeshConfig, make_mesh, named_sharding, replicated
from rljax.tokens import TOPS
from rljax.trainer.micro_batches import BATCH_AXES, place_batch


def test_one_device_shares_the_memory_of_the_batch():
    packed, mesh = batch(), make_mesh(MeshConfig(1, 1), jax.devices()[:1])
    placed = place_batch(packed, named_sharding(mesh, BATCH_AXES, packed.tokens.shape), replicated(mesh))
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
