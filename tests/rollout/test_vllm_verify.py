"""The band: measured at the start, between a floor and a hard ceiling."""

import numpy as np
import pytest

from rljax.errors import VerificationError
from rljax.rollout.servers.verify import Verifier, probe_length
from rljax.rollout.servers.wire import Completion, ServerInfo
from rljax.rollout.types import VerifyConfig


class Server:
    """A client of one server whose log-probabilities are off by ``gap``."""

    def __init__(self, gap: float) -> None:
        self.gap = gap
        self.prompts: list[np.ndarray] = []

    def sample(self, url, requests):
        self.prompts += [request.prompt for request in requests]
        counts = [request.sampling.max_response_tokens for request in requests]
        return [
            Completion(np.zeros(n, np.int32), np.full(n, -2.0 - self.gap, np.float32), "length", None) for n in counts
        ]


def verifier(dtype="float32", mixture=False, **config) -> Verifier:
    def score(params, sequences):
        return [np.full(len(s), -2.0, np.float32) for s in sequences]

    info = ServerInfo("url", vocab_size=50, block_size=128)
    return Verifier(VerifyConfig(**config), score, info, dtype=dtype, mixture=mixture)


def check(made, server):
    return made.judge("url", made.sample(server, "url"), None)


@pytest.mark.parametrize(
    ("dtype", "gap", "band"),
    [
        ("float32", 1e-7, 1e-5),  # the floor
        ("float32", 1e-4, 4e-4),  # four times what was measured
        ("float32", 9e-4, 1e-3),  # the ceiling
        ("float16", 1e-3, 4e-3),
        ("bfloat16", 1e-2, 4e-2),
    ],
)
def test_band(dtype, gap, band):
    made = verifier(dtype)
    check(made, Server(gap))
    assert made.band == pytest.approx(band, rel=1e-2)
    assert check(made, Server(0.9 * band)).mean == pytest.approx(0.9 * band, rel=1e-2)
    with pytest.raises(VerificationError, match=f"the band for {dtype} is"):
        check(made, Server(1.1 * band))


@pytest.mark.parametrize("gap", [1.1e-3, np.nan, np.inf])
def test_calibration_refuses_more_than_the_ceiling(gap):
    made = verifier()
    with pytest.raises(VerificationError, match=r"the ceiling for float32 is 0\.001"):
        check(made, Server(gap))
    assert made.band is None


def test_a_mixture_has_a_wider_band_of_its_own():
    made = verifier("bfloat16", mixture=True, mixture_factor=2.0)
    check(made, Server(0.1))
    assert made.band == pytest.approx(0.16)
    with pytest.raises(VerificationError, match=r"the ceiling for bfloat16 is 0\.16"):
        check(verifier("bfloat16", mixture=True, mixture_factor=2.0), Server(0.17))
    with pytest.raises(VerificationError, match=r"the ceiling for bfloat16 is 0\.08"):
        check(verifier("bfloat16", mixture_factor=2.0), Server(0.1))


def test_of_a_mixture_one_of_two_rounds_must_be_in_the_band():
    made, server = verifier("bfloat16", mixture=True), Server(0.01)
    check(made, server)
    sound, far = (made.sample(Server(gap), "url") for gap in (0.01, 0.1))
    assert len(sound) == len(far) == 2
    assert made.judge("url", [far[0], sound[0]], None).mean == pytest.approx(0.01, rel=1e-3)
    with pytest.raises(VerificationError, match="the band for bfloat16 is"):
        made.judge("url", far, None)
    with pytest.raises(VerificationError, match="the band for bfloat16 is"):
        made.judge("url", [made.sample(Server(np.nan), "url")[0], far[0]], None)


def test_not_a_number_is_out_of_band():
    made = verifier()
    check(made, Server(0.0))
    with pytest.raises(VerificationError):
        check(made, Server(np.nan))


def test_probes_are_longer_than_two_blocks_and_always_the_same():
    assert probe_length(128) > 256
    first, second = Server(0.0), Server(0.0)
    verifier().warm(first, "url")
    verifier().warm(second, "url")
    assert all(len(p) == probe_length(128) and p.max() < 50 for p in first.prompts)
    assert all(np.array_equal(a, b) for a, b in zip(first.prompts, second.prompts, strict=True))


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        VerifyConfig(prompts=0)
