"""Tests of the facts of a dump by hand: outliers, growth, and the grid of the logits."""

import dataclasses
import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rljax.compare.report import compare_columns
from rljax.diagnose.causes import judge_cause
from rljax.diagnose.evidence import Facts
from rljax.diagnose.token_facts import logit_grid, outliers, read_facts
from rljax.record.token_dumps import ColumnSource, make_dump, read_dump

DUMP = Path(__file__).parents[1] / "data/smollm2_tokens.parquet"
RNG = np.random.default_rng(0)
VOCABULARY = 12


def logprobs_of(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def to_bfloat16(logits):
    return logits.astype(ml_dtypes.bfloat16).astype(float)


def dump(change, dtype="float32"):
    """Returns six responses of 16 tokens to each of 12 prompts. ``change`` makes the rollout's logits.

    Equal tokens before a token give it equal logits.
    """
    known = {}

    def logprobs_after(prefix):
        if prefix not in known:
            logits = RNG.normal(0.0, 2.0, VOCABULARY) + 2.5
            known[prefix] = logprobs_of(logits), logprobs_of(change(logits, len(prefix) - 1))
        return known[prefix]

    ids, tokens, columns = [], [], {"trainer": [], "rollout": []}
    for group, i in itertools.product(range(12), range(6)):
        prefix, values = (100 + group,), [(np.nan, np.nan)]
        for _ in range(16):
            both = logprobs_after(prefix)
            token = int(RNG.choice(VOCABULARY, p=np.exp(both[1])))
            values.append((both[0][token], both[1][token]))
            prefix = (*prefix, token)
        ids.append(f"{group}/{i}")
        tokens.append(list(prefix))
        for name, vector in zip(columns, zip(*values, strict=True), strict=True):
            columns[name].append(vector)
    sources = {name: ColumnSource(dtype=dtype, temperature=1.0) for name in columns}
    return make_dump(ids, tokens, [[False] + [True] * 16] * len(ids), columns, sources)


def noisy(size):
    return lambda logits, at: logits + RNG.normal(0.0, size, logits.shape)


def test_an_outlier_is_measured_by_its_uncertainty():
    lr = np.array([0.01, -0.02, 0.015, 0.01, -0.01, 0.02, 0.01, 0.01, 0.01, 0.9, 3.0])
    uncertainty = np.array([0.1] * 9 + [0.9, 0.1])
    assert outliers(lr, uncertainty).tolist() == [False] * 10 + [True]
    assert outliers(np.zeros(0), np.zeros(0)).tolist() == []


def test_logits_in_bfloat16_lie_on_its_grid():
    found = dump(lambda logits, at: to_bfloat16(logits))
    assert logit_grid(found, "rollout", 1.0) == "bfloat16"
    assert logit_grid(found, "trainer", 1.0) == ""
    facts = read_facts(found)
    assert facts.grids == {"rollout": "bfloat16"}
    assert 1e-4 < facts.effect_without < 0.02
    # A temperature divides the grid.
    found = dump(lambda logits, at: to_bfloat16(logits) / 0.7)
    assert logit_grid(found, "rollout", 0.7) == "bfloat16"
    assert logit_grid(found, "rollout", 1.0) == ""
    logits = np.random.default_rng(0).normal(2.5, 2.0, (17, VOCABULARY))
    likeliest = np.float32(logprobs_of(to_bfloat16(logits) / 0.7))
    tops = {"top_ids": (np.zeros(likeliest.shape, np.int32),) * 72, "top_logprobs": (likeliest,) * 72}
    with_tops = dataclasses.replace(found, columns={**found.columns, **tops})
    assert logit_grid(with_tops, "rollout", 0.7) == "bfloat16"


def test_rounding_is_alike_at_each_uncertainty():
    facts = read_facts(dump(noisy(0.1)))
    values = list(facts.by_uncertainty.values())
    assert max(values) < 2.5 * min(values)
    assert (facts.outliers, facts.roles_known) == (0, True)
    assert facts.metrics["token_count"] == 12 * 6 * 16


def test_the_error_that_a_position_adds_is_seen():
    facts = read_facts(dump(lambda logits, at: logits + 0.03 * (at + 0.2) * RNG.normal(size=logits.shape)))
    values = list(facts.effects.values())
    assert values == sorted(values)
    assert values[-1] > 4 * values[0]


def cause_of(found):
    return judge_cause(Facts(None, read_facts(found), ()))


@pytest.mark.parametrize(
    ("noise", "cause"),
    [
        (lambda: 0.02, "healthy"),
        (lambda: 0.3 if RNG.random() < 0.05 else 0.02, "router_noise"),
        (lambda: 1.0 if RNG.random() < 0.05 else 0.02, "router_noise"),  # a few tokens carry most of k3
        (lambda: 0.3, "eight_bits"),
        (lambda: 2.0, "other_weights"),
    ],
)
def test_the_size_of_most_errors_and_their_tail_name_the_noise(noise, cause):
    """The noise has both signs, and one size at each uncertainty. Of one token in twenty it may be far larger."""
    said, findings = cause_of(dump(lambda logits, at: logits + RNG.normal(0.0, noise(), logits.shape), dtype=""))
    assert (said, [finding.cause for finding in findings]) == (cause, [cause] if findings else [])


@pytest.mark.parametrize(
    ("cut", "wanted"), [(0.985, ("cannot_tell", "truncated_sampling", "possible")), (1.0, ("healthy", "", ""))]
)
def test_a_cut_of_little_mass_is_possible(cut, wanted):
    """An eighth of the tokens lose 1.5%. The mean ratio is 5.7 standard errors below 1, and 0.15 of the mean gap."""
    at = np.arange(1600)
    lr = 0.01 * np.where(at % 2, 1.0, -1.0) + np.where(at % 8 < 1, np.log(cut), 0.0)
    sampler = (-1.0 - 0.3 * np.sin(at)).reshape(40, 40)
    columns = {"trainer": sampler + lr.reshape(40, 40), "rollout": sampler}
    found = make_dump([str(i) for i in range(40)], np.full((40, 40), 5), np.ones((40, 40), bool), columns)
    said, findings = cause_of(found)
    assert (said, *(findings[0][:2] if findings else ("", ""))) == wanted


def test_a_dump_that_compare_refuses_has_no_further_facts():
    """The trainer's numbers are to base 10. Nothing else is said of them, not even as a possibility."""
    found = dump(noisy(0.02))
    base = tuple(values / np.float32(np.log(10)) for values in found.logprobs["trainer"])
    found = found.with_column("trainer", base, ColumnSource())
    assert np.isnan(read_facts(found).effect_without)
    said, findings = cause_of(found)
    assert (said, [finding.cause for finding in findings]) == ("not_comparable", ["not_comparable"])
    one = make_dump(["a"], [[1, 2]], [[False, True]], {"rollout": [[np.nan, -1.0]]})
    with pytest.raises(ValueError, match="needs two columns of log-probabilities, got \\['rollout'\\]"):
        read_facts(one)


@pytest.mark.parametrize("trainer", ["jax:bfloat16", "hf:bfloat16"])
def test_a_real_model_in_bfloat16_is_healthy(trainer):
    """SmolLM2-135M continued toy prompts with its decoder in bfloat16; two forwards scored the tokens.

    The files come from ``rljax compare --toy-prompts 12 --model DIR --sample jax-decode:bfloat16 --responses 2
    --max-response-tokens 96 --scorer jax:bfloat16 --scorer hf:bfloat16 --no-second-run``.
    """
    roles = {trainer: "trainer", "jax-decode:bfloat16": "rollout"}
    found = read_dump(DUMP).with_roles(roles)
    assert cause_of(found) == ("healthy", [])
    assert compare_columns(found, list(roles)).passed
