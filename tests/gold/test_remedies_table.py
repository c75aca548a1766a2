"""The table of the remedies in docs/algorithms.md must have the right numbers; some are computed independently."""

import json
import re
from pathlib import Path

import correction_bias
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def record():
    return json.loads((ROOT / "benchmarks/correction_bias.json").read_text(encoding="utf-8"))


def recomputed(name, pair):
    """Returns the mean gradient under the sampler, computed independently of the program except for the pair."""
    p, q = np.exp(pair.trainer_tables), np.exp(pair.rollout_tables)
    f = {
        "no correction": np.ones_like(p),
        "`score_centering`, whole vocabulary": np.ones_like(p),
        "`score_centering`, k = 2": np.ones_like(p),
        "`token_tis`": np.minimum(p / q, 2),
        "`token_tis` with `score_centering`, k = 2": np.minimum(p / q, 2),
        "`two_sided_tv` at 0.1": p / q * (np.abs(p - q) <= 0.1),
    }[name]
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
def test_the_tool_finds_what_is_found_here(sampler):
    size, factor = correction_bias.SAMPLERS[sampler]
    pair = correction_bias.make_pair(5, size, correction_bias.WIDE_VOCABULARY, factor)
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


def test_the_page_shows_the_benchmark(record):
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    for name, row in record["remedies"].items():
        found = re.findall(
            rf"^\| {re.escape(name)} \| [^|]+ \| [^|]+ \| [^|]* \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE
        )
        assert found == [tuple(correction_bias.drift_cell(row[sampler]) for sampler in correction_bias.SAMPLERS)], name
    assert f"median of {record['seeds']} pairs" in page


def test_some_of_the_benchmark_is_found_again(record):
    size, factor = correction_bias.SAMPLERS["small"]
    seeds = range(record["seeds"])
    rows = [
        correction_bias.judge_remedies(correction_bias.make_pair(seed, size, correction_bias.WIDE_VOCABULARY, factor))
        for seed in seeds
    ]
    for name, wanted in record["remedies"].items():
        found = correction_bias.medians([row[name] for row in rows])
        assert found == pytest.approx(wanted["small"], rel=1e-6, abs=1e-9), name
