"""Responses that are sampled while new weights arrive, and checks of their log-probabilities."""

import threading
import time

import numpy as np

from rljax.rollout.engine import AHEAD
from rljax.rollout.types import SamplingParams

GROUP = 4
SLOWED_S = 0.1  # the additional seconds for a token while weights are published


def sampled_across_publishes(engine, policies, prompts, tokens, pace):
    """Returns ``GROUP`` responses of each prompt; all policies but the first are published while they are sampled.

    Args:
      engine: The engine that samples and publishes.
      policies: The policies, which are published in order as versions 0, 1, ...
      prompts: The token ids of the prompts.
      tokens: The length of each response, so large that no response is complete before the last publish.
      pace: A function that makes each later forward of the server this many seconds longer. Then no machine completes
        the responses too early.
    """
    engine.publish(policies[0], 0)
    responses, failures = [], []

    samples = engine.generate(prompts, GROUP, SamplingParams(tokens), seed=1)

    def sample():
        AHEAD.set(1)
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
        time.sleep(1.0)  # the server begins with the requests
        for version, params in enumerate(policies[1:], 1):
            engine.publish(params, version)
            time.sleep(0.5)  # this version samples some tokens, too
    finally:
        pace(0.0)
    sampling.join(timeout=120)
    assert not sampling.is_alive()
    assert not failures, failures
    return responses


def check_versions(scores, prompts, responses, tolerance):
    """Checks that each token has the log-probability of the policy that sampled it.

    That policy also computes everything before the token.

    Args:
      scores: One function for each version, from token sequences to the log-probability of each token.
      prompts: The prompts of the responses.
      responses: The responses of all versions. Some have tokens of several versions.
      tolerance: The largest difference (nats).
    """
    sampled = sorted({version for response in responses for version in response.versions.tolist()})
    assert sampled == list(range(len(scores)))
    assert any(len(response.versions) > 1 for response in responses)
    gaps = gaps_by_version(scores, prompts, responses)
    assert all(gaps[v, v] < tolerance for v in sampled), gaps
    assert all(gaps[v, w] > 10 * tolerance for v in sampled for w in range(len(scores)) if v != w), gaps


def gaps_by_version(scores, prompts, responses):
    """Returns the largest difference between reported and computed log-probabilities (nats), as [v, w].

    Entry [v, w] is over the tokens that version v sampled, and ``scores[w]`` computes them.
    """
    sequences = [r.ids for r in responses]
    found = np.zeros((len(scores), len(scores)))
    for w, score in enumerate(scores):
        for response, scored in zip(responses, score(sequences), strict=True):
            gaps = np.abs(scored[-response.length :] - response["rollout_logprobs"])
            for version in response.versions:
                found[version, w] = max(found[version, w], gaps[response["version"] == version].max())
    return found
