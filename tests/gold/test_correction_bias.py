"""The tables of corrections and remedies in the docs have the right numbers; some are computed independently."""

import json
import re
from pathlib import Path

import correction_bias
import numpy as np
import pytest
from tabular import every_response, free_features, token_logprobs, token_scores

ROOT = Path(__file__).parents[2]
WIDE = correction_bias.WIDE_VOCABULARY


@pytest.fixture(scope="module")
def record():
    return json.loads((ROOT / "benchmarks/correction_bias.json").read_text(encoding="utf-8"))


def own_weights(pair):
    """Returns the weights of some corrections, computed independently of the program except for the pair."""
    lr, mu = pair.trainer - pair.rollout, np.exp(pair.rollout.sum(axis=1))
    rho, k3, tis = np.exp(lr.sum(axis=1)), np.mean(np.exp(lr) - 1 - lr, axis=1), np.minimum(np.exp(lr), 2)
    return {
        "none (equation 3)": np.ones((27, 3)),
        "token TIS, C = 2": tis,
        "token TIS, C = 2, normalised": tis / (mu @ tis.mean(axis=1)),
        "sequence, unclipped (equation 4)": np.repeat(rho[:, None], 3, axis=1),
        "sequence TIS, C = 2 (equation 5)": np.repeat(np.minimum(rho, 2)[:, None], 3, axis=1),
        "sequence MIS, C = 2 (equation 6)": np.repeat((rho * (rho <= 2))[:, None], 3, axis=1),
        "geometric, unclipped": np.repeat(rho[:, None] ** (1 / 3), 3, axis=1),
        "token TIS, C = 2, rejection by k3 <= 0.001": tis * (k3 <= 0.001)[:, None] / max(mu @ (k3 <= 0.001), 1e-300),
    }


def own_judgement(weights, pair):
    """Returns the bias, cosine and variance of the estimates with these weights, computed independently as well."""
    pi, mu = np.exp(pair.trainer.sum(axis=1)), np.exp(pair.rollout.sum(axis=1))
    values = np.einsum("n,nt,ntp->np", pair.advantages, weights, pair.scores)
    true = np.einsum("n,n,ntp->p", pi, pair.advantages, pair.scores)
    mean, scale = mu @ values, np.linalg.norm(true)
    return {
        "bias": np.linalg.norm(mean - true) / scale,
        "cosine": mean @ true / (np.linalg.norm(mean) * scale) if np.any(mean) else 0.0,
        "variance": (mu @ np.sum(values**2, axis=1) - mean @ mean) / scale**2,
    }


@pytest.mark.parametrize("size", [0.03, 1.0])
def test_corrections_are_judged_as_here(size):
    pair = correction_bias.make_pair(5, size)
    for name, weights in own_weights(pair).items():
        found = correction_bias.CORRECTIONS[name](pair)
        np.testing.assert_allclose(found, weights, rtol=1e-11, err_msg=name)
        judged = correction_bias.judge(pair.gradient, pair.estimates(found), pair.drawn)
        assert judged == pytest.approx(own_judgement(weights, pair), rel=1e-9, abs=1e-12), name


def test_the_scores_are_gradients_of_the_log_probabilities():
    pair, (tokens, _) = correction_bias.make_pair(5, 1.0), every_response(3, 3)
    logits = np.random.default_rng(5).standard_normal((13, 3))
    tables = [logits[:1], logits[1:4], logits[4:]]
    np.testing.assert_allclose(token_logprobs(tables, tokens), pair.trainer, rtol=1e-12)
    np.testing.assert_allclose(token_scores(tables, free_features(3, 3), tokens), pair.scores, rtol=1e-12, atol=1e-15)


def test_the_benchmark_of_corrections_is_found_again(record):
    again = correction_bias.study_corrections(record["seeds"])
    assert list(again["corrections"]) == list(record["corrections"])
    for group in ("mismatch", "corrections"):
        for name, row in again[group].items():
            for size, numbers in row.items():
                assert numbers == pytest.approx(record[group][name][size], rel=1e-6, abs=1e-9), (name, size)


def test_the_page_shows_the_corrections(record):
    page = (ROOT / "docs/theory.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+?) \| (\d.*) \|$", page, re.MULTILINE))
    for name, row in record["corrections"].items():
        cells = [tuple(map(float, cell.split("/"))) for cell in rows[name].split("|")]
        assert len(cells) == len(correction_bias.SIZES)
        for (bias, cosine, variance), size in zip(cells, correction_bias.SIZES, strict=True):
            numbers = row[f"{size:g}"]
            assert bias == pytest.approx(numbers["bias"], rel=0.051, abs=1e-11)
            assert cosine == pytest.approx(numbers["cosine"], abs=5.1e-4)
            assert variance == pytest.approx(numbers["variance"], abs=0.051)
    for name in record["mismatch"]["1"]:
        found = [float(cell) for cell in rows[f"`{name}`"].split("|")]
        expected = [record["mismatch"][f"{size:g}"][name] for size in correction_bias.SIZES]
        assert found == pytest.approx(expected, rel=5.1e-3, abs=1e-12)
    assert f"{record['seeds']} pairs" in page


def recomputed(name, pair):
    """Returns the mean gradient under the sampler, computed independently of the program except for the pair."""
    p, q = np.exp(pair.trainer_tables), np.exp(pair.rollout_tables)
    f = np.minimum(p / q, 2) if "token_tis" in name else np.ones_like(p)
    if "two_sided_tv" in name:
        f = p / q * (np.abs(p - q) <= 0.1)
    weights = np.where(np.isclose(p, np.exp(pair.trainer)[..., None], rtol=1e-12), f, 0).max(axis=-1)
    gradient = np.einsum("n,nt,n,ntp->p", pair.drawn, weights, pair.advantages, pair.scores)
    if "score_centering" not in name:
        return gradient
    expected = q * f
    if "k = 2" in name:
        tail = np.argsort(np.argsort(-q, axis=-1), axis=-1) >= 2
        rho = (q * tail).sum(-1) / (p * tail).sum(-1)
        tail_weight = np.minimum(1 / rho, 2) if "tis" in name else 1.0
        expected = np.where(tail, (rho * tail_weight)[..., None] * p, expected)
    return gradient - np.einsum("n,n,ntv,ntvp->p", pair.drawn, pair.advantages, expected, pair.table_scores)


@pytest.mark.parametrize("sampler", correction_bias.SAMPLERS)
def test_remedies_are_judged_as_here(sampler):
    size, factor = correction_bias.SAMPLERS[sampler]
    pair = correction_bias.make_pair(5, size, WIDE, factor)
    judged = correction_bias.judge_remedies(pair)
    assert list(judged) == [*correction_bias.REMEDIES, *correction_bias.MASKS]
    constant = np.full(len(pair.drawn), np.sqrt(pair.drawn @ pair.advantages**2))
    norm = np.linalg.norm(pair.gradient)
    for name in [*list(judged)[:5], "`two_sided_tv` at 0.1"]:
        bias = np.linalg.norm(recomputed(name, pair) - pair.gradient) / norm
        drift = np.linalg.norm(recomputed(name, pair._replace(advantages=constant))) / norm
        assert judged[name]["bias"] == pytest.approx(bias, rel=1e-9, abs=1e-12)
        assert judged[name]["drift"] == pytest.approx(drift, rel=1e-9, abs=1e-12)
    assert judged["`score_centering`, whole vocabulary"]["drift"] < 1e-12 < judged["no correction"]["drift"]


def test_the_page_shows_the_remedies(record):
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    for name, row in record["remedies"].items():
        cells = rf"^\| {re.escape(name)} \| [^|]+ \| [^|]+ \| [^|]* \| ([^|]+) \| ([^|]+) \|$"
        found = re.findall(cells, page, re.MULTILINE)
        assert found == [tuple(correction_bias.drift_cell(row[sampler]) for sampler in correction_bias.SAMPLERS)], name
    assert f"median of {record['seeds']} pairs" in page


def test_some_of_the_remedies_are_found_again(record):
    size, factor = correction_bias.SAMPLERS["small"]
    pairs = (correction_bias.make_pair(seed, size, WIDE, factor) for seed in range(record["seeds"]))
    rows = [correction_bias.judge_remedies(pair) for pair in pairs]
    for name, wanted in record["remedies"].items():
        found = correction_bias.medians([row[name] for row in rows])
        assert found == pytest.approx(wanted["small"], rel=1e-6, abs=1e-9), name
