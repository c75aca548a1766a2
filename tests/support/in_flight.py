"""Responses that are sampled while new weights arrive, and checks of their log-probabilities."""

import contextlib
import threading
import time

import numpy as np
from waiting import until

from rljax.rollout.engine import AHEAD
from rljax.rollout.types import SamplingParams

GROUP = 4
SLOWED_S = 0.1  # the additional seconds for a token while weights are published


def sampled_across_publishes(engine, policies, prompts, tokens, pace):
    """Returns ``GROUP`` responses of each prompt; all policies but the first are published while they are sampled.

    The responses have ``tokens`` tokens, too many to be complete before the last publish. ``pace`` makes each later
    forward of the server this many seconds longer, so that no machine completes them too early.
    """
    engine.publish(policies[0], 0)
    failures, responses, samples = [], [], engine.generate(prompts, GROUP, SamplingParams(tokens), seed=1)

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
        with contextlib.suppress(AssertionError):
            until(lambda: samples.metrics.get("rollout/requests", 0) >= GROUP * len(prompts), 60, every_s=0.05)
        time.sleep(1.0)  # the server begins with the requests
        for version, params in enumerate(policies[1:], 1):
            engine.publish(params, version)
            time.sleep(0.5)  # this version samples some tokens, too
    finally:
        pace(0.0)
    sampling.join(timeout=120)
    assert (sampling.is_alive(), failures) == (False, [])
    return responses


def check_versions(scores, prompts, responses, tolerance):
    """Checks that each token has the log-probability (nats) of the policy that sampled it, and all before it, too.

    ``scores`` has a function for each version, from token sequences to the log-probability of each token.
    """
    found = np.zeros((len(scores), len(scores)))  # the largest differences of tokens of version v from version w
    for w, score in enumerate(scores):
        for response, scored in zip(responses, score([r.ids for r in responses]), strict=True):
            gaps = np.abs(scored[-response.length :] - response["rollout_logprobs"])
            for v in response.versions:
                found[v, w] = max(found[v, w], gaps[response["version"] == v].max())
    assert {version for response in responses for version in response.versions.tolist()} == set(range(len(scores)))
    assert any(len(response.versions) > 1 for response in responses)
    others = found[~np.eye(len(scores), dtype=bool)]
    assert found.diagonal().max() < tolerance, found
    assert others.min() > 10 * tolerance, found
