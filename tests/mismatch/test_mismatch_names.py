"""Other frameworks' numbers from our statistics are compared with each framework's own formula, written in torch."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from rljax.mismatch import framework_metrics, mismatch_metrics, mismatch_statistics, read_tokens
from rljax.mismatch.names import FRAMEWORKS, NAME_TABLE, PUBLISHED_BARS, our_name


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


def expected(framework, trainer, rollout, mask):
    """Returns the framework's logged numbers by its formula, on whole sequences and without micro-batches."""
    p, q = (torch.tensor(array) for array in (trainer, rollout))
    m = torch.tensor(mask)
    lr = p - q
    flat, p_flat, q_flat = lr[m], p[m].exp(), q[m].exp()
    per_sequence = [(p[i][m[i]], q[i][m[i]]) for i in range(len(m))]
    seq_p, seq_q = (torch.stack([pair[k].mean() for pair in per_sequence]) for k in (0, 1))
    gap = (p_flat - q_flat).abs()
    sequence_sum = torch.stack([(a - b).sum() for a, b in per_sequence])
    return {
        "verl": {
            "rollout_corr/kl": -flat.mean(),
            "rollout_corr/k3_kl": (flat.exp() - flat - 1).mean(),
            "rollout_corr/training_ppl": (-seq_p).exp().mean(),
            "rollout_corr/rollout_ppl": (-seq_q).exp().mean(),
            "rollout_corr/training_log_ppl": -seq_p.mean(),
            "rollout_corr/rollout_log_ppl": -seq_q.mean(),
            "rollout_corr/log_ppl_diff": (seq_q - seq_p).mean(),
            "rollout_corr/log_ppl_abs_diff": (seq_q - seq_p).abs().mean(),
            "rollout_corr/log_ppl_diff_max": (seq_q - seq_p).max(),
            "rollout_corr/log_ppl_diff_min": (seq_q - seq_p).min(),
            "rollout_corr/ppl_ratio": (seq_q - seq_p).exp().mean(),
            "rollout_corr/chi2_token": flat.clamp(-20, 20).exp().square().mean() - 1,
            "rollout_corr/chi2_seq": (2 * sequence_sum.clamp(-20, 20)).exp().mean() - 1,
            "training/rollout_probs_diff_mean": gap.mean(),
            "training/rollout_probs_diff_max": gap.max(),
            "training/rollout_probs_diff_std": gap.std(),
            "training/rollout_actor_probs_pearson_corr": torch.corrcoef(torch.stack([p_flat, q_flat]))[0, 1],
        },
        "trl": {
            "sampling/sampling_logp_difference/mean": flat.abs().mean(),
            "sampling/sampling_logp_difference/max": flat.abs().max(),
        },
        "nemo_rl": {
            "token_mult_prob_error": flat.abs().exp().mean(),
            "gen_kl_error": (flat.exp() - flat - 1).mean(),
            "policy_kl_error": ((-flat).exp() + flat - 1).mean(),
        },
        "prime_rl": {
            "mismatch_kl/mean": torch.stack([((a - b).exp() - (a - b) - 1).mean() for a, b in per_sequence]).mean()
        },
        "slime": {
            "train/train_rollout_logprob_abs_diff": torch.stack([(a - b).abs().mean() for a, b in per_sequence]).mean()
        },
        "skyrl": {
            "policy/rollout_train_logprobs_abs_diff_mean": flat.abs().mean(),
            "policy/rollout_train_logprobs_abs_diff_std": flat.abs().std(),
            "policy/rollout_train_logprobs_abs_diff_max": flat.abs().max(),
        },
        "areal": {
            "behave_approx_kl/avg": flat.mean(),
            "behave_approx_kl/max": flat.max(),
            "behave_approx_kl/min": flat.min(),
            "behave_imp_weight/avg": flat.exp().mean(),
        },
        "tunix": {
            "sampler_trainer/logp_diff_mean": flat.abs().mean(),
            "sampler_trainer/logp_diff_max": flat.abs().max(),
            "sampler_trainer/prob_diff_mean": gap.mean(),
            "sampler_trainer/prob_diff_max": gap.max(),
            "sampler_trainer/probs_pearson_corr": torch.corrcoef(torch.stack([p_flat, q_flat]))[0, 1],
            "sampler_trainer/mult_prob_error_max": flat.abs().clamp(max=20).exp().max(),
        },
        "torchtitan": {
            "bit_wise/logprob_diff/mean": flat.mean(),
            "bit_wise/logprob_diff/max": flat.abs().max(),
            "bit_wise/ratio_tokens_different/mean": (flat.abs() > 1e-6).double().mean(),
        },
    }[framework]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_numbers_are_the_frameworks_own(batch, framework):
    wanted = {name: float(value) for name, value in expected(framework, *batch).items()}
    assert framework_metrics(statistics_of(*batch), framework) == pytest.approx(wanted, rel=1e-12)
    device = jax.device_get(jax.jit(statistics_of)(*(jnp.asarray(array) for array in batch)))
    assert framework_metrics(device, framework) == pytest.approx(wanted, rel=2e-6)


def test_the_nine_frameworks_of_the_comparison_are_there():
    assert FRAMEWORKS == ("verl", "trl", "nemo_rl", "prime_rl", "slime", "skyrl", "areal", "tunix", "torchtitan")
    keys = [(metric.framework, metric.name) for metric in NAME_TABLE]
    assert len(set(keys)) == len(keys)
    assert all(metric.formula for metric in NAME_TABLE)


def test_the_bars_are_of_metrics_in_the_table():
    assert set(PUBLISHED_BARS) <= {(metric.framework, metric.name) for metric in NAME_TABLE}


def test_our_names():
    assert our_name("nemo_rl", "gen_kl_error") == "k3_kl"
    assert our_name("prime_rl", "mismatch_kl/mean") is None
    with pytest.raises(ValueError, match=r"'trl' has no metric 'kl' in the table; known: \['sampling/"):
        our_name("trl", "kl")
    with pytest.raises(ValueError, match=r"framework must be one of .* got 'openrlhf'"):
        framework_metrics(statistics_of(*(np.ones((1, 1)),) * 3), "openrlhf")


def test_nothing_to_measure_gives_finite_numbers():
    statistics = statistics_of(*(np.zeros((2, 3)),) * 3)
    for framework in FRAMEWORKS:
        assert all(np.isfinite(value) for value in framework_metrics(statistics, framework).values())


def test_the_documentation_lists_every_name():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "mismatch.md").read_text()
    for metric in NAME_TABLE:
        ours = f"`{metric.ours}`" if metric.ours else ""
        assert f"| {metric.framework} | `{metric.name}` | `{metric.formula}` | {ours} |" in text
    for name in mismatch_metrics(*(np.ones((1, 1)),) * 3, entropy=np.ones((1, 1))):
        assert f"`{name}`" in text or f"`{name[name.rindex('_') :]}`" in text, name
