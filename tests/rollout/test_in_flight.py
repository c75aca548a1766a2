"""New weights come while stand-ins sample. The first token of a part equals the last token of the part before."""

import time

import numpy as np
import pytest
from served_engines import PARAMS, PROMPTS, published
from waiting import until

from rljax.errors import ServerError, ServersLostError, VerificationError
from rljax.rollout.types import SamplingParams

TOKENS = 40


def sampled(engine, n=2, reported=0):
    return list(engine.generate(PROMPTS, n, SamplingParams(TOKENS, reported=reported), seed=0))


def tops_of(token):
    """Returns the likeliest tokens beside a sampled token: the token itself, and the tokens 7 and 8 later."""
    return [(token, -1.0), ((token + 7) % 64, -2.0), ((token + 8) % 64, -3.0)]


@pytest.mark.parametrize("update", ["abort", pytest.param("keep", marks=pytest.mark.harness)])
def test_responses_under_way_go_on_with_the_new_weights(fake, elsewhere, update):
    fake.tops = tops_of
    with published(fake.url, update=update, max_staleness=1) as engine:
        fake.token_s = 0.02
        fake.asked.clear()
        sampling = elsewhere.submit(sampled, engine, 2, 2)
        until(lambda: fake.running == 4)
        time.sleep(0.2)
        engine.publish(PARAMS, 1)
        responses = sampling.result(timeout=30)
    assert fake.pauses == [update, update]
    assert {(r.prompt_index, r.sample_index) for r in responses} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    of_rollouts = [asked for asked in fake.asked if asked[0][:2] in ([1, 2], [9], [9, 9])]  # without the probes
    assert len(of_rollouts) == (8 if update == "abort" else 4)
    assert all(seed is None for _, _, seed in of_rollouts)
    for response in responses:
        versions, prompt = response["version"].tolist(), response.prompt.tolist()
        first, whole = versions.count(0), prompt[-1] + np.arange(TOKENS)
        assert versions == [0] * first + [1] * (TOKENS - first)
        assert 0 < first < TOKENS
        if update == "abort":
            whole[first:] -= 1
            assert (prompt + response.response[:first].tolist(), TOKENS - first, None) in of_rollouts
        np.testing.assert_array_equal(response.response, whole)
        np.testing.assert_array_equal(response["top_ids"], np.stack([whole, (whole + 7) % 64], 1))
        assert response.truncated


@pytest.mark.parametrize("update", ["keep", "abort"])
def test_more_may_be_asked_for_while_new_weights_come(fake, elsewhere, monkeypatch, update):
    """A further round of ``rollout.refill`` begins just before the server is paused for the new version."""
    with published(fake.url, update=update, max_staleness=1) as engine:
        fake.token_s, begin, rounds = 0.02, engine.fleet.begin_version, []

        def begin_with_a_round():
            begin()
            rounds.append(elsewhere.submit(sampled, engine))
            until(lambda: fake.running == 4 or rounds[0].done())

        monkeypatch.setattr(engine.fleet, "begin_version", begin_with_a_round)
        metrics = engine.publish(PARAMS, 1)
        assert len(rounds[0].result(timeout=30)) == 4
        assert metrics["rollout/server_losses"] == 0


def test_a_response_that_ends_before_the_proof_waits_for_it(fake, elsewhere):
    with published(fake.url, update="keep", max_staleness=1) as engine:
        fake.token_s = 0.02
        samples = engine.generate(PROMPTS, 2, SamplingParams(60), seed=0)
        sampling = elsewhere.submit(list, samples)
        until(lambda: fake.running == 4)
        fake.after_load_s = 2.0  # the server answers no probe before this
        engine.publish(PARAMS | {"a": PARAMS["a"] + 1}, 1)
        responses = sampling.result(timeout=30)
        metrics = engine.fleet.report() | samples.metrics
    assert all(set(response["version"]) == {0, 1} for response in responses)
    assert (metrics["rollout/requests"], metrics["rollout/retries"], metrics["rollout/server_losses"]) == (4, 0, 0)


@pytest.mark.parametrize("update", ["keep", pytest.param("abort", marks=pytest.mark.harness)])
def test_responses_of_an_unproven_server_are_sampled_again(fake, elsewhere, update, another):
    other = another()
    with published(fake.url, other.url, update=update, max_staleness=1) as engine:
        fake.token_s = other.token_s = 0.02
        fake.not_loaded = {"b"}
        fake.logprob = -1.001  # a value inside the band
        sampling = elsewhere.submit(sampled, engine)
        until(lambda: fake.running + other.running == 4)
        engine.publish(PARAMS, 1)
        responses = sampling.result(timeout=30)
        assert engine.fleet.opened() == [other.url]
    assert len(responses) == 4
    for response in responses:
        of_unproven = response["rollout_logprobs"] == np.float32(-1.001)
        assert not (of_unproven & (response["version"] == 1)).any()


@pytest.mark.parametrize("fault", [{"after_load_s": 5.0}, {"refuse": {"/update_weights": 500}}, {}])
def test_responses_of_a_server_without_weights_are_given_up(fake, elsewhere, another, monkeypatch, fault):
    """Its proof comes after the publish, or never, or its pull was late and fails. The other server samples all."""
    monkeypatch.setattr("rljax.rollout.servers.engine.STRAGGLER_S", 0.5)
    other = another()
    answer = other.answer

    def refuse_late(method, path, body):
        time.sleep(2.0 if path == "/update_weights" else 0.0)
        return (500, {}) if path == "/update_weights" else answer(method, path, body)

    with published(fake.url, other.url, update="keep", max_staleness=1) as engine:
        fake.token_s = other.token_s = 0.02
        sampling = elsewhere.submit(sampled, engine)
        until(lambda: fake.running == other.running == 2)
        if not fault:
            engine.fleet.on_loop(engine.fleet.server(other.url).close, "its pull was late")
        vars(other).update(fault or {"answer": refuse_late})
        metrics = engine.publish(PARAMS, 1)
        assert other.paused or fault
        assert len(sampling.result(timeout=15)) == 4
        assert (metrics["rollout/server_losses"], engine.fleet.opened()) == (1, [fake.url])


def test_where_no_server_passes_nothing_is_handed_on(fake, elsewhere):
    with published(fake.url, update="keep", max_staleness=1) as engine:
        fake.token_s, fake.not_loaded = 0.01, {"b"}
        given = []
        sampling = elsewhere.submit(lambda: given.extend(engine.generate(PROMPTS, 2, SamplingParams(TOKENS), seed=0)))
        until(lambda: fake.running == 4)
        with pytest.raises(VerificationError, match=r"1 tensor differs: b \(not loaded"):
            engine.publish(PARAMS, 1)
        assert sampling.exception(timeout=30) is not None
        assert given == []


@pytest.mark.parametrize("update", ["wait", "abort"])
def test_replies_that_do_not_name_their_weights_are_refused(fake, update):
    with published(fake.url, update=update, max_staleness=1) as engine:
        fake.names_versions = False
        with pytest.raises(ServerError, match="does not name the weights that sampled a response"):
            sampled(engine)
        if update == "abort":  # a response is given up without new weights
            fake.names_versions, fake.finish = True, "abort"
            with pytest.raises(ServerError, match=r"failed 6 times; the last: .* ended a response with 'abort'"):
                sampled(engine)


def test_a_server_that_comes_back_waits_for_the_next_publish(fake, elsewhere, another):
    other = another()
    with published(fake.url, other.url) as engine:
        port = other.port
        other.stop()
        other = another(port)
        # Nothing may be verified here, because the trainer may have taken over the weights.
        responses = elsewhere.submit(sampled, engine).result(timeout=30)
        assert len(responses) == 4
        assert engine.fleet.opened() == [fake.url]
        engine.publish(PARAMS, 1)
        assert sorted(engine.fleet.opened()) == sorted([fake.url, other.url])
        for response in elsewhere.submit(sampled, engine).result(timeout=30):
            assert response["version"].tolist() == [1] * TOKENS


def test_a_late_server_does_not_hide_that_all_are_lost(fake, elsewhere, another, monkeypatch):
    monkeypatch.setattr("rljax.rollout.servers.engine.STRAGGLER_S", 0.5)
    late = another()
    with published(fake.url, late.url) as engine:
        late.after_load_s = 2.0
        engine.publish(PARAMS, 1)
        port = fake.port
        fake.stop()
        another(port)  # it has no weights
        with pytest.raises(ServersLostError, match="no vLLM server is left to sample"):
            elsewhere.submit(sampled, engine).result(timeout=15)
        # The thread that published judges the proof that came too late, and has the weights at hand for the other one.
        assert {version for response in sampled(engine) for version in response["version"]} == {1}
        until(lambda: engine.fleet.recover() or len(engine.fleet.opened()) == 2)
        assert engine.fleet.report()["rollout/servers_brought_back"] == 2
