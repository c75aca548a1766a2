"""Real SGLang servers in other forms: in float16, and with two tensor-parallel workers."""

from contextlib import closing

import pytest
from sglang_policy import KEYS, PROMPTS, serving

from rljax.errors import VerificationError
from rljax.rollout.types import SamplingParams
from rljax.weights.publish_config import PublishConfig

pytestmark = pytest.mark.sglang


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
