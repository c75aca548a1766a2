"""New weights while a real vLLM server samples: which tokens are of which policy, and what they were computed from."""

import functools

import pytest
from in_flight import check_versions, sampled_across_publishes

pytestmark = pytest.mark.vllm
TOKENS = 300
GROUP = 12  # 60 responses at a time: a fast CPU takes longer for them than two publishes do


@pytest.mark.parametrize("update", ["keep", "abort"])
def test_each_token_has_the_log_probability_of_the_policy_that_sampled_it(float32, prompts, update):
    """With all that is before it computed by that same policy: no key and no value of an older one is left."""
    policies = [float32.model.params, float32.model.moved(1), float32.model.moved(2)]
    engine = float32.engine(update=update, max_staleness=2, server_wait_s=30.0)
    try:
        responses = sampled_across_publishes(engine, policies, prompts, TOKENS, GROUP)
    finally:
        engine.close()
    assert len({(r.prompt_index, r.sample_index) for r in responses}) == len(responses) == GROUP * len(prompts)
    assert all(r.length == TOKENS and r.truncated for r in responses)
    assert any(len(r.versions) > 1 for r in responses)
    scores = [functools.partial(float32.score, params) for params in policies]
    check_versions(scores, prompts, responses, 2e-5)
