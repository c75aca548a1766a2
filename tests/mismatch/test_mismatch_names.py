"""Other frameworks' numbers from our statistics are compared with each framework's own formula, written in torch."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from rljax.mismatch import framework_metrics, mismatch_metrics, mismatch_statistics, read_tokens
from rljax.mismatch.names import FRAMEWORKS, NAME_TABLE, PUBLISHED_BARS


def statistics_of(*arrays):
    return mismatch_statistics(read_tokens(*arrays))


@pytest.fixture(scope="module")
def batch():
    """Returns five sequences of unequal length, with log-ratios near 0.05 and one far token."""
    rng = np.random.default_rng(7)
    rollout = -rng.exponential(0.7, (5, 40))
    trainer = np.minimum(rollout + 0.05 * rng.standard_normal((5, 40)), -1e-9)
    mask = np.arange(40) < np.array([[40], [3], [17], [1], [25]])
    trainer[0, 5], rollout[0, 5] = -2.5, -0.1
    return trainer, rollout, mask


def by_formula(trainer, rollout, mask):
    """Returns the number of each formula, on whole sequences and without micro-batches."""
    p, q, m = (torch.tensor(array) for array in (trainer, rollout, mask))
    lr, gap = (p - q)[m], (p[m].exp() - q[m].exp()).abs()
    rows = [(p[i][m[i]], q[i][m[i]]) for i in range(len(m))]
    seq_p, seq_q = (torch.stack([row[k].mean() for row in rows]) for k in (0, 1))
    sums = torch.stack([(a - b).sum() for a, b in rows])
    d = seq_q - seq_p
    cap = "no cap or mask"

    def k3(x):
        return x.exp() - x - 1

    return {
        "<-lr>": -lr.mean(),
        "<exp(lr) - lr - 1>": k3(lr).mean(),
        "<exp(-lr) + lr - 1>": k3(-lr).mean(),
        "mean_i exp(-mean_t trainer)": (-seq_p).exp().mean(),
        "mean_i exp(-mean_t rollout)": (-seq_q).exp().mean(),
        "mean_i -mean_t trainer": -seq_p.mean(),
        "mean_i -mean_t rollout": -seq_q.mean(),
        "mean_i mean_t -lr": d.mean(),
        "mean_i abs(mean_t lr)": d.abs().mean(),
        "max_i mean_t -lr": d.max(),
        "min_i mean_t -lr": d.min(),
        "mean_i exp(mean_t -lr)": d.exp().mean(),
        "<exp(2 clip(lr, +-20))> - 1": lr.clamp(-20, 20).exp().square().mean() - 1,
        "mean_i exp(2 clip(sum_t lr, +-20)) - 1": (2 * sums.clamp(-20, 20)).exp().mean() - 1,
        "<abs(exp(trainer) - exp(rollout))>": gap.mean(),
        "max abs(exp(trainer) - exp(rollout))": gap.max(),
        "standard deviation (n - 1) over tokens of abs(exp(trainer) - exp(rollout))": gap.std(),
        "standard deviation (n - 1) over tokens of abs(lr)": lr.abs().std(),
        "correlation of the two probabilities": torch.corrcoef(torch.stack([p[m].exp(), q[m].exp()]))[0, 1],
        "<abs(lr)>": lr.abs().mean(),
        "max abs(lr)": lr.abs().max(),
        "<exp(abs(lr))>": lr.abs().exp().mean(),
        "max exp(min(abs(lr), 20))": lr.abs().clamp(max=20).exp().max(),
        "mean_i mean_t (exp(lr) - lr - 1)": torch.stack([k3(a - b).mean() for a, b in rows]).mean(),
        "mean_i mean_t abs(lr)": torch.stack([(a - b).abs().mean() for a, b in rows]).mean(),
        "<lr> (signed)": lr.mean(),
        f"<lr>, {cap}": lr.mean(),
        f"max lr, {cap}": lr.max(),
        f"min lr, {cap}": lr.min(),
        f"<exp(lr)> of tokens, {cap} (here lr is clipped at +-20)": lr.exp().mean(),
        "share of tokens with abs(lr) > 1e-6": (lr.abs() > 1e-6).double().mean(),
    }


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_numbers_are_the_frameworks_own(batch, framework):
    known = by_formula(*batch)
    wanted = {name: float(known[formula]) for name, formula, _ in NAME_TABLE[framework]}
    assert framework_metrics(statistics_of(*batch), framework) == pytest.approx(wanted, rel=1e-12)
    device = jax.device_get(jax.jit(statistics_of)(*(jnp.asarray(array) for array in batch)))
    assert framework_metrics(device, framework) == pytest.approx(wanted, rel=2e-6)


def test_names_are_single_and_nothing_to_measure_is_finite():
    keys = [(framework, name) for framework in FRAMEWORKS for name, _, _ in NAME_TABLE[framework]]
    assert (len(FRAMEWORKS), len(set(keys))) == (9, len(keys))
    assert set(PUBLISHED_BARS) <= set(keys)
    nothing = statistics_of(*(np.zeros((2, 3)),) * 3)
    for framework in FRAMEWORKS:
        assert all(np.isfinite(value) for value in framework_metrics(nothing, framework).values())
    with pytest.raises(ValueError, match=r"framework must be one of .* got 'openrlhf'"):
        framework_metrics(nothing, "openrlhf")


def test_the_documentation_lists_every_name():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "mismatch.md").read_text()
    for framework in FRAMEWORKS:
        for name, formula, value in NAME_TABLE[framework]:
            ours = f"`{value}`" if isinstance(value, str) else ""
            assert f"| {framework} | `{name}` | `{formula}` | {ours} |" in text
    for name in mismatch_metrics(*(np.ones((1, 1)),) * 3, entropy=np.ones((1, 1))):
        assert f"`{name}`" in text or f"`{name[name.rindex('_') :]}`" in text, name
