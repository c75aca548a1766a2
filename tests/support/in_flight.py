"""Responses that are sampled while new weights come, and whose log-probabilities their tokens have."""

import threading
import time

import numpy as np

from rljax.rollout.types import SamplingParams

GROUP = 4
SLOWED_S = 0.1  # seconds more for a token while weights are published


def sampled_across_publishes(engine, policies, prompts, tokens, pace):
    """``GROUP`` responses of each prompt that are under way while all but the first policy are published, in order.

    Args:
      engine: samples and publishes.
      policies: published as version 0, 1, ...
      prompts: token ids.
      tokens: of each response; more than are sampled by then.
      pace: makes each further forward of the server take so many seconds more, so that no machine is done before.
    """
    engine.publish(policies[0], 0)
    responses, failures = [], []

    samples = engine.generate(prompts, GROUP, SamplingParams(tokens), seed=1)

    def sample():
        try:
            responses.extend(samples)
        except BaseException as error:
            failures.append(error)

    pace(SLOWED_S)
    try:
        sampling = threading.Thread(target=sample)
        sampling.start()
        until = time.monotonic() + 60
        while samples.metrics.get("rollout/requests", 0) < GROUP * len(prompts) and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(1.0)  # that the server has begun with them
        for version, params in enumerate(policies[1:], 1):
            engine.publish(params, version)
            time.sleep(0.5)  # that this version samples some, too
    finally:
        pace(0.0)
    sampling.join(timeout=120)
    assert not sampling.is_alive()
    assert not failures, failures
    return responses


def check_versions(scores, prompts, responses, tolerance):
    """Each token has the log-probability of the policy that sampled it, all before it computed by that policy.

    Args:
      scores: of each version, token sequences to the log-probability of each token.
      prompts: of the responses.
      responses: of all versions, some of them of several.
      tolerance: largest difference (nats).
    """
    sampled = sorted({span.version for response in responses for span in response.versions})
    assert sampled == list(range(len(scores)))
    assert any(len(response.versions) > 1 for response in responses)
    gaps = gaps_by_version(scores, prompts, responses)
    assert all(gaps[v, v] < tolerance for v in sampled), gaps
    assert all(gaps[v, w] > 10 * tolerance for v in sampled for w in range(len(scores)) if v != w), gaps


def gaps_by_version(scores, prompts, responses):
    """[v, w]: largest |reported - scored| (nats) of the tokens that version v sampled, scored by ``scores[w]``."""
    sequences = [np.concatenate([prompts[r.prompt_index], r.token_ids]) for r in responses]
    found = np.zeros((len(scores), len(scores)))
    for w, score in enumerate(scores):
        for response, scored in zip(responses, score(sequences), strict=True):
            gaps = np.abs(scored[-response.length :] - response.logprobs)
            for span in response.versions:
                found[span.version, w] = max(found[span.version, w], gaps[span.start : span.end].max())
    return found
