"""A real SGLang server of a Llama whose rotary embeddings are scaled, beyond the length that they were made for."""

from contextlib import closing

import numpy as np
import pytest
from sglang_policy import PROMPTS, serving
from transformers_models import hf_model

from rljax.rollout.types import SamplingParams

pytestmark = pytest.mark.sglang
ORIGINAL = 32  # tokens
ROPES = {
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": ORIGINAL},
    "linear": {"factor": 4.0},
}


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_rotary_embeddings_are_the_servers(kind, tmp_path, with_faults):
    more = {"max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1}
    model = hf_model(
        (256, 64, 128, 2, 4, 2, 32, True, 10_000.0), "Llama", rope={"rope_type": kind, **ROPES[kind]}, **more
    )
    model.save_pretrained(tmp_path / "model")
    with serving(tmp_path, tmp_path / "model", "float32", with_faults) as served, closing(served.engine()) as engine:
        moved = served.policy.moved(1)
        assert engine.publish(moved, 1)["publish/verify_abs_diff_mean"] < 1e-5
        responses = list(engine.generate(PROMPTS, 2, SamplingParams(100), seed=1))
        assert max(len(response.ids) for response in responses) > 2 * ORIGINAL
        gaps = served.policy.gaps(moved, responses)
    assert len(gaps) > ORIGINAL
    assert np.max(gaps) < 5e-5
