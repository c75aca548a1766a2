"""Responses that are sampled while new weights come, and whose log-probabilities their tokens have."""

import threading
import time

import numpy as np

from rljax.rollout.types import SamplingParams

GROUP = 4


def sampled_across_publishes(engine, policies, prompts, tokens, group=GROUP):
    """Responses of ``tokens`` that are under way while all but the first of ``policies`` are published, in order.

    There must be so many of them, ``group`` of each prompt, that the server is not done with them by then.
    """
    engine.publish(policies[0], 0)
    responses, failures = [], []

    def sample():
        try:
            responses.extend(engine.generate(prompts, group, SamplingParams(tokens), seed=1))
        except BaseException as error:
            failures.append(error)

    sampling = threading.Thread(target=sample)
    sampling.start()
    asked, until = 0.0, time.monotonic() + 60
    while asked < group * len(prompts) and time.monotonic() < until:
        asked += engine.pop_metrics().get("rollout/requests", 0.0)
        time.sleep(0.05)
    time.sleep(0.5)  # that the server has begun with them
    for version, params in enumerate(policies[1:], 1):
        engine.publish(params, version)
    sampling.join(timeout=120)
    assert not sampling.is_alive()
    assert not failures, failures
    return responses


def check_versions(scores, prompts, responses, tolerance):
    """Each token has the log-probability of the policy that sampled it, all before it computed by that policy.

    Args:
      scores: of each version, token sequences to the log-probability of each token.
      prompts: of the responses.
      responses: most of several versions.
      tolerance: largest difference (nats).
    """
    sampled = sorted({span.version for response in responses for span in response.versions})
    assert len(sampled) > 1
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
