"""The names in the logs of other projects: mismatch metrics with their formulas, further signals, lengths and steps.

Each entry of ``NAME_TABLE`` gives the number that the framework would report for the whole batch at once. Several
frameworks average over micro-batches or ranks of unequal size. Their number depends on how the batch was cut; ours does
not. The names need no jax, which is imported for the numbers. In the formulas, lr = trainer - rollout on response
tokens, <.> is the mean over tokens, and mean_i is the mean over sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rljax.mismatch.statistics import Statistics


def _mean(term: str) -> Callable[[Statistics], Any]:
    return lambda statistics: statistics.mean(term)


def _mean_i(term: str) -> Callable[[Statistics], Any]:
    return lambda statistics: statistics.mean(term, "sequence_count")


def _std(square: str, mean: str) -> Callable[[Statistics], Any]:
    """Returns the standard deviation over tokens with denominator n - 1 (0 for a single token)."""

    def value(statistics: Statistics) -> Any:
        xp, n = statistics.xp, statistics["token_count"]
        variance = xp.maximum(statistics.mean(square) - statistics.mean(mean) ** 2, 0)
        return xp.sqrt(variance * (n / xp.maximum(n - 1, 1)))

    return value


def _mean_ratio(statistics: Statistics) -> Any:
    return statistics.xp.where(statistics["token_count"] > 0, 1 + statistics.mean("ratio_minus_one"), 0)


def _largest_ratio(statistics: Statistics) -> Any:
    from rljax.mismatch.accurate import RATIO_BOUND
    from rljax.mismatch.metrics import largest_log_ratio

    return statistics.xp.exp(statistics.xp.minimum(largest_log_ratio(statistics), RATIO_BOUND))


_STD = "standard deviation (n - 1) over tokens of abs({})"
NAME_TABLE: dict[str, tuple[tuple[str, str, str | Callable[[Statistics], Any]], ...]] = {
    "verl": (
        ("rollout_corr/kl", "<-lr>", "kl"),
        ("rollout_corr/k3_kl", "<exp(lr) - lr - 1>", "k3_kl"),
        ("rollout_corr/training_ppl", "mean_i exp(-mean_t trainer)", "training_ppl"),
        ("rollout_corr/rollout_ppl", "mean_i exp(-mean_t rollout)", "rollout_ppl"),
        ("rollout_corr/training_log_ppl", "mean_i -mean_t trainer", "training_log_ppl"),
        ("rollout_corr/rollout_log_ppl", "mean_i -mean_t rollout", "rollout_log_ppl"),
        ("rollout_corr/log_ppl_diff", "mean_i mean_t -lr", "log_ppl_diff"),
        ("rollout_corr/log_ppl_abs_diff", "mean_i abs(mean_t lr)", "log_ppl_abs_diff"),
        ("rollout_corr/log_ppl_diff_max", "max_i mean_t -lr", "log_ppl_diff_max"),
        ("rollout_corr/log_ppl_diff_min", "min_i mean_t -lr", "log_ppl_diff_min"),
        ("rollout_corr/ppl_ratio", "mean_i exp(mean_t -lr)", "ppl_ratio"),
        ("rollout_corr/chi2_token", "<exp(2 clip(lr, +-20))> - 1", "chi2_token"),
        ("rollout_corr/chi2_seq", "mean_i exp(2 clip(sum_t lr, +-20)) - 1", "chi2_seq"),
        ("training/rollout_probs_diff_mean", "<abs(exp(trainer) - exp(rollout))>", "prob_abs_diff_mean"),
        ("training/rollout_probs_diff_max", "max abs(exp(trainer) - exp(rollout))", "prob_abs_diff_max"),
        (
            "training/rollout_probs_diff_std",
            _STD.format("exp(trainer) - exp(rollout)"),
            _std("prob_abs_diff_squared", "prob_abs_diff"),
        ),
        ("training/rollout_actor_probs_pearson_corr", "correlation of the two probabilities", "pearson_corr"),
    ),
    "trl": (
        ("sampling/sampling_logp_difference/mean", "<abs(lr)>", "logprob_abs_diff_mean"),
        ("sampling/sampling_logp_difference/max", "max abs(lr)", "logprob_abs_diff_max"),
    ),
    "nemo_rl": (
        ("token_mult_prob_error", "<exp(abs(lr))>", lambda s: 1 + s.mean("ratio_abs_minus_one")),
        ("gen_kl_error", "<exp(lr) - lr - 1>", "k3_kl"),
        ("policy_kl_error", "<exp(-lr) + lr - 1>", _mean("reverse_k3")),
    ),
    "prime_rl": (("mismatch_kl/mean", "mean_i mean_t (exp(lr) - lr - 1)", _mean_i("sequence_k3")),),
    "slime": (("train/train_rollout_logprob_abs_diff", "mean_i mean_t abs(lr)", _mean_i("sequence_log_ratio_abs")),),
    "skyrl": (
        ("policy/rollout_train_logprobs_abs_diff_mean", "<abs(lr)>", "logprob_abs_diff_mean"),
        ("policy/rollout_train_logprobs_abs_diff_std", _STD.format("lr"), _std("log_ratio_squared", "log_ratio_abs")),
        ("policy/rollout_train_logprobs_abs_diff_max", "max abs(lr)", "logprob_abs_diff_max"),
    ),
    "areal": (
        ("behave_approx_kl/avg", "<lr>, no cap or mask", _mean("log_ratio")),
        ("behave_approx_kl/max", "max lr, no cap or mask", lambda s: s.extreme("log_ratio_max")),
        ("behave_approx_kl/min", "min lr, no cap or mask", lambda s: s.extreme("log_ratio_min")),
        ("behave_imp_weight/avg", "<exp(lr)> of tokens, no cap or mask (here lr is clipped at +-20)", _mean_ratio),
    ),
    "tunix": (
        ("sampler_trainer/logp_diff_mean", "<abs(lr)>", "logprob_abs_diff_mean"),
        ("sampler_trainer/logp_diff_max", "max abs(lr)", "logprob_abs_diff_max"),
        ("sampler_trainer/prob_diff_mean", "<abs(exp(trainer) - exp(rollout))>", "prob_abs_diff_mean"),
        ("sampler_trainer/prob_diff_max", "max abs(exp(trainer) - exp(rollout))", "prob_abs_diff_max"),
        ("sampler_trainer/probs_pearson_corr", "correlation of the two probabilities", "pearson_corr"),
        ("sampler_trainer/mult_prob_error_max", "max exp(min(abs(lr), 20))", _largest_ratio),
    ),
    "torchtitan": (
        ("bit_wise/logprob_diff/mean", "<lr> (signed)", _mean("log_ratio")),
        ("bit_wise/logprob_diff/max", "max abs(lr)", "logprob_abs_diff_max"),
        ("bit_wise/ratio_tokens_different/mean", "share of tokens with abs(lr) > 1e-6", _mean("different_count")),
    ),
}
"""The name and formula of each metric of each framework, and our metric or a function from our statistics."""

PUBLISHED_BARS: dict[tuple[str, str], float] = {
    ("nemo_rl", "token_mult_prob_error"): 1.05,
    ("prime_rl", "mismatch_kl/mean"): 0.015,
    ("slime", "train/train_rollout_logprob_abs_diff"): 0.1,
}
"""The limits that frameworks set for themselves, by (framework, name). A larger number fails the framework's check.

NeMo-RL uses its limit in functional tests and to trigger dumps, prime-rl in its rule for merging (at each of 20 steps),
and slime in its CI.
"""

FRAMEWORKS = tuple(NAME_TABLE)
"""The frameworks in ``NAME_TABLE``."""

_SIGNALS = """
rljax: reward reward/mean; entropy policy/entropy; grad_norm optimizer/grad_norm;
    learning_rate schedule/learning_rate; staleness rollout/staleness; reference_kl policy/reference_kl;
    signal reward/groups_with_signal; error_fraction reward/error_fraction
verl: reward critic/score/mean critic/rewards/mean; entropy actor/entropy actor/entropy_loss;
    grad_norm actor/grad_norm; learning_rate actor/lr; staleness training/off_policy/trajectory_staleness/mean;
    stale_count fully_async/count/stale_trajectory_processed; policy_kl actor/ppo_kl; loss actor/pg_loss;
    reference_kl actor/kl_loss actor/reward_kl_penalty critic/kl; largest_advantage critic/advantages/max;
    kl mismatch/mismatch_kl; k3_kl mismatch/mismatch_k3_kl; log_ppl_abs_diff mismatch/mismatch_log_ppl_abs_diff;
    prob_abs_diff_mean rollout_probs_diff_mean
trl: reward reward; entropy entropy; grad_norm grad_norm; learning_rate learning_rate; reference_kl kl; loss loss;
    zero_std frac_reward_zero_std; reward_std reward_std; ratio_mean importance_sampling_ratio/mean;
    ratio_max importance_sampling_ratio/max; ratio_min importance_sampling_ratio/min;
    logprob_abs_diff_mean sampling_logp_difference/mean
trl_async: reward reward; entropy entropy; grad_norm grad_norm; learning_rate learning_rate; loss loss; k3_kl kl;
    ratio_mean ratio; reward_std reward_std
prime_rl: reward reward/all/mean reward/mean; entropy entropy/all/mean entropy/mean; grad_norm optim/grad_norm;
    learning_rate optim/lr; staleness off_policy/mean off_policy_level/all/mean off_policy_level/mean;
    k3_kl mismatch_kl/mean mismatch_kl/all/mean; loss loss/mean
nemo_rl: reward reward; entropy approx_entropy; grad_norm grad_norm; learning_rate lr; staleness avg_trajectory_age;
    reference_kl kl_penalty; token_mult_prob_error token_mult_prob_error; ratio_mean sampling_importance_ratio;
    filtered is_oob_ratio
slime: reward rollout/raw_reward raw_reward rollout/rewards; entropy train/entropy_loss; grad_norm train/grad_norm;
    learning_rate train/lr-pg_0; reference_kl train/kl_loss; policy_kl train/ppo_kl; loss train/pg_loss;
    logprob_abs_diff_mean train_rollout_logprob_abs_diff; k3_kl train_rollout_kl; ratio_mean train/tis
skyrl: reward reward/avg_raw_reward; entropy policy_entropy; learning_rate policy_lr; staleness async/staleness_mean;
    grad_norm policy/raw_grad_norm policy/grad_norm raw_grad_norm grad_norm; reference_kl policy_kl loss/avg_kl;
    logprob_abs_diff_mean minibatch_rollout_logprobs_abs_diff_mean rollout_train_logprobs_abs_diff_mean;
    logprob_abs_diff_max minibatch_rollout_logprobs_abs_diff_max; ratio_mean is_ratio_mean; ratio_max is_ratio_max;
    logprob_abs_diff_std minibatch_rollout_logprobs_abs_diff_std rollout_train_logprobs_abs_diff_std
tunix: reward rewards/score/mean rewards/reward/mean rewards/sum trajectory_rewards/mean; entropy entropy loss/entropy;
    grad_norm grad_norm; learning_rate learning_rate; reference_kl kl rewards/reward_kl_penalty; policy_kl ppo_kl
areal: reward task_reward/avg rollout/reward; entropy update/entropy/avg entropy/avg; grad_norm update/grad_norm;
    learning_rate update/lr; policy_kl approx_kl/avg; kl -behave_approx_kl/avg; staleness sample_staleness_theta_avg;
    logprob_abs_diff_mean behave_approx_kl_abs/avg; ratio_mean behave_imp_weight/avg; filtered rs_filtered_fraction;
    ratio_max behave_imp_weight/max; ratio_min behave_imp_weight/min
openrlhf: reward reward; entropy entropy_loss; grad_norm actor_grad_norm; learning_rate actor_lr; reference_kl kl;
    policy_kl ppo_kl; loss policy_loss; kl vllm_kl
open_instruct: reward objective/verifiable_correct_rate objective/scores scores; entropy policy/entropy_avg;
    grad_norm optim/grad_norm; learning_rate lr; reference_kl objective/kl2_avg objective/kl_avg; loss loss/policy_avg;
    logprob_abs_diff_mean vllm_vs_local_logprob_diff_mean;
    logprob_abs_diff_max vllm_vs_local_logprob_diff_max;
    logprob_abs_diff_std vllm_vs_local_logprob_diff_std; staleness num_steps_off_policy
rllm: reward reward/mean; entropy actor/entropy; grad_norm actor/grad_norm; learning_rate actor/lr; kl offpolicy/kl;
    k3_kl offpolicy/k3_kl; logprob_abs_diff_mean offpolicy/logprob_abs_diff/mean;
    logprob_abs_diff_max offpolicy/logprob_abs_diff/max; prob_abs_diff_mean offpolicy/prob_abs_diff/mean;
    ratio_mean offpolicy/ratio/mean; staleness async/staleness_mean
torchtitan: reward rollout_reward/_mean reward/mean; entropy trainer/entropy/mean entropy;
    grad_norm trainer/grad_norm/mean grad_norm; learning_rate trainer/lr lr; loss loss/mean;
    staleness train_batch/policy_age/mean; zero_std rollout_reward/group_zero_std_frac/mean;
    kl -bit_wise/logprob_diff/mean; logprob_abs_diff_mean bit_wise/logprob_diff/abs_mean; ratio_mean loss/ratio_mean
tinker: reward env/all/reward/total; entropy optim/entropy; learning_rate optim/lr; reference_kl kl_policy_base;
    signal env/all/by_group/frac_mixed; staleness async/staleness_mean; kl kl_sample_train_v1; k3_kl kl_sample_train_v2
roll: reward critic/score/mean; entropy critic/entropy/mean; grad_norm actor/grad_norm; learning_rate actor/lr;
    reference_kl actor/kl_loss critic/kl; loss actor/pg_loss; largest_advantage critic/advantages/max;
    ratio_mean actor/train_infer_ratio_mean actor/train_infer_ratio_token_mean; staleness scheduler/off_policy_ratio
ms_swift: reward reward; entropy entropy/mean; grad_norm grad_norm; learning_rate learning_rate; loss loss;
    zero_std frac_reward_zero_std; reward_std reward_std; kl rollout_correction/kl; k3_kl rollout_correction/k3_kl;
    chi2_token rollout_correction/chi2_token
marin: entropy policy_entropy current_entropy; grad_norm grad/norm/total;
    learning_rate optim/learning_rate; reference_kl kl_penalty; loss reinforce_loss;
    ratio_mean trainer_inference_importance_sampling_ratio_mean;
    prob_abs_diff_mean trainer_sampler_prob_diff_mean; prob_abs_diff_max trainer_sampler_prob_diff_max
"""
SIGNAL_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    project: {words[0]: tuple(words[1:]) for words in map(str.split, signals.split(";"))}
    for project, signals in (entry.split(":") for entry in _SIGNALS.replace("\n   ", "").strip().splitlines())
}
"""The names of each project's further signals, the best first, taken from its source.

The length is not among them. A mismatch signal here has the value of ours but for the order of its means, its sign (a
name that begins with ``-``) or a known function of it. tinker's ``v2``, half of the mean square of lr, is k3 to second
order. Miles has slime's names. ``trl_async`` is AsyncGRPO of TRL, whose ``kl`` compares the trainer with the sampler.
``filtered`` is the share of ratios that a cap or a mask changed, ``stale_count`` all stale responses so far.
"""

LENGTH_COLUMNS = (
    (  # rljax, verl, torchtitan
        "response_length/mean",
        ("response_length/truncated_fraction", "response_length/clip_ratio", "truncation_rate/mean"),
    ),
    ("completions/mean_length", ("completions/clipped_ratio", "completions/clip_ratio")),  # TRL, tunix
    ("decode_len/all/mean", ("is_truncated/all/mean",)),  # prime-rl
    ("completion_len/all/mean", ("is_truncated/all/mean",)),  # prime-rl, older
    ("completion_len/mean", ("is_truncated/mean",)),  # prime-rl, older
    ("num_output_tokens/mean", ("is_truncated/mean",)),  # prime-rl, newer
    ("mean_gen_tokens_per_sample", ("truncation_rate",)),  # NeMo-RL
    ("gen_tokens_per_sample/mean", ("truncation_rate",)),  # NeMo-RL
    ("response_len/mean", ("truncated_ratio",)),  # slime, Miles
    ("response_lengths", ("truncated", "truncated_ratio")),  # slime, Miles: the trainer's side
    ("generate/avg_num_tokens", ()),  # SkyRL
    ("completion_length", ()),  # TRL, older
    ("response_length", ("truncated", "response_clip_ratio")),  # OpenRLHF, torchtitan
    ("val/sequence_lengths", ("val/truncated_completion_fraction",)),  # open-instruct
    ("response_len/avg", ("no_eos_ratios/avg",)),  # AReaL, as rljax.record.training_logs computes it
    ("seq_len/avg", ("no_eos_ratios/avg",)),  # AReaL, with the prompt
    ("step_response_length/mean", ()),  # rLLM
    ("env/all/ac_tokens_per_turn", ()),  # tinker
    ("response_tokens_length", ()),  # Marin
)
"""The names of the mean response length, and of the share of truncated responses in the same log."""

CALL_COUNT = "_step"
"""The column that counts the calls of ``wandb.log``."""
_OWN_STEPS = (*(f"{part}/global_step" for part in ("training", "trainer", "train", "system")), "rollout/step")
_STEPS = ("step", "training_step", "global_step", "Step", "train/step", "trainer/step", "iteration", "progress/batch")
STEP_COLUMNS = (*_OWN_STEPS, *_STEPS, CALL_COUNT)
"""The names of the step's column, the best first."""
RUN_COLUMNS = ("run", "Run", "run_name", "run_id", "Run ID", "run/name", "Name", "arm", "experiment")
"""The names of the column that names the run of each row, in a table of several runs."""
METRIC_COLUMNS = ("tag", "metric", "key", "metric_name", "name")
"""The names of the column that names the metric of each ``value``, in a table with a row for each number."""
NOT_TRAINING = {"eval", "evaluation", "val", "validation", "test"}
"""The parts of a name that say that a column or a folder is not of the training."""
WRAPPERS = {"data", "metrics", "log", "logs", "payload"}
"""The objects in which a row may have its metrics. The names of the columns leave these names out."""


def framework_metrics(statistics: Statistics, framework: str) -> dict[str, Any]:
    """Computes the numbers that a framework would log for these tokens: Python floats (numpy leaves) or jax scalars.

    Raises ValueError if the framework is not one of FRAMEWORKS.
    """
    from rljax.mismatch.arrays import scalars
    from rljax.mismatch.metrics import finalize_mismatch

    if framework not in FRAMEWORKS:
        raise ValueError(f"framework must be one of {FRAMEWORKS}, got {framework!r}")
    ours = finalize_mismatch(statistics)
    table = NAME_TABLE[framework]
    values = {name: ours[value] if isinstance(value, str) else value(statistics) for name, _, value in table}
    return scalars(statistics.xp, values)
