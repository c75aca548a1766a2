"""A batch has only what the loss reads."""

import numpy as np
import pytest
from sharded_step import CONFIG, sequences

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.data.prompts import DataConfig
from rljax.rollout.types import RolloutConfig
from rljax.run.config import Config
from rljax.run.packing import make_pack
from rljax.tokens import TOPS


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
