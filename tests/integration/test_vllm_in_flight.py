"""New weights come while a real vLLM server samples. Each token has the policy and the context it was computed from."""

import functools

import pytest
from in_flight import GROUP, check_versions, sampled_across_publishes
from vllm_checks import rpc

pytestmark = pytest.mark.vllm
TOKENS = 300


@pytest.mark.parametrize("update", ["keep", pytest.param("abort", marks=pytest.mark.harness)])
def test_each_token_has_the_logprob_of_its_policy(float32, prompts, update):
    """The same policy also computed everything before the token. No key and no value of an older policy is left."""
    policies = [float32.model.params, float32.model.moved(1), float32.model.moved(2)]
    engine = float32.engine(update=update, max_staleness=2, server_wait_s=30.0)

    def pace(seconds: float) -> None:
        rpc(float32, "sabotage_pace", str(seconds))

    try:
        responses = sampled_across_publishes(engine, policies, prompts, TOKENS, pace)
    finally:
        engine.close()
    assert len({(r.prompt_index, r.sample_index) for r in responses}) == len(responses) == GROUP * len(prompts)
    assert all(r.length == TOKENS and r.truncated for r in responses)
    scores = [functools.partial(float32.score, params) for params in policies]
    check_versions(scores, prompts, responses, 2e-5)
