"""A real SGLang server: publishes, proofs, samples, scores, and faults that SGLang reports as success."""

import functools
from contextlib import closing

import numpy as np
import pytest
from in_flight import GROUP, check_versions, sampled_across_publishes
from opened_clients import call
from sglang_policy import KEYS, NORM, PROMPTS, serving
from small_engines import distributions
from vllm_checks import OTHER_BITS, OUT_OF_BAND
from weight_training import change_after_writing

from rljax.errors import HandshakeError, VerificationError
from rljax.rollout.build import connect
from rljax.rollout.servers.engine import ServedEngine
from rljax.rollout.servers.sglang.client import SglangBackend
from rljax.rollout.types import SamplingParams
from rljax.weights.publish_config import PublishConfig

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def running(tmp_path_factory, toy_base, with_faults):
    with serving(tmp_path_factory.mktemp("sglang"), toy_base, "float32", with_faults) as made:
        yield made


@pytest.fixture
def served(running):
    running.break_updates("off")
    yield running
    running.break_updates("off")


@pytest.fixture
def opened(served):
    """Yields a function that builds engines, each with version 0 published, and closes them afterwards."""
    engines = []

    def build(**options) -> ServedEngine:
        engines.append(served.engine(**options))
        engines[-1].publish(served.policy.params, 0)
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("store", ["shared", "directory"])
def test_published_weights_are_proven_and_sampled_from(served, opened, store):
    """With a directory, version 2 comes as a delta, through this machine's mirror."""
    engine = opened(publish=PublishConfig(store=store))
    for version in (1, 2):
        metrics = engine.publish(served.policy.moved(version), version)
    assert metrics["publish/verified_tensors"] == 24
    assert metrics["publish/verify_abs_diff_mean"] < 1e-5
    assert ("publish/pulled_bytes" in metrics) == (store == "directory")
    responses = list(engine.generate(PROMPTS, 4, SamplingParams(24, 0.7, (14,)), seed=1))
    assert len(responses) == 12
    score = served.policy.scorer(temperature=0.7)
    for response in responses:
        prompt = PROMPTS[response.prompt_index]
        (expected,) = score(served.policy.moved(2), [np.concatenate([prompt, response.response])])
        np.testing.assert_allclose(response["rollout_logprobs"], expected[len(prompt) :][: response.length], atol=2e-5)
        assert response["version"].tolist() == [2] * response.length
        assert response.truncated or response.response[-1] == 14
    assert {response.truncated for response in responses} != {True}


def test_the_likeliest_tokens_are_the_trainers(served, opened):
    policy, k = served.policy, 5
    engine = opened(top_logprobs=k)
    found = positions = 0
    for response in engine.generate(PROMPTS, 3, SamplingParams(24, 0.8, reported=k), seed=3):
        trainers = distributions(policy.params, policy.config, PROMPTS, response, 0.8)
        ids, logprobs = response["top_ids"], response["top_logprobs"]
        assert ids.shape == (response.length, k)
        assert (np.diff(logprobs, axis=1) <= 0).all()
        np.testing.assert_allclose(np.take_along_axis(trainers, ids, 1), logprobs, atol=1.5e-5)
        found += (np.sort(np.argsort(-trainers, axis=1)[:, :k]) == np.sort(ids)).all(axis=1).sum()
        positions += response.length
    assert positions - 2 <= found <= positions  # Two tokens may be all but tied.
    assert positions > 50


@pytest.mark.parametrize("update", ["keep", "abort"])
def test_responses_under_way_go_on_with_new_weights(served, update):
    """Each token has the log-probability of the policy that sampled it, and computed everything before the token."""
    policies = [served.policy.params, served.policy.moved(5), served.policy.moved(6)]
    with closing(served.engine(update=update, max_staleness=2, max_tokens=240)) as engine:
        slow = functools.partial(served.break_updates, "slow")
        responses = sampled_across_publishes(engine, policies, PROMPTS, 230, slow)
    assert len({(r.prompt_index, r.sample_index) for r in responses}) == len(responses) == GROUP * len(PROMPTS)
    assert all(r.length == 230 for r in responses)
    score = served.policy.scorer()
    check_versions([functools.partial(score, params) for params in policies], PROMPTS, responses, 2e-5)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        *(((how, of), f"{OTHER_BITS}: 1 tensor differs: {of} ") for how, of in (("flip", NORM), ("skip", KEYS))),
        (("unflushed",), OUT_OF_BAND),
    ],
)
def test_other_bits_and_a_cache_that_is_not_flushed_are_found(served, opened, fault, said):
    """SGLang reports success for each of these faults."""
    engine = opened()
    served.break_updates(*fault)
    with pytest.raises(VerificationError, match=said):
        engine.publish(served.policy.moved(4), 1)
    served.break_updates("off")
    engine.publish(served.policy.moved(4), 2)


def test_updates_wait_for_requests_and_refuse_other_shapes(served, opened, monkeypatch):
    """SGLang refuses to flush its cache while a request is still ending, and answers 400."""
    engine = opened()
    served.break_updates("busy", "2")
    assert engine.publish(served.policy.moved(4), 1)["publish/verified_tensors"] == 24
    served.break_updates("off")
    broken = ["model.embed_tokens.weight"]  # of another shape; a sound publish must work again
    change_after_writing(monkeypatch, lambda name, array: array[:-1] if name in broken else array)
    with pytest.raises(RuntimeError, match="AssertionError"):
        engine.publish(served.policy.moved(5), 2)
    broken.clear()
    engine.publish(served.policy.moved(5), 3)
    assert len(list(engine.generate(PROMPTS, 1, SamplingParams(4), seed=1))) == 3


def test_what_does_not_fit_is_refused(served, opened, tmp_path):
    """It is refused at the handshake, or before it is sent or loaded."""
    with pytest.raises(HandshakeError, match="the dtype is float32, expected bfloat16"):
        served.engine(dtype="bfloat16")
    with pytest.raises(HandshakeError, match="max_model_len is 256, expected at least 300"):
        served.engine(max_tokens=300)
    with pytest.raises(ValueError, match=r"token ids outside 0\.\.15"):
        opened().generate([np.array([16], np.int32)], 1, SamplingParams(1), seed=0)
    update = {"model_path": str(tmp_path), "weight_version": "x"}
    with pytest.raises(RuntimeError, match="lies in no directory that a trainer has shown"):
        call(served.url, "POST", "/update_weights_from_disk", kind=SglangBackend(), json=update)


def test_a_paused_server_goes_on_with_the_next_run(served, opened):
    url, kind = served.url, SglangBackend()
    try:
        call(url, "POST", "/pause_generation", kind=kind, json={"mode": "retract"})
        with pytest.raises(ValueError, match="is paused"):
            connect([served.url], kind="sglang")
        opened().publish(served.policy.moved(6), 1)
    finally:
        call(url, "POST", "/continue_generation", kind=kind, json={})


def test_scores_of_given_tokens_are_the_trainers(served, opened):
    """This is the way of ``sglang:URL`` in a comparison."""
    opened()
    wanted = served.policy.scorer()(served.policy.params, PROMPTS)
    with closing(connect([served.url], kind="sglang")) as server:
        assert server.logprobs_temperature(0.5) == 0.5
        for got, expected in zip(server.score(PROMPTS, at_once=2), wanted, strict=True):
            np.testing.assert_allclose(got[1:], expected[1:], atol=2e-5)


def test_a_prompt_may_hold_the_last_id_of_the_vocabulary(served, opened):
    """Tokens after it are sampled as in the trainer. As a given token it gets another id's score, which is noticed."""
    prompt = np.array([3, 15, 4, 15, 15], np.int32)
    (response,) = opened().generate([prompt], 1, SamplingParams(8), seed=0)
    (expected,) = served.policy.scorer()(served.policy.params, [np.concatenate([prompt, response.response])])
    np.testing.assert_allclose(response["rollout_logprobs"], expected[5:], atol=2e-5)
    server = connect([served.url], kind="sglang")
    with closing(server), pytest.raises(RuntimeError, match="scored other tokens"):
        list(server.score([prompt], at_once=1))
