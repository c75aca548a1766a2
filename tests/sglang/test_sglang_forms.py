"""Real SGLang servers in other forms: in float16, and with two tensor-parallel workers."""

import dataclasses
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from sglang_policy import Policy

from rljax.errors import VerificationError
from rljax.rollout.servers.process import environment_python
from rljax.rollout.servers.sglang.server import SglangConfig, start
from rljax.rollout.types import SamplingParams
from rljax.weights.publish_config import PublishConfig

pytestmark = pytest.mark.sglang
PROMPTS = [np.array(ids, np.int32) for ids in ([3, 4, 5], [6, 7], [1, 2, 3, 4, 5, 6, 7])]
KEYS = "model.layers.0.self_attn.k_proj.weight"


@dataclasses.dataclass(frozen=True)
class Started:
    """A running server, its initial policy, and the file that names the fault of its updates."""

    url: str
    policy: Policy
    fault: Path


@pytest.fixture
def started(request, tmp_path, toy_base, with_faults):
    """Yields a server with the dtype and the number of workers that the test names."""
    dtype, workers = request.param
    fault = tmp_path / "fault"
    config = SglangConfig(
        str(toy_base),
        str(environment_python("sglang")),
        dtype=dtype,
        max_model_len=256,
        log_path=tmp_path / "server.log",
        extra_args=("--tp-size", str(workers)),
        # Without this, SGLang needs a NUMA node for each worker.
        extra_env=with_faults(fault) | {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(workers)))},
    )
    with start(config, 400) as server:
        yield Started(server.url, Policy.read(toy_base, dtype), fault)


def gaps(policy, params, responses) -> np.ndarray:
    """Returns |reported - scored| of each token (nats)."""
    scored = policy.scorer()(params, [r.ids for r in responses])
    return np.concatenate(
        [np.abs(s[-r.length :] - r["rollout_logprobs"]) for r, s in zip(responses, scored, strict=True)]
    )


@pytest.mark.parametrize("started", [("float16", 1)], indirect=True)
def test_in_float16_what_is_sampled_is_within_its_rounding(started):
    policy = started.policy
    with closing(policy.engine(started.url)) as engine:
        engine.publish(policy.params, 0)
        metrics = engine.publish(policy.moved(1), 1)
        responses = list(engine.generate(PROMPTS, 32, SamplingParams(64), seed=0))
    assert metrics["publish/verified_tensors"] == 24
    assert metrics["publish/verify_abs_diff_mean"] < 2.5e-3
    assert all(response["version"].tolist() == [1] * 64 for response in responses)
    found = gaps(policy, policy.moved(1), responses)
    # Measured on 6,144 tokens: 1.2e-4 and 1.2e-2.
    assert 1e-5 < found.mean() < 3e-4
    assert found.max() < 3e-2


@pytest.mark.parametrize("started", [("float32", 2)], indirect=True)
def test_parts_of_two_workers_add_up_and_a_stale_one_is_caught(started):
    policy = started.policy
    with closing(policy.engine(started.url, publish=PublishConfig(store="http"))) as engine:
        engine.publish(policy.params, 0)
        assert engine.publish(policy.moved(1), 1)["publish/verified_tensors"] == 24
        responses = list(engine.generate(PROMPTS, 8, SamplingParams(64), seed=0))
        assert all(response["version"].tolist() == [1] * 64 for response in responses)
        assert gaps(policy, policy.moved(1), responses).max() < 2e-5
        started.fault.write_text(f"skip {KEYS} 1")
        with pytest.raises(VerificationError, match=f"does not hold the trainer's weights: 1 tensor differs: {KEYS} "):
            engine.publish(policy.moved(2), 2)
        started.fault.write_text("off -")
        engine.publish(policy.moved(2), 3)
