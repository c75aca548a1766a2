"""A real server that is asked as it stands samples from its model, without a word from the trainer."""

from contextlib import closing

import numpy as np
import pytest

from rljax.rollout.build import connect
from rljax.rollout.types import SamplingParams

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("served", ["float32"], indirect=True)
def test_a_served_model_samples_with_the_servers_weights(served, prompts):
    sampling = SamplingParams(16, 0.8)
    with served.published(served.model.moved(3), 7) as engine:
        expected = {(r.prompt_index, r.sample_index): r for r in engine.generate(prompts, 3, sampling, seed=4)}
    with closing(connect([served.url])) as model:
        assert model.info.root == str(served.model.path)
        drawn = list(model.generate(prompts, 3, sampling, seed=4))
    assert len(drawn) == len(expected) == 15
    # Both send the same seed with each response. In float32 a draw differs only if two tokens are nearly tied.
    alike = [
        np.array_equal(r.response, expected[r.prompt_index, r.sample_index].response) and r.truncated for r in drawn
    ]
    assert sum(alike) >= 13
