"""Real SGLang servers in other forms: float16, two tensor-parallel workers, and scaled rotary embeddings."""

from contextlib import closing

import numpy as np
import pytest
from sglang_policy import KEYS, PROMPTS, serving
from transformers_models import hf_model

from rljax.errors import VerificationError
from rljax.rollout.types import SamplingParams
from rljax.weights.publish_config import PublishConfig

pytestmark = pytest.mark.sglang
ORIGINAL = 32  # tokens
SHORT = {"original_max_position_embeddings": ORIGINAL}
ROPES = [
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SHORT},
    {"rope_type": "yarn", "factor": 8.0, **SHORT},
    {"rope_type": "linear", "factor": 4.0},
]


@pytest.fixture
def started(request, tmp_path, toy_base, with_faults):
    """Yields a server with the dtype and the number of workers that the test names."""
    dtype, workers = request.param
    # Without this, SGLang needs a NUMA node for each worker.
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(workers)))}
    arguments = ("--tp-size", str(workers))
    with serving(tmp_path, toy_base, dtype, with_faults, extra_env=bound, extra_args=arguments) as made:
        yield made


@pytest.mark.parametrize("started", [("float16", 1)], indirect=True)
def test_in_float16_what_is_sampled_is_within_its_rounding(started):
    policy = started.policy
    with closing(started.engine()) as engine:
        engine.publish(policy.params, 0)
        metrics = engine.publish(policy.moved(1), 1)
        responses = list(engine.generate(PROMPTS, 32, SamplingParams(64), seed=0))
    assert metrics["publish/verified_tensors"] == 24
    assert metrics["publish/verify_abs_diff_mean"] < 2.5e-3
    assert all(response["version"].tolist() == [1] * 64 for response in responses)
    found = policy.gaps(policy.moved(1), responses)
    # Measured on 6,144 tokens: 1.2e-4 and 1.2e-2.
    assert 1e-5 < found.mean() < 3e-4
    assert found.max() < 3e-2


@pytest.mark.parametrize("started", [("float32", 2)], indirect=True)
def test_parts_of_two_workers_add_up_and_a_stale_one_is_caught(started):
    policy = started.policy
    with closing(started.engine(publish=PublishConfig(store="http"))) as engine:
        engine.publish(policy.params, 0)
        assert engine.publish(policy.moved(1), 1)["publish/verified_tensors"] == 24
        responses = list(engine.generate(PROMPTS, 8, SamplingParams(64), seed=0))
        assert all(response["version"].tolist() == [1] * 64 for response in responses)
        assert policy.gaps(policy.moved(1), responses).max() < 2e-5
        started.break_updates("skip", f"{KEYS} 1")
        with pytest.raises(VerificationError, match=f"does not hold the trainer's weights: 1 tensor differs: {KEYS} "):
            engine.publish(policy.moved(2), 2)
        started.break_updates("off")
        engine.publish(policy.moved(2), 3)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_scaled_rotary_embeddings_are_the_servers(rope, tmp_path, with_faults):
    """Responses go beyond the length that the embeddings were made for."""
    more = {"max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1}
    model = hf_model((256, 64, 128, 2, 4, 2, 32, True, 10_000.0), "Llama", rope=rope, **more)
    model.save_pretrained(tmp_path / "model")
    with serving(tmp_path, tmp_path / "model", "float32", with_faults) as served, closing(served.engine()) as engine:
        moved = served.policy.moved(1)
        assert engine.publish(moved, 1)["publish/verify_abs_diff_mean"] < 1e-5
        responses = list(engine.generate(PROMPTS, 2, SamplingParams(100), seed=1))
        assert max(len(response.ids) for response in responses) > 2 * ORIGINAL
        gaps = served.policy.gaps(moved, responses)
    assert len(gaps) > ORIGINAL
    assert np.max(gaps) < 5e-5
