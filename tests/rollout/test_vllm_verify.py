"""Tests of the band: it is measured at the start, between a floor and a hard ceiling."""

import asyncio

import numpy as np
import pytest
from records import completion

from rljax.errors import VerificationError
from rljax.rollout.servers.requests import ServerInfo
from rljax.rollout.servers.verify import Verifier, joined_prompts, limits, lower_third, probe_lengths, random_prompts
from rljax.rollout.types import ServerForm, VerifyConfig


class Server:
    """A server whose log-probabilities are off by ``gap``. Generated ones are off by ``stale`` more."""

    def __init__(self, gap: float, stale: float = 0.0) -> None:
        self.gap, self.stale = gap, stale
        self.prompts: list[np.ndarray] = []
        self.url = "url"

    async def sample(self, requests):
        self.prompts += [request.prompt for request in requests]
        return [self.scored(r) if r.prompt_logprobs is not None else self.generated(r) for r in requests]

    def generated(self, request):
        count = request.sampling.max_response_tokens
        logprobs = np.full(count, -2.0 - self.gap - self.stale, np.float32)
        return completion(np.zeros(count), logprobs, prompt=request.prompt)

    def scored(self, request):
        scores = ({}, *({int(token): -2.0 - self.gap} for token in request.prompt[1:]))
        return completion([0], [0.0], prompt=request.prompt, scores=scores)


OF_RUN = random_prompts((50, 20), 50)


def verifier(dtype="float32", mixture=False, form=ServerForm(), prompts=OF_RUN, **config) -> Verifier:  # noqa: B008
    def score(params, sequences):
        return [np.full(len(s), -2.0, np.float32) for s in sequences]

    info = ServerInfo("url", vocab_size=50, block_size=128, dtype=dtype, form=form)
    return Verifier(VerifyConfig(**config), score, info, dtype=dtype, mixture=mixture, prompts=prompts)


def check(made, server):
    def looks(*, whole=True):
        return asyncio.run(made.sample(server, whole=whole))

    return made.judge("url", looks(whole=False), None, looks)


@pytest.mark.parametrize(
    ("dtype", "gap", "band"),
    [
        ("float32", 1e-7, 1e-5),  # the band is the floor
        ("float32", 1e-4, 4e-4),  # the band is four times the measured gap
        ("float32", 9e-4, 1e-3),  # the band is the ceiling
        ("float16", 1e-3, 4e-3),
        ("bfloat16", 1e-2, 4e-2),
    ],
)
def test_band(dtype, gap, band):
    """A server that rounds nothing is not asked twice."""
    made, server = verifier(dtype), Server(gap)
    assert check(made, server).own == 0
    assert (made.band, made.own_band) == (pytest.approx(band, rel=1e-2), None)
    assert len(server.prompts) == 3 * 4
    assert check(made, Server(0.9 * band)).mean == pytest.approx(0.9 * band, rel=1e-2)
    with pytest.raises(VerificationError, match=f"the band for {dtype} is"):
        check(made, Server(1.1 * band))


class Script:
    """A server that is off by another gap at each look. It keeps the prompts of each look."""

    def __init__(self, *gaps: float) -> None:
        self.gaps, self.looks, self.url = list(gaps), [], "url"

    async def sample(self, requests):
        self.looks.append([tuple(r.prompt) for r in requests])
        return await Server(self.gaps.pop(0)).sample(requests)


def test_calibration_refuses_more_than_the_ceiling():
    """It is repeated once. The ceiling of a mixture is three times as high."""
    for gap in (1.1e-3, np.nan, np.inf):
        made = verifier()
        with pytest.raises(VerificationError, match=r"the ceiling for float32 is 0\.001"):
            check(made, Server(gap))
        assert made.band is None
    for mixture, server, band in ((True, Server(0.2), 0.24), (False, Script(0.01, 0.1, 0.01, *[0.015] * 3), 0.06)):
        made = verifier("bfloat16", mixture)
        check(made, server)
        assert made.band == pytest.approx(band, rel=1e-4)
    refused = Script(0.01, 0.1, 0.01, 0.09, 0.01, 0.01)
    for mixture, server, said in ((True, Server(0.25), r"0\.24"), (False, refused, r"0\.08")):
        means = "" if mixture else r"is 0\.1, then 0\.09 nats .* "
        with pytest.raises(VerificationError, match=f"{means}the ceiling for bfloat16 is {said}$"):
            check(verifier("bfloat16", mixture), server)
    assert limits("float16", mixture=True) == (2.5e-3, pytest.approx(0.03))
    assert limits("float16", mixture=True, rounded=True) == (0.1, pytest.approx(1.8))


@pytest.mark.parametrize(("gap", "band"), [(0.01, 0.1), (0.1, 0.4), (0.5, 0.6)])
def test_a_server_that_rounds_has_a_band_of_its_own(gap, band):
    """The band is between 0.1 and 0.6 nats. The refusal names the half that failed and the server's form."""
    made = verifier("float16", form=ServerForm(kv_cache="fp8_e5m2"))
    check(made, Server(gap))
    assert made.band == pytest.approx(band, rel=1e-2)
    said = r"holds the trainer's weights, by their checksums, but .* the server has dtype float16, LM head unknown, "
    said += r"weights none, key-value cache fp8_e5m2; .*factor 4 x the first publish, at least 0\.1, at most 0\.6\)"
    with pytest.raises(VerificationError, match=said):
        check(made, Server(1.1 * band))


@pytest.mark.parametrize(("stale", "band"), [(0.0, 0.001), (0.0001, 0.001), (0.01, 0.04), (0.3, 0.6)])
def test_a_server_that_rounds_is_compared_with_itself(stale, band):
    """The own band is four times the first difference. An old cache is refused inside the band to the trainer."""
    made = verifier("bfloat16", form=ServerForm(kv_cache="fp8_e5m2"))
    check(made, Server(0.1, stale))
    assert made.band == pytest.approx(0.4, rel=1e-3) or stale
    assert made.own_band == pytest.approx(band, rel=1e-3)
    assert check(made, Server(0.39)).own == 0
    assert check(made, Server(0.0, 0.9 * band)).own == pytest.approx(0.9 * band, rel=1e-3)
    said = f"nats, at most {band:.3g} are expected: above that its cache may hold keys"
    for odd in (min(1.1 * band, 0.61), np.nan):
        with pytest.raises(
            VerificationError, match=rf"256 probe tokens .* differ by {odd:.3g}.*, then {odd:.3g}.* {said}"
        ):
            check(made, Server(0.0, odd))


def test_the_distance_that_two_thirds_exceed_is_taken():
    """Five far probes of 16 prove nothing."""
    assert lower_third([0.9, 0.0, 0.3, 0.1, 0.2, 0.5, 0.4]) == 0.2
    assert (lower_third([0.0] * 11 + [9.0] * 5), lower_third([0.0] * 5 + [9.0] * 11), lower_third([])) == (0, 9, 0)
    assert np.isnan(lower_third([0.1, np.inf, 0.2]))


@pytest.mark.parametrize(
    ("mixture", "prompts", "probes", "most"),
    [(False, OF_RUN, 4, 0.08), (True, OF_RUN, 16, 0.24), (False, (), 16, 0.08)],
)
def test_a_look_out_of_band_is_followed_by_another_one(mixture, prompts, probes, most):
    """Two looks out of band are refused with the limits."""
    made, server = verifier("bfloat16", mixture, prompts=prompts), Script(0.01, 0.01, 0.01, 0.3, 0.02, 0.3, np.nan)
    check(made, server)
    assert made.band == pytest.approx(0.04)
    assert check(made, server).mean == pytest.approx(0.02, rel=1e-4)
    first, second = server.looks[-2:]
    assert (len(first), len(second)) == (2 if probes == 4 else probes, probes)
    assert not {*first} & {*second}
    limits = rf"\(rollout.verify.factor 4 x the first publish, at least 0.02, at most {most}\)"
    with pytest.raises(VerificationError, match=rf"{12 * probes} probe tokens is 0\.3, then nan nats.*{limits}$"):
        check(made, server)
    assert server.gaps == []


def test_probes_end_with_prompts_of_the_run():
    """A probe is whole blocks and 16 tokens, and for a server that rounds two blocks and a third of them."""
    probes = joined_prompts([np.array([1, 2, 3]), np.arange(10, 90)], (16, 32))
    assert {probe[-1] for probe in probes} == {3, 89}
    for probe in probes:
        assert len(probe) == 32
        assert probe.tolist() == list(range(58, 90)) or probe[-3:].tolist() == [1, 2, 3]
        assert set(probe.tolist()) <= {1, 2, 3, *range(10, 90)}
    assert [probe_lengths(block)[1] for block in (1, 16, 24, 32, 128)] == [48, 48, 64, 48, 144]
    assert [probe_lengths(block, rounded=True) for block in (1, 16, 128)] == [(2, 32), (32, 37), (256, 298)]


def test_what_is_cached_before_an_update_is_read_after_it():
    made, server = verifier(), Server(0.0)
    asyncio.run(made.warm(server))
    asyncio.run(made.sample(server))
    cached, probes = server.prompts[:8], server.prompts[8:]
    assert {len(prompt) for prompt in cached} == {129}  # a whole block and one token, which is computed at once
    assert {len(prompt) for prompt in probes} == {probe_lengths(128)[1]}
    assert max(prompt.max() for prompt in server.prompts) < 50
    assert {tuple(prompt[:129]) for prompt in probes[:8]} == {tuple(prompt) for prompt in cached}
    assert np.array_equal(probes[8:], probes[:4])  # the third look has the prompts of the first one
    again = Server(0.0)
    asyncio.run(verifier().warm(again))
    assert all(np.array_equal(a, b) for a, b in zip(cached, again.prompts, strict=True))
