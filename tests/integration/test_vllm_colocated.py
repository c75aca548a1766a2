"""A real vLLM server sleeps while the trainer trains. On a CPU it does everything except giving memory back."""

import numpy as np
import pytest
from vllm_checks import OUT_OF_BAND, sabotaged

from rljax.errors import VerificationError
from rljax.rollout.types import SamplingParams

pytestmark = pytest.mark.vllm
PROMPTS = [np.arange(1, 5, dtype=np.int32), np.arange(9, 12, dtype=np.int32)]


@pytest.fixture
def colocated(bfloat16):
    with bfloat16.published(colocated=True) as engine:
        yield engine
    bfloat16.engine().close()  # a new engine wakes the server


def is_asleep(engine) -> bool:
    return engine.fleet.wait(engine.fleet.server(engine.fleet.urls[0]).call("GET", "/is_sleeping"))["is_sleeping"]


def sampled_versions(engine) -> set[int]:
    responses = list(engine.generate(PROMPTS, 2, SamplingParams(6), seed=3))
    assert len(responses) == 4
    return {version for response in responses for version in response.versions.tolist()}


def test_it_sleeps_and_wakes_with_the_current_weights(bfloat16, colocated):
    assert not is_asleep(colocated)
    assert sampled_versions(colocated) == {0}
    assert is_asleep(colocated)
    assert sampled_versions(colocated) == {0}  # as for an evaluation, the server wakes for the same version
    metrics = colocated.publish(bfloat16.model.moved(1), 1)
    assert not is_asleep(colocated)
    assert sampled_versions(colocated) == {1}
    assert min(metrics["time/wake_s"], metrics["time/sleep_s"]) > 0
    assert metrics["rollout/server_losses"] == 0


def test_a_copy_from_before_the_sleep_is_caught(bfloat16, colocated):
    """Other faults after a sleep are caught as without one (test_vllm_sabotage.py)."""
    sampled_versions(colocated)
    with sabotaged(bfloat16, "restore", "on"), pytest.raises(VerificationError, match=OUT_OF_BAND):
        colocated.publish(bfloat16.model.moved(2), 1)
    colocated.publish(bfloat16.model.moved(2), 2)
    assert sampled_versions(colocated) == {2}
