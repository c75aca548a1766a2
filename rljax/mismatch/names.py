"""What other frameworks call the mismatch, how they compute it, and the same number from our statistics.

Each entry gives the number the framework would report if it saw the whole batch at once. Several average over
micro-batches or ranks of unequal size instead; their number then depends on how the batch was cut, ours does not.
In the formulas lr = trainer - rollout on response tokens, <.> is the mean over tokens and mean_i over sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from rljax.mismatch.metrics import finalize_statistics, largest_log_ratio, sequence_means, token_means
from rljax.mismatch.statistics import RATIO_BOUND, MismatchStatistics
from rljax.mismatch.tokens import namespace_of


class Numbers(NamedTuple):
    """What a framework's metric may be computed from."""

    xp: Any  # numpy or jax.numpy
    metrics: dict[str, Any]  # our metrics by name
    token: dict[str, Any]  # token means by name of TOKEN_SUMS
    sequence: dict[str, Any]  # sequence means by name of SEQUENCE_SUMS
    statistics: MismatchStatistics


@dataclass(frozen=True)
class ForeignMetric:
    """One metric of another framework.

    Attributes:
      framework: one of FRAMEWORKS.
      name: the key under which the framework logs it.
      formula: what it computes.
      ours: our metric with exactly this value, or None.
      value: the number from our statistics.
    """

    framework: str
    name: str
    formula: str
    ours: str | None
    value: Callable[[Numbers], Any]


def _same(framework: str, name: str, ours: str, formula: str) -> ForeignMetric:
    return ForeignMetric(framework, name, formula, ours, lambda numbers: numbers.metrics[ours])


def _own(framework: str, name: str, formula: str, value: Callable[[Numbers], Any]) -> ForeignMetric:
    return ForeignMetric(framework, name, formula, None, value)


def _deviation(square: str, mean: str) -> Callable[[Numbers], Any]:
    """Standard deviation over tokens with the n - 1 denominator (0 for a single token)."""

    def value(numbers: Numbers) -> Any:
        n = numbers.statistics.token_count
        variance = numbers.xp.maximum(numbers.token[square] - numbers.token[mean] ** 2, 0)
        return numbers.xp.sqrt(variance * (n / numbers.xp.maximum(n - 1, 1)))

    return value


def _extreme(field: str) -> Callable[[Numbers], Any]:
    """An extreme of the statistics, 0 without tokens."""

    def value(numbers: Numbers) -> Any:
        return numbers.xp.where(numbers.statistics.token_count > 0, getattr(numbers.statistics, field), 0)

    return value


_VERL = (
    ("kl", "<-lr>"),
    ("k3_kl", "<exp(lr) - lr - 1>"),
    ("training_ppl", "mean_i exp(-mean_t trainer)"),
    ("rollout_ppl", "mean_i exp(-mean_t rollout)"),
    ("training_log_ppl", "mean_i -mean_t trainer"),
    ("rollout_log_ppl", "mean_i -mean_t rollout"),
    ("log_ppl_diff", "mean_i mean_t -lr"),
    ("log_ppl_abs_diff", "mean_i abs(mean_t lr)"),
    ("log_ppl_diff_max", "max_i mean_t -lr"),
    ("log_ppl_diff_min", "min_i mean_t -lr"),
    ("ppl_ratio", "mean_i exp(mean_t -lr)"),
    ("chi2_token", "<exp(2 clip(lr, +-20))> - 1"),
    ("chi2_seq", "mean_i exp(2 clip(sum_t lr, +-20)) - 1"),
)

NAME_TABLE: tuple[ForeignMetric, ...] = (
    *(_same("verl", f"rollout_corr/{name}", name, formula) for name, formula in _VERL),
    _same("verl", "training/rollout_probs_diff_mean", "prob_abs_diff_mean", "<abs(exp(trainer) - exp(rollout))>"),
    _same("verl", "training/rollout_probs_diff_max", "prob_abs_diff_max", "max abs(exp(trainer) - exp(rollout))"),
    _own(
        "verl",
        "training/rollout_probs_diff_std",
        "standard deviation (n - 1) over tokens of abs(exp(trainer) - exp(rollout))",
        _deviation("prob_abs_diff_squared", "prob_abs_diff"),
    ),
    _same("verl", "training/rollout_actor_probs_pearson_corr", "pearson_corr", "correlation of the two probabilities"),
    _same("trl", "sampling/sampling_logp_difference/mean", "logprob_abs_diff_mean", "<abs(lr)>"),
    _same("trl", "sampling/sampling_logp_difference/max", "logprob_abs_diff_max", "max abs(lr)"),
    _own(
        "nemo_rl", "token_mult_prob_error", "<exp(abs(lr))>", lambda numbers: 1 + numbers.token["ratio_abs_minus_one"]
    ),
    _same("nemo_rl", "gen_kl_error", "k3_kl", "<exp(lr) - lr - 1>"),
    _own("nemo_rl", "policy_kl_error", "<exp(-lr) + lr - 1>", lambda numbers: numbers.token["reverse_k3"]),
    _own(
        "prime_rl",
        "mismatch_kl/mean",
        "mean_i of the sequence's mean of exp(lr) - lr - 1",
        lambda numbers: numbers.sequence["k3"],
    ),
    _own(
        "slime",
        "train/train_rollout_logprob_abs_diff",
        "mean_i of the sequence's mean of abs(lr)",
        lambda numbers: numbers.sequence["log_ratio_abs"],
    ),
    _same("skyrl", "policy/rollout_train_logprobs_abs_diff_mean", "logprob_abs_diff_mean", "<abs(lr)>"),
    _own(
        "skyrl",
        "policy/rollout_train_logprobs_abs_diff_std",
        "standard deviation (n - 1) over tokens of abs(lr)",
        _deviation("log_ratio_squared", "log_ratio_abs"),
    ),
    _same("skyrl", "policy/rollout_train_logprobs_abs_diff_max", "logprob_abs_diff_max", "max abs(lr)"),
    _own("areal", "behave_approx_kl/avg", "<lr>, no cap on the weights", lambda numbers: numbers.token["log_ratio"]),
    _own("areal", "behave_approx_kl/max", "max lr, no cap on the weights", _extreme("log_ratio_max")),
    _own("areal", "behave_approx_kl/min", "min lr, no cap on the weights", _extreme("log_ratio_min")),
    _own(
        "areal",
        "behave_imp_weight/avg",
        "<exp(lr)>, no cap on the weights (here lr is clipped at +-20)",
        lambda numbers: numbers.xp.where(numbers.statistics.token_count > 0, 1 + numbers.token["ratio_minus_one"], 0),
    ),
    _same("tunix", "sampler_trainer/logp_diff_mean", "logprob_abs_diff_mean", "<abs(lr)>"),
    _same("tunix", "sampler_trainer/logp_diff_max", "logprob_abs_diff_max", "max abs(lr)"),
    _same("tunix", "sampler_trainer/prob_diff_mean", "prob_abs_diff_mean", "<abs(exp(trainer) - exp(rollout))>"),
    _same("tunix", "sampler_trainer/prob_diff_max", "prob_abs_diff_max", "max abs(exp(trainer) - exp(rollout))"),
    _same("tunix", "sampler_trainer/probs_pearson_corr", "pearson_corr", "correlation of the two probabilities"),
    _own(
        "tunix",
        "sampler_trainer/mult_prob_error_max",
        "max exp(min(abs(lr), 20))",
        lambda numbers: numbers.xp.exp(numbers.xp.minimum(largest_log_ratio(numbers.statistics), RATIO_BOUND)),
    ),
    _own("torchtitan", "bit_wise/logprob_diff/mean", "<lr> (signed)", lambda numbers: numbers.token["log_ratio"]),
    _same("torchtitan", "bit_wise/logprob_diff/max", "logprob_abs_diff_max", "max abs(lr)"),
    _own(
        "torchtitan",
        "bit_wise/ratio_tokens_different/mean",
        "share of tokens with abs(lr) > 1e-6",
        lambda numbers: numbers.statistics.different_count / numbers.xp.maximum(numbers.statistics.token_count, 1),
    ),
)
"""Every known metric of every framework."""

PUBLISHED_BARS: dict[tuple[str, str], float] = {
    ("nemo_rl", "token_mult_prob_error"): 1.05,
    ("prime_rl", "mismatch_kl/mean"): 0.015,
    ("slime", "train/train_rollout_logprob_abs_diff"): 0.1,
}
"""Limits the frameworks themselves set, by (framework, name); a number above fails their own check.

NeMo-RL's functional tests and dump trigger; prime-rl's rule for merging (at each of 20 steps); slime's CI gate.
"""

FRAMEWORKS = tuple(dict.fromkeys(metric.framework for metric in NAME_TABLE))
"""The frameworks of the table."""


def framework_metrics(statistics: MismatchStatistics, framework: str) -> dict[str, Any]:
    """The numbers a framework would log for these tokens.

    Args:
      statistics: from ``mismatch_statistics``, merged or not.
      framework: one of FRAMEWORKS.

    Returns:
      The framework's metric name -> Python float (numpy leaves) or jax scalar.

    Raises:
      ValueError: the framework is not in the table.
    """
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework must be one of {FRAMEWORKS}, got {framework!r}")
    xp = namespace_of(statistics.token_count)
    if xp is np:
        statistics = jax.tree.map(np.asarray, statistics)
    numbers = Numbers(
        xp, finalize_statistics(statistics), token_means(statistics), sequence_means(statistics), statistics
    )
    found = {metric.name: metric.value(numbers) for metric in NAME_TABLE if metric.framework == framework}
    return {name: float(value) for name, value in found.items()} if xp is np else found


def our_name(framework: str, name: str) -> str | None:
    """Our metric with exactly the value of a framework's metric, or None when none is the same.

    Raises:
      ValueError: the pair is not in the table.
    """
    for metric in NAME_TABLE:
        if (metric.framework, metric.name) == (framework, name):
            return metric.ours
    known = [metric.name for metric in NAME_TABLE if metric.framework == framework]
    raise ValueError(f"{framework!r} has no metric {name!r} in the table; known: {known or list(FRAMEWORKS)}")
