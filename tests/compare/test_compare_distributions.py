"""Whole distributions are compared: numbers by hand, bounds, and scorers that return distributions."""

import numpy as np
import pytest

from rljax.compare.distributions import TokenLogprobs, compare_distributions, divergences
from rljax.policy.config import PolicyConfig
from rljax.policy.hf import load_params, save_params
from rljax.policy.model import init_params
from rljax.policy.score import make_scorer
from rljax.record.token_dumps import make_dump

CONFIG = PolicyConfig(13, 16, 32, 1, 2, 1, 8, tie_word_embeddings=True, initializer_range=0.5)
LN2 = np.log(2.0)


def known(*rows, ids=None):
    return TokenLogprobs(np.log(np.asarray(rows, np.float32)), None if ids is None else np.asarray(ids, np.int32))


P, Q = known([0.5, 0.25, 0.25]), known([0.25, 0.5, 0.25])
COMMON = [0.25 * -LN2 + 0.75 * np.log(1.5), 0.5 * np.log(4 / 3), 0.25, 0.0, 0.75]
# Only token 0 is listed, with 1/2 against 1/4; the rests are 1/2 against 3/4.
LISTED = [0.5 * LN2 + 0.5 * np.log(2 / 3), 0.25 * -LN2 + 0.75 * np.log(1.5), 0.25, 1.0, 0.5]


def test_divergences_are_the_hand_worked_ones():
    """Tokens that one side does not list are one outcome."""
    for p, q, expected in (
        (P, Q, [LN2 / 4, LN2 / 4, 0.25, 0.0, 0.0]),  # a quarter of the mass moves
        (P, P, [0.0, 0.0, 0.0, 1.0, 0.0]),
        (known([0.5], ids=[[0]]), Q, [*LISTED[:3], 0.0, 0.5]),
        (P, known([0.25], ids=[[0]]), LISTED),
        # The common token 7 has 1/4 against 1/2, and the rests have 3/4 and 1/2.
        (known([0.5, 0.25], ids=[[4, 7]]), known([0.5, 0.25], ids=[[7, 9]]), COMMON),
        # q moves 1e-4 from one token of probability 1/2 to the other, so KL is -log(1 - 4e-8) / 2 = 2e-8.
        (known([0.5, 0.5]), TokenLogprobs(np.log(np.asarray([[0.5001, 0.4999]]))), [2e-8, 2e-8, 1e-4, 1.0, 0.0]),
    ):
        (found,) = divergences(p, q)
        tolerance = 1e-2 if expected[0] == 2e-8 else 1e-6
        np.testing.assert_allclose(found, expected, rtol=tolerance)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        save_params(root / str(seed), init_params(CONFIG, seed), CONFIG)
    rng = np.random.default_rng(2)
    rows = [rng.integers(0, 13, n).tolist() for n in (5, 9)]
    masks = [[False, False, True, True, True], [False] * 4 + [True, False, True, True, True]]
    return root, make_dump(["a", "b"], rows, masks, {})


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.harness), 0.5])
def test_two_directories_are_compared_by_every_next_token(world, temperature):
    """The reference is a scorer of given tokens that is asked for each token of the vocabulary."""
    root, dump = world
    specs = ["jax:float32", f"jax:float32@{root / '1'}"]
    (pair,) = compare_distributions(specs, dump, root / "0", temperature=temperature)
    score = make_scorer(CONFIG, "float32", temperature=temperature)
    rows = [[], []]
    for seed in (0, 1):
        params = load_params(root / str(seed), CONFIG)
        for ids, mask in zip(dump.token_ids, dump.response_mask, strict=True):
            for place in np.flatnonzero(mask):
                every = score(params, [np.append(ids[:place], np.int32(token)) for token in range(13)])
                rows[seed].append([logprobs[-1] for logprobs in every])
    q, p = (TokenLogprobs(np.asarray(row, np.float32)) for row in rows)
    expected = divergences(p, q).mean(0)
    names = ("kl", "reverse_kl", "total_variation", "top1_agreement", "rest_mass")
    assert (pair.trainer, pair.rollout, pair.is_complete) == (*specs, True)
    assert pair.metrics["token_count"] == 7
    np.testing.assert_allclose([pair.metrics[name] for name in names], expected, rtol=1e-4, atol=1e-7)
    assert pair.metrics["kl"] > 0.1
    pytest.importorskip("torch")
    (pair,) = compare_distributions(["jax:float32", "hf:float32"], dump, root / "0", temperature=temperature)
    assert (pair.metrics["kl_max"] < 1e-8, pair.metrics["top1_agreement"]) == (True, 1.0)


def test_what_cannot_be_compared_is_refused(world):
    root, dump = world
    for specs, settings, said in (
        (["jax:float32", "jax-decode:float32"], {}, "need two scorers of the kinds jax, hf, vllm, sglang"),
        (["jax:float32", "jax:bfloat16"], {"model": None}, "scorer 'jax:float32' needs a model directory"),
        (["jax:float32", "vllm:http://h:1"], {"temperature": 0.5}, "at temperature 1, got 0.5"),
    ):
        with pytest.raises(ValueError, match=said):
            compare_distributions(specs, dump, **{"model": root / "0"} | settings)
