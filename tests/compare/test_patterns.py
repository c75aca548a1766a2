"""Each pattern of a gap is told from the others, on columns whose log-ratios are written down."""

import numpy as np
import pytest

from rljax.compare.patterns import find_cut
from rljax.compare.verdict import judge
from rljax.diagnose.causes import OF_VERDICTS
from rljax.record.dump_facts import TokenPair, pair_of
from rljax.record.token_dumps import make_dump

ROWS, TOKENS = 20, 40
NOISE = 0.01  # the log-ratio of a sound token, with a sign that alternates; the uncertainty is about 0.6 everywhere


def columns():
    """Returns a trainer's and a sampler's log-probabilities [b, t]: near -1, and NOISE apart."""
    sampler = -1.0 - 0.3 * np.sin(np.arange(ROWS * TOKENS)).reshape(ROWS, TOKENS)
    return sampler + np.where(np.arange(TOKENS) % 2, NOISE, -NOISE), sampler


def found(trainer, sampler, mask=None, ids=None):
    mask = np.ones(trainer.shape, bool) if mask is None else mask
    ids = np.full(trainer.shape, 5) if ids is None else ids
    names = [str(i) for i in range(len(ids))]
    return judge(TokenPair(make_dump(names, ids, mask, {"trainer": trainer, "rollout": sampler}), "trainer", "rollout"))


def test_rounding_has_no_pattern():
    assert found(*columns()).cause == "none"


@pytest.mark.parametrize(
    ("where", "cause", "words"),
    [
        (np.s_[:, 0], "first_token", "of k3_kl is at the first token of each response: "),
        (np.s_[:, -1], "last_tokens", "of k3_kl is at the last token of each response: "),
        (np.s_[:, -3:], "last_tokens", "of k3_kl is at the last 3 tokens of each response: "),
        (np.s_[:2], "some_responses", "2 of 20 responses are wrong as a whole"),
        (np.s_[:1, 5:], "some_responses", "1 of 20 responses are wrong as a whole"),
    ],
)
@pytest.mark.parametrize("by", [-0.7, 0.6])
def test_the_tokens_that_carry_a_gap_are_named(where, cause, words, by):
    trainer, sampler = columns()
    trainer[where] += by
    verdict = found(trainer, sampler)
    assert (verdict.status, verdict.cause) == ("fail", cause), verdict.reason
    assert words in verdict.reason
    assert OF_VERDICTS[cause] == cause


def test_scattered_tokens_carry_no_place():
    """Each tenth token is wrong: at another place in each response, and in all responses alike."""
    trainer, sampler = columns()
    trainer[(np.arange(TOKENS) + 3 * np.arange(ROWS)[:, None]) % 10 == 0] -= 0.7
    assert found(trainer, sampler).cause == "other_weights"


def test_the_token_after_the_environment_is_named():
    trainer, sampler = columns()
    mask = np.ones(trainer.shape, bool)
    mask[::2, 10:15] = mask[1::2, 20:22] = False
    trainer[::2, 15] -= 0.7
    trainer[1::2, 22] -= 0.7
    assert found(trainer, sampler, mask).cause == "after_environment"


@pytest.mark.parametrize(("shift", "words"), [(0, "is at the token 9: "), (1, "is at the token after id 9: ")])
def test_the_token_or_its_successor_is_named(shift, words):
    """Token 9 stands at another place in each response, as the end of a thought does."""
    trainer, sampler = columns()
    ids, rows, at = np.full(trainer.shape, 5), np.arange(ROWS), 4 + np.arange(ROWS)
    ids[rows, at] = 9
    trainer[rows, at + shift] -= 0.7
    verdict = found(trainer, sampler, ids=ids)
    assert (verdict.cause, words in verdict.reason) == ("one_token", True)


@pytest.mark.parametrize("cause", ["trainer_side", "engine_side"])
def test_the_side_that_finds_no_token_likely_is_named(cause):
    trainer, sampler = columns()
    sides = (trainer - 15.0, sampler) if cause == "trainer_side" else (trainer, sampler - 15.0)
    verdict = found(*sides)
    assert (verdict.status, verdict.cause) == ("fail", cause)
    assert "than random tokens" in verdict.reason


def test_a_policy_of_uncertain_tokens_is_no_wrong_side():
    trainer, sampler = columns()
    assert found(trainer - 9.0, sampler - 9.0).cause == "none"


@pytest.mark.parametrize("mass", [0.8, 0.9, 0.97])
def test_the_mass_that_a_cut_leaves_is_the_mean_ratio(mass):
    """The sampler divides each probability by the mass; the trainer does not."""
    trainer, sampler = columns()
    verdict = found(trainer + np.log(mass), sampler)
    assert (verdict.status, verdict.cause) == ("refused", "truncated_sampling")
    assert f"with {mass:.1%} of the mass" in verdict.reason
    assert "the second column is normalised" in verdict.reason
    assert "the first column is normalised" in found(sampler, trainer + np.log(mass)).reason


def test_a_certain_token_may_be_the_only_one_left():
    """Half of the sampler's numbers are 0, because the cut left one token. They are no fill."""
    trainer, sampler = columns()
    sampler[:, ::2] = 0.0
    trainer[:, ::2] = np.log(0.8) + 0.02 * np.sin(np.arange(TOKENS / 2))
    trainer[:, 1::2] += np.log(0.9)
    assert found(trainer, sampler).cause == "truncated_sampling"


def test_other_gaps_are_no_cut():
    """Another base, a few far tokens and a temperature give log-ratios with one sign, too."""
    rng = np.random.default_rng(0)
    noise = 0.01 * rng.standard_normal(2000)
    few = noise - np.where(np.arange(2000) % 100, 0.0, 5.0)
    tail = np.where(np.arange(2000) % 20, -0.1, 1.0) + noise
    hardly = noise - 1e-3  # 4.5 standard errors of 0.01 / sqrt(2000), and 0.12 of the mean gap
    assert not any(any(find_cut(lr)) for lr in (noise, few, tail, hardly))
    some = np.where(np.arange(2000) % 4, 0.0, np.log(0.97))  # top_k cuts a quarter of the tokens: 0.75% of the mass
    assert [[cause for _, cause, _ in find_cut(noise + each)] for each in (-0.05, some)] == [["truncated_sampling"]] * 2
    x = -rng.exponential(1.0, (20, 100))
    assert judge(pair_of(x, x / np.log(10))).cause == "other_base"
