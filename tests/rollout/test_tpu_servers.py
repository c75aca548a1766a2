"""Servers on a TPU can do less than vLLM elsewhere. Here a stand-in server describes itself as one."""

import pytest
from served_engines import PARAMS, PROMPTS, make, published
from vllm_fake import FakeVllm

from rljax.errors import HandshakeError
from rljax.rollout.servers.vllm.client import GENERATE
from rljax.rollout.servers.vllm.server import ROLLOUTS
from rljax.rollout.types import SamplingParams


@pytest.fixture
def tpu(fake) -> FakeVllm:
    fake.described = {"platform": "tpu"}
    return fake


@pytest.mark.parametrize("route", [ROLLOUTS, GENERATE])
def test_no_seed_is_sent_and_one_likeliest_token_is_asked_for(tpu, another, route, tmp_path, caplog):
    """Both would end in an error there. A server on another platform in the same run gets its seeds."""
    other = another()
    tpu.routes = other.routes = {route, GENERATE, "/weight_info"}
    taken = {"max_staleness": 2, "top_k": 4, "top_p": 0.9}  # settings that a TPU can have
    with published(tpu.url, other.url, tmp_path=tmp_path, **taken) as engine:
        assert len(list(engine.generate(PROMPTS * 4, 2, SamplingParams(4), seed=3))) == 16
    assert {(each["seed"], each["logprobs"] > 0) for each in tpu.sampling} == {(None, True)}
    assert {each["seed"] is None for each in other.sampling if each["max_tokens"] == 4} == {False}
    assert {each["logprobs"] for each in other.sampling if each["max_tokens"] == 4} == {0}
    assert [f"{tpu.url} takes no seeds on a TPU" in each.message for each in caplog.records].count(True) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"update": "keep", "max_staleness": 1}, "rollout.update does not work with vllm on a TPU: leave it out"),
        ({"top_k": 8, "min_p": 0.1}, "rollout.min_p does not work"),
        ({"colocated": True}, "rollout.colocated does not work"),
        ({"router_replay": "r3"}, "rollout.router_replay = r3 does not work"),
        ({"head_dtype": "float32", "dtype": "bfloat16"}, "no other head; set precision.lm_head_dtype = compute"),
    ],
)
def test_a_setting_that_a_tpu_cannot_have_ends_the_handshake(tpu, settings, said):
    tpu.dtype = settings.get("dtype", "float32")
    with pytest.raises(HandshakeError) as error:
        make(tpu.url, **settings)
    (line,) = (each for each in str(error.value).splitlines() if "TPU" in each)
    assert f"{tpu.url}: " in line
    assert said in line
    assert tpu.sampling == []


def test_a_server_with_mixed_weights_is_not_resumed(tpu):
    """A new trainer would let it sample. The trainer whose update broke off publishes again instead."""
    tpu.described |= {"is_broken": True}
    tpu.paused = True
    with pytest.raises(HandshakeError, match="its last update broke off and left mixed weights; restart it"):
        make(tpu.url)
    assert tpu.paused
    assert tpu.sampling == []


def test_the_trainer_whose_update_broke_off_publishes_again(tpu, another, tmp_path, caplog):
    """An update that one server refuses does not end the run, on any platform."""
    sound = another()
    with published(tpu.url, sound.url, tmp_path=tmp_path) as engine:
        tpu.refuse["/update_weights"] = 500
        engine.publish(PARAMS, 1)
        assert engine.fleet.opened() == [sound.url]
        assert f"{tpu.url}/update_weights answered 500" in caplog.text
        tpu.refuse.clear()
        tpu.described |= {"is_broken": True}
        engine.publish(PARAMS, 2)
        assert sorted(engine.fleet.opened()) == sorted([tpu.url, sound.url])
