"""Each way to compare unlike things is recognised, on columns from a small model and on log-ratios written down."""

import dataclasses

import jax
import numpy as np
import pytest

from rljax.compare.patterns import find_cut
from rljax.compare.scorers import score_column, split_spec
from rljax.compare.verdict import judge as judge_pair
from rljax.diagnose.causes import OF_VERDICTS
from rljax.policy.config import PolicyConfig
from rljax.policy.hf import save_params
from rljax.policy.model import init_params
from rljax.policy.score import make_scorer
from rljax.record.dump_facts import TokenPair
from rljax.record.token_dumps import ColumnSource, make_dump
from rljax.weights.format import weights_hash

CONFIG = PolicyConfig(48, 32, 64, 2, 4, 2, 8, tie_word_embeddings=True, initializer_range=0.3)
PROMPT, RESPONSE, ROWS = 4, 28, 12
MASK = np.arange(PROMPT + RESPONSE)[None] >= np.full((ROWS, 1), PROMPT)
COLUMNS = {}
UNKNOWN = ColumnSource()


def likely_tokens(params):
    """Returns random rows whose tokens the policy finds likelier than most, with a range of probabilities."""
    rng = np.random.default_rng(0)
    score = make_scorer(CONFIG, "float32", multiple=PROMPT + RESPONSE)
    rows, *others = rng.integers(0, CONFIG.vocab_size, (4, ROWS, PROMPT + RESPONSE)).astype(np.int32)
    for other in others:
        better = np.stack(score(params, list(other))) > np.stack(score(params, list(rows)))
        rows = np.where(better, other, rows)
    return rows


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    params = init_params(CONFIG, 0)
    rng = np.random.default_rng(1)
    stale = jax.tree.map(lambda leaf: leaf + 0.02 * rng.standard_normal(leaf.shape).astype(np.float32), params)
    save_params(root / "now", params, CONFIG)
    save_params(root / "stale", stale, CONFIG)
    return root, make_dump([str(i) for i in range(ROWS)], likely_tokens(params), MASK, {})


def column(world, spec, model="now", temperature=1.0):
    """Returns the numbers [b, t] of a column and its source; each is computed once."""
    root, dump = world
    key = (root, spec, model, temperature)
    if key not in COLUMNS:
        vectors, source = score_column(spec, dump, root / model, temperature=temperature, batch_size=ROWS)
        COLUMNS[key] = np.stack(vectors), source
    return COLUMNS[key]


def unknown(source, **known):
    return dataclasses.replace(ColumnSource(source.engine, source.dtype), **known)


def judge(x, y, mask=None, a=UNKNOWN, b=UNKNOWN, ids=None, **options):
    """Returns the verdict on columns [b, t] from the sources ``a`` and ``b``."""
    mask = np.ones(x.shape, bool) if mask is None else mask
    names, ids = [str(i) for i in range(len(x))], np.full(x.shape, 5) if ids is None else ids
    dump = make_dump(names, ids, mask, {"trainer": x, "rollout": y}, {"trainer": a, "rollout": b})
    return judge_pair(TokenPair(dump, "trainer", "rollout"), **options)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.harness), "bfloat16"])
def test_two_engines_with_one_dtype_and_equal_weights_pass(world, dtype):
    (x, a), (y, b) = column(world, f"jax:{dtype}"), column(world, f"hf:{dtype}")
    verdict = judge(x, y, MASK, a, b)
    assert (verdict.status, verdict.cause) == ("pass", "none"), verdict.reason
    assert a.weights_hash == b.weights_hash
    assert all(value <= bar for value, bar in verdict.bars.values())
    assert np.isnan(x[:, 0]).all()
    assert np.isnan(y[:, 0]).all()


@pytest.mark.parametrize(("dtype", "shift"), [("float32", 1), ("bfloat16", -1)])
def test_off_by_one_is_refused_and_its_direction_told(world, dtype, shift):
    (x, a), (y, b) = column(world, "jax:float32"), column(world, f"hf:{dtype}")
    moved = np.full_like(y, np.nan)
    moved[:, max(shift, 0) : y.shape[1] + min(shift, 0)] = y[:, max(-shift, 0) : y.shape[1] - max(shift, 0)]
    verdict = judge(x, moved, MASK, a, b)
    assert (verdict.status, verdict.cause) == ("refused", "off_by_one")
    assert f"moved by {shift:+d} position" in verdict.reason


@pytest.mark.parametrize(("dtype", "rows"), [("float32", ROWS), ("bfloat16", 3)])
def test_permuted_rows_are_refused_and_counted(world, dtype, rows):
    (x, a), (y, b) = column(world, "jax:float32"), column(world, f"hf:{dtype}")
    verdict = judge(x, np.concatenate([np.roll(y[:rows], 1, axis=0), y[rows:]]), MASK, a, b)
    assert (verdict.status, verdict.cause) == ("refused", "other_rows")
    assert verdict.reason.startswith(f"{rows} of {ROWS} rows carry the gap")


def test_other_weights_are_no_permutation_and_no_shift(world):
    (x, a), (y, b) = column(world, "jax:float32"), column(world, "hf:float32", model="stale")
    assert judge(x, y, MASK, unknown(a), unknown(b)).cause == "other_weights"
    ragged = MASK & (np.arange(PROMPT + RESPONSE) < PROMPT + 8 + np.arange(ROWS)[:, None])
    assert judge(x, np.roll(y, 1, axis=0), ragged, unknown(a), unknown(b)).cause == "other_weights"
    x, y = np.full((12, 3), -1.0), np.full((12, 3), -1.0)
    x[:, 0] = -10.0  # a wrong first token before equal ones is no shift, which would drop it
    assert judge(x, y).cause == "other_weights"  # of 36 tokens 12 are too many to be called the exception


def test_logarithms_to_another_base_are_refused(world):
    (x, a), (y, b) = column(world, "jax:bfloat16"), column(world, "hf:bfloat16")
    for verdict in (judge(x, y / np.log(2), MASK, a, b), judge(y / np.log(2), x, MASK, b, a)):
        assert (verdict.status, verdict.cause) == ("refused", "other_base")
        assert "logarithms to base 2: multiply it by ln 2 (0.6931)" in verdict.reason
    assert judge(x, y, MASK, a, b).cause == "none"


@pytest.mark.parametrize("temperature", [0.7, 1.4])
def test_temperature_processed_numbers_are_refused(world, temperature):
    (x, a), (y, b) = column(world, "jax:bfloat16"), column(world, "hf:bfloat16", temperature=temperature)
    assert judge(x, y, MASK, a, b).cause == "temperature"
    verdict = judge(x, y, MASK, unknown(a), unknown(b))
    assert (verdict.status, verdict.cause) == ("refused", "temperature")
    ratio = min(temperature, 1 / temperature)
    told = float(verdict.reason.split("temperatures were ")[1].split(" ")[0])
    assert told == pytest.approx(ratio, abs=0.08)


def test_other_weights_are_told_by_hash_and_by_numbers(world):
    """``same_weights`` says that two hashes are of one model, and the numbers still tell other weights."""
    (x, a), (y, b) = column(world, "jax:float32"), column(world, "hf:float32", "stale")
    declared = judge(x, y, MASK, a, b)
    assert (declared.status, declared.cause) == ("refused", "other_weights")
    assert "name different weights" in declared.reason
    for seen in (judge(x, y, MASK, unknown(a), unknown(b)), judge(x, y, MASK, a, b, same_weights=True)):
        assert (seen.status, seen.cause) == ("fail", "other_weights")
        for words in ("beyond any dtype", "do not say which", "stale server's", "8-bit cache", "head in another dtype"):
            assert words in seen.reason
    y, b = column(world, "hf:float32")
    converted = dataclasses.replace(b, weights_hash="sha256:0")
    assert judge(x, y, MASK, a, converted).cause == "other_weights"
    assert judge(x, y, MASK, a, converted, same_weights=True).status == "pass"
    named = dataclasses.replace(b, weights_hash="runs/a version 3")  # a name is compared with names alone
    assert judge(x, y, MASK, a, named).status == "pass"
    other = dataclasses.replace(a, weights_hash="runs/a version 4")
    assert judge(x, y, MASK, other, named).cause == "other_weights"


@pytest.mark.parametrize(
    ("really", "declared"), [("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16")]
)
def test_a_wrong_dtype_is_told_and_the_likely_one_named(world, really, declared):
    (x, a), (y, b) = column(world, "jax:float32"), column(world, f"hf:{really}")
    verdict = judge(x, y, MASK, a, dataclasses.replace(b, dtype=declared))
    assert (verdict.status, verdict.cause) == ("fail", "wrong_dtype")
    assert f"not {declared}'s" in verdict.reason
    assert f"looks like {really}" in verdict.reason
    assert "weights" not in verdict.reason
    if really != "float32":
        assert "or weights that differ" in judge(x, y, MASK, unknown(a), unknown(b, dtype=declared)).reason


def test_only_paths_of_one_program_may_agree_to_the_bit():
    x = -np.random.default_rng(0).exponential(1.0, (4, 50))
    names = ("vllm 0.32.0", "vllm 0.32.0 decode", "jax 0.10.2")
    server, drawn, other = (ColumnSource(name, "bfloat16") for name in names)
    assert judge(x, x, None, server, drawn).status == judge(x, x, None, drawn, server).status == "pass"
    assert judge(x, x, None, server, other).cause == "wrong_dtype"


def test_a_gap_above_a_published_bar_fails_with_the_bar():
    rng = np.random.default_rng(2)
    x = -rng.exponential(1.0, (8, 64))
    verdict = judge(x, x + 0.07 * rng.standard_normal(x.shape) - np.where(rng.random(x.shape) < 0.01, 3.0, 0.0))
    assert verdict.status == "fail"
    assert verdict.bars["prime_rl mismatch_kl/mean"][0] > 0.015
    x = np.full((4, 200), -1.0)
    x[:, ::2] = -2.0
    y = x.copy()
    y[0, 0] += 4.0
    verdict = judge(x, y)
    assert (verdict.status, verdict.cause) == ("fail", "above_bar")
    assert "token_mult_prob_error" in verdict.reason


def test_a_hash_is_of_tensors_and_what_has_no_score_is_refused(world, tmp_path):
    root, _ = world
    save_params(tmp_path, init_params(CONFIG, 0), CONFIG, max_shard_bytes=9_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert weights_hash(tmp_path) == weights_hash(root / "now") != weights_hash(root / "stale")
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        weights_hash(tmp_path / "nowhere")
    dump = make_dump(["a"], [[1, 2, 99]], [[False, True, True]], {})
    for spec in ("jax:float32", "hf:float32"):
        with pytest.raises(ValueError, match="token 99, but the model knows 48"):
            score_column(spec, dump, root / "now")
    for spec in ("jax", "jax:int8", "tf:float32", "dump:file"):
        with pytest.raises(ValueError, match=r"unknown scorer .* expected jax:DTYPE"):
            split_spec(spec)


def test_an_engine_that_rounds_to_8_bits_has_a_range_of_its_own():
    """The numbers are so low that 1 - p is 1, and the gap has the same size with either sign."""
    for gap, form, cause in (
        (0.12, "", "other_weights"),
        (0.1, "fp8_e5m2 cache", "above_bar"),
        (1e-4, "fp8_e5m2 cache", "none"),
        (0.6, "fp8_e5m2 cache", "other_weights"),
    ):
        x = -20.0 - np.random.default_rng(0).exponential(1.0, (4, 50))
        y = x + gap * np.where(np.arange(200).reshape(4, 50) % 2, 1.0, -1.0)
        found = judge(x, y, None, ColumnSource("jax", "float32"), ColumnSource("vllm", "float32", form=form))
        assert found.cause == cause, found.reason
        if form and cause == "other_weights":
            assert "is beyond that of fp8_e5m2 cache (0.5)" in found.reason


# ---- patterns of gaps, on columns whose log-ratios are written down ----

COUNT, TOKENS = 20, 40
SCATTERED = (np.arange(TOKENS) + 3 * np.arange(COUNT)[:, None]) % 10 == 0
NOISE = 0.01  # the log-ratio of a sound token, with a sign that alternates; the uncertainty is about 0.6 everywhere


def columns():
    """Returns a trainer's and a sampler's log-probabilities [b, t]: near -1, and NOISE apart."""
    sampler = -1.0 - 0.3 * np.sin(np.arange(COUNT * TOKENS)).reshape(COUNT, TOKENS)
    return sampler + np.where(np.arange(TOKENS) % 2, NOISE, -NOISE), sampler


def test_the_tokens_that_carry_a_gap_are_named():
    for where, by, cause, words in (
        (np.s_[:, 0], -0.7, "first_token", "of k3_kl is at the first token of each response: "),
        (np.s_[:, -1], 0.6, "last_tokens", "of k3_kl is at the last token of each response: "),
        (np.s_[:, -3:], -0.7, "last_tokens", "of k3_kl is at the last 3 tokens of each response: "),
        (np.s_[:2], 0.6, "some_responses", "2 of 20 responses are wrong as a whole"),
        (np.s_[:1, 5:], -0.7, "some_responses", "1 of 20 responses are wrong as a whole"),
        (SCATTERED, -0.7, "other_weights", ""),  # at another place in each response, and in all responses alike
    ):
        trainer, sampler = columns()
        assert judge(trainer, sampler).cause == "none"
        trainer[where] += by
        verdict = judge(trainer, sampler)
        assert (verdict.status, verdict.cause) == ("fail", cause), verdict.reason
        assert words in verdict.reason
        assert OF_VERDICTS.get(cause, cause) == cause


def test_a_side_and_a_token_that_carry_a_gap_are_named():
    trainer, sampler = columns()
    for sides, cause in (((trainer - 15.0, sampler), "trainer_side"), ((trainer, sampler - 15.0), "engine_side")):
        verdict = judge(*sides)
        assert (verdict.status, verdict.cause) == ("fail", cause)
        assert "than random tokens" in verdict.reason
    assert judge(trainer - 9.0, sampler - 9.0).cause == "none"  # a policy of uncertain tokens is no wrong side
    mask = np.ones(trainer.shape, bool)
    mask[::2, 10:15] = mask[1::2, 20:22] = False
    trainer[::2, 15] -= 0.7
    trainer[1::2, 22] -= 0.7
    assert judge(trainer, sampler, mask).cause == "after_environment"
    # Token 9 stands at another place in each response, as the end of a thought does.
    rows, at = np.arange(COUNT), 4 + np.arange(COUNT)
    for shift, words in ((0, "is at the token 9: "), (1, "is at the token after id 9: ")):
        trainer, sampler = columns()
        ids = np.full(trainer.shape, 5)
        ids[rows, at] = 9
        trainer[rows, at + shift] -= 0.7
        verdict = judge(trainer, sampler, ids=ids)
        assert (verdict.cause, words in verdict.reason) == ("one_token", True)


def test_the_mass_that_a_cut_leaves_is_the_mean_ratio():
    """The sampler divides each probability by the mass; the trainer does not."""
    for mass in (0.8, 0.97):
        trainer, sampler = columns()
        verdict = judge(trainer + np.log(mass), sampler)
        assert (verdict.status, verdict.cause) == ("refused", "truncated_sampling")
        assert f"with {mass:.1%} of the mass" in verdict.reason
        assert "the second column is normalised" in verdict.reason
        assert "the first column is normalised" in judge(sampler, trainer + np.log(mass)).reason
    sampler[:, ::2] = 0.0  # the cut left one token at half of the places, which is no fill
    trainer[:, ::2] = np.log(0.8) + 0.02 * np.sin(np.arange(TOKENS / 2))
    trainer[:, 1::2] += np.log(0.9)
    assert judge(trainer, sampler).cause == "truncated_sampling"
    # Another base, a few far tokens and a temperature give log-ratios with one sign, too.
    rng = np.random.default_rng(0)
    noise = 0.01 * rng.standard_normal(2000)
    few = noise - np.where(np.arange(2000) % 100, 0.0, 5.0)
    tail = np.where(np.arange(2000) % 20, -0.1, 1.0) + noise
    hardly = noise - 1e-3  # 4.5 standard errors of 0.01 / sqrt(2000), and 0.12 of the mean gap
    assert not any(any(find_cut(lr)) for lr in (noise, few, tail, hardly))
    some = np.where(np.arange(2000) % 4, 0.0, np.log(0.97))  # top_k cuts a quarter of the tokens: 0.75% of the mass
    assert [[cause for _, cause, _ in find_cut(noise + each)] for each in (-0.05, some)] == [["truncated_sampling"]] * 2
    x = -rng.exponential(1.0, (20, 100))
    assert judge(x, x / np.log(10)).cause == "other_base"
