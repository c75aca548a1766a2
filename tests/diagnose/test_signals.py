"""Tests of the names of the projects: a log's project, the values read from it, and their order."""

import json

import numpy as np
import pytest

from rljax.diagnose.signals import MISMATCH, PROJECTS, choose_signals, names_of, read_signals, split_runs
from rljax.mismatch.names import NAME_TABLE, SIGNAL_NAMES
from rljax.record.training_logs import read_rows


@pytest.mark.parametrize(
    ("project", "columns"),
    [
        ("verl", "step actor/entropy actor/grad_norm rollout_corr/k3_kl critic/score/mean"),
        ("trl", "train/reward train/entropy train/grad_norm train/sampling/sampling_logp_difference/mean"),
        ("prime_rl", "step entropy/all/mean mismatch_kl/all/mean optim/grad_norm reward/all/mean"),
        ("nemo_rl", "train/reward train/grad_norm train/token_mult_prob_error train/gen_kl_error"),
        ("slime", "rollout/raw_reward train/grad_norm train/train_rollout_logprob_abs_diff train/lr-pg_0"),
        ("skyrl", "reward/avg_raw_reward policy/policy_entropy policy/rollout_train_logprobs_abs_diff_mean"),
        ("tunix", "global/train/rewards/score/mean actor/train/grad_norm actor/train/sampler_trainer/logp_diff_mean"),
        ("rljax", "step reward/mean policy/entropy optimizer/grad_norm mismatch/k3_kl"),
        ("verl", "step critic/rewards/mean actor/entropy_loss mismatch/mismatch_k3_kl"),
        ("skyrl", "step reward/avg_raw_reward policy_lr minibatch_rollout_logprobs_abs_diff_mean"),
        ("areal", "step ppo_actor/task_reward/avg ppo_actor/update/behave_approx_kl/avg"),
        ("openrlhf", "step train/reward train/actor_grad_norm train/vllm_kl train/response_length"),
        ("open_instruct", "training_step objective/verifiable_correct_rate debug/vllm_vs_local_logprob_diff_mean"),
        ("rllm", "step reward/mean actor/entropy offpolicy/k3_kl offpolicy/logprob_abs_diff/mean"),
        ("torchtitan", "step rollout_reward/_mean trainer/entropy/mean bit_wise/logprob_diff/mean"),
        ("tinker", "progress/batch env/all/reward/total optim/entropy optim/kl_sample_train_v1"),
        ("roll", "step critic/score/mean critic/entropy/mean actor/train_infer_ratio_mean"),
        ("roll", "critic/score/mean actor/lr actor/kl_loss@sum actor/train_infer_ratio_token_mean@sum"),
        ("trl_async", "step reward entropy grad_norm learning_rate kl ratio reward_std"),
        ("ms_swift", "step reward entropy/mean rollout_correction/kl rollout_correction/k3_kl"),
        ("slime", "step rollout/raw_reward train/train_rollout_kl train/train_rollout_logprob_abs_diff"),
    ],
)
def test_each_project_is_known_by_its_names(project, columns):
    found, chosen = choose_signals(columns.split())
    assert (found, "reward" in chosen) == (project, True)
    assert set(chosen) & set(MISMATCH)


@pytest.mark.parametrize(
    ("signal", "column", "others"),
    [
        ("grad_norm", "policy/grad_norm", "critic/grad_norm policy/policy_lr reward/avg_raw_reward"),
        ("ratio_mean", "policy/is_ratio_mean", "policy/policy_lr reward/avg_raw_reward"),
        ("signal", "env/all/by_group/frac_mixed", "env/gym/by_group/frac_mixed env/all/reward/total"),
        ("length", "env/all/ac_tokens_per_turn", "env/gym/ac_tokens_per_turn env/all/reward/total"),
        ("staleness", "async/staleness_mean", "env/all/reward/total optim/kl_sample_train_v1"),
        ("reference_kl", "kl_policy_base", "env/all/reward/total optim/kl_sample_train_v1"),
        ("staleness", "scheduler/off_policy_ratio", "critic/score/mean actor/train_infer_ratio_mean"),
        ("reference_kl", "actor/reward_kl_penalty", "critic/score/mean actor/entropy"),
        ("reference_kl", "critic/kl", "critic/score/mean actor/entropy actor/grad_norm"),
        ("reference_kl", "rewards/reward_kl_penalty", "rewards/score/mean sampler_trainer/logp_diff_mean"),
        ("reward", "rewards/sum", "trajectory_rewards/mean sampler_trainer/logp_diff_mean"),
        ("truncated", "generation/completions/clip_ratio", "rewards/sum generation/completions/mean_length"),
    ],
)
def test_the_column_of_a_signal(signal, column, others):
    assert choose_signals([*others.split(), column])[1][signal] == column


def test_every_project_has_mismatch_and_entropy():
    for project in PROJECTS:
        assert {"entropy", "learning_rate"} <= set(SIGNAL_NAMES[project])
        assert {"reward", "grad_norm"} & set(SIGNAL_NAMES[project])
        assert set(names_of(project)) & set(MISMATCH)
    assert "mismatch_kl/mean" in [name for name, _, _ in NAME_TABLE["prime_rl"]]


def test_a_log_by_step():
    rows = [
        {"step": 2, "train/reward": 0.5, "train/token_mult_prob_error": 1.03, "train/gen_kl_error": 0.001},
        {"step": 1, "train/reward": 0.25, "train/token_mult_prob_error": "1.02"},
        {"step": 2, "train/reward": 0.75},
        {"step": 3, "validation/reward": 0.9},
    ]
    log = read_signals(rows)
    assert log.project == "nemo_rl"
    assert log.steps.tolist() == [1, 2]
    np.testing.assert_allclose(log.get("reward"), [0.25, 0.75])
    np.testing.assert_allclose(log.get("logprob_abs_diff_mean"), np.log([1.02, 1.03]))
    np.testing.assert_allclose(log.get("k3_kl"), [np.nan, 0.001])
    assert not log.has("entropy")


def test_rows_of_updates_belong_to_the_rollout_above_them():
    """slime logs rollouts and updates with a step column of their own; an evaluation has neither."""
    rows = [{"train/grad_norm": 9.0, "train/step": 0}]
    for step in range(3):
        rows.append({"rollout/response_len/mean": 100.0 + step, "rollout/step": step, "_step": 3 * step})
        rows += [{"train/grad_norm": 10.0 * step + i, "train/step": 2 * step + i} for i in range(2)]
        rows.append({"train/grad_norm": 0.0, "_step": 3 * step + 1})
    log = read_signals(rows)
    assert log.steps.tolist() == [0, 1, 2]
    assert log.get("length").tolist() == [100, 101, 102]
    assert log.get("grad_norm").tolist() == [1, 11, 21]
    # A column that rows with the step have, too, is not taken from rows with another step.
    renamed = [{"step": 1, "reward": 0.1, "kl": 0.2}, {"global_step": 2, "reward": 0.9, "kl": 0.2}]
    assert read_signals(renamed).get("reward").tolist() == [0.1]


def test_steps_stand_beside_other_counts():
    """Open Instruct counts episodes, and ROLL has a row number."""
    rows = [{"val/sequence_lengths": 5.0, "global_step": 512 * i, "training_step": i, "scores": 0.5} for i in (1, 2)]
    assert read_signals(rows).steps.tolist() == [1, 2]
    rows = [{"critic/score/mean": 0.5, "system/global_step": i, "_step": 3 * i} for i in (1, 2)]
    assert read_signals(rows).steps.tolist() == [1, 2]


def test_the_length_of_areal_is_without_its_prompt(tmp_path):
    prompt, whole, reward = (f"ppo_actor/{name}/avg" for name in ("prompt_len", "seq_len", "task_reward"))
    (tmp_path / "a.jsonl").write_text(json.dumps({prompt: 500, whole: 800, reward: 0.5, "step": 1}))
    (tmp_path / "a.csv").write_text(f"tag,value,step\n{prompt},500,1\n{whole},800,1\n{reward},0.5,1\n")
    for name in ("a.jsonl", "a.csv"):
        assert read_signals(read_rows(tmp_path / name)).get("length").tolist() == [300]
    apart = [{prompt: 500}, {whole: 800, reward: 0.5}, {prompt: 600}, {whole: 900}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row | {"_step": i}) + "\n" for i, row in enumerate(apart)))
    assert read_signals(read_rows(tmp_path / "a.jsonl")).columns["length"] == whole  # no row knows its prompt


def test_the_share_of_cut_answers_may_be_of_one_agent():
    row = {"step": 1, "train/agg/all/num_output_tokens/mean": 5.0, "mismatch_kl/mean": 0.1, "reward/mean": 0.5}
    row |= {"train/agg/all/solver/is_truncated/mean": 0.9, "eval/agg/all/solver/is_truncated/mean": 0.1}
    assert read_signals([row]).get("truncated").tolist() == [0.9]
    assert not read_signals([row | {"train/agg/all/judge/is_truncated/mean": 0.0}]).has("truncated")


def test_a_table_with_a_row_for_each_number(tmp_path):
    """TensorBoard's and MLflow's tables name the metric in a column."""
    path = tmp_path / "log.csv"
    path.write_text("tag,value,step\nactor/entropy,0.5,1\nactor/entropy,0.25,2\nrollout_corr/k3_kl,0.001,2\n")
    log = read_signals(read_rows(path))
    assert (log.project, log.steps.tolist()) == ("verl", [1, 2])
    np.testing.assert_allclose([log.get("entropy"), log.get("k3_kl")], [[0.5, 0.25], [np.nan, 0.001]])


def test_signs_ratios_and_counts_follow():
    """AReaL logs the mean of lr: its sign is turned, and k3 is the mean ratio - 1 - the mean of lr."""
    areal = {"task_reward/avg": 0.5, "update/behave_approx_kl/avg": -0.03, "update/behave_imp_weight/avg": 0.98}
    titan = {"rollout_reward/_mean": 0.5, "bit_wise/logprob_diff/mean": -0.3, "loss/ratio_mean": 0.8}
    for row, expected in ((areal, [0.03, 0.01]), (titan, [0.3, 0.1])):
        log = read_signals([row | {"step": 1}])
        np.testing.assert_allclose([log.get("kl")[0], log.get("k3_kl")[0]], expected)
    log = read_signals([{"step": 1, "critic/score/mean": 0.5, "rollout_corr/kl": 0.3, "rollout_corr/k3_kl": 0.08}])
    np.testing.assert_allclose(log.get("ratio_mean"), [0.78])
    # verl counts the stale responses of all steps so far.
    name = "fully_async/count/stale_trajectory_processed"
    rows = [{"step": i, "critic/score/mean": 0.5, name: count} for i, count in enumerate((0, 0, 5, 5))]
    np.testing.assert_array_equal(read_signals(rows).get("staleness"), [np.nan, 0, 1, 0])


def test_a_ratio_after_a_cap_or_of_a_whole_response_is_none():
    """AReaL's weight of a response is exp of its mean lr, here exp(-0.03)."""
    kl, ratio = "behave_approx_kl/avg", "behave_imp_weight/avg"
    for share, mean, known in ((0.0, 0.98, True), (0.01, 0.98, False), (0.0, 0.9704, False)):
        row = {"step": 1, "task_reward/avg": 0.5, kl: -0.03, ratio: mean, "rs_filtered_fraction": share}
        assert [read_signals([row]).has(name) for name in ("ratio_mean", "k3_kl")] == [known, known]
    rows = [{"step": i, "token_mult_prob_error": 1.1, "sampling_importance_ratio": 0.9} for i in (1, 2)]
    capped = read_signals([rows[0] | {"is_oob_ratio": 0.0}, rows[1] | {"is_oob_ratio": 0.02}])
    np.testing.assert_array_equal(capped.get("ratio_mean"), [0.9, np.nan])


def test_numbers_that_are_never_finite_again_are_lost():
    """A column that is NaN now and then is not lost, nor is one whose cells are missing at the end."""
    cells = [(0.1, 0.2), (float("nan"), 0.2), (0.1, "nan"), (0.1, "NaN"), (None, float("inf"))]
    rows = [{"step": i, "reward": 1.0, "grad_norm": a, "entropy": b} for i, (a, b) in enumerate(cells, 1)]
    assert read_signals(rows).lost == {"entropy": 3}
    # The last rows of a table hold an evaluation, and NaN for what is of the training.
    trained = [{"step": i, "reward": 1.0, "entropy": 0.2} for i in range(9)]
    trained += [{"step": 8 + i, "reward": float("nan"), "entropy": float("nan"), "eval/a": 1.0} for i in range(1, 4)]
    assert read_signals(trained).lost == {}
    assert read_signals([{name: row[name] for name in row if name != "eval/a"} for row in trained]).lost != {}


def test_null_may_stand_for_what_is_not_finite(tmp_path):
    """It does in verl's file, and where rljax's row lists the name."""
    numbers = [(i, 1.0 if i < 3 else None) for i in range(1, 6)]
    ours = [{"step": i, "optimizer/grad_norm": a, "policy/entropy": a, "reward/mean": 0.5} for i, a in numbers]
    ours = ours[:2] + [row | {"nonfinite_keys": ["optimizer/grad_norm"]} for row in ours[2:]]
    verl = [{"step": i, "data": {"actor/grad_norm": a, "critic/score/mean": 0.5}} for i, a in numbers]
    for rows in (ours, verl):
        (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        assert read_signals(read_rows(tmp_path / "log.jsonl")).lost == {"grad_norm": 3}


def test_runs_are_split_and_buckets_stand_in_order():
    """The names of the runs in an export may hold its separator."""
    rows = [{f"ppo - lr {rate} - {name}": 1.0 for rate in ("1e-6", "1e-5") for name in ("reward", "kl")}]
    assert list(split_runs(rows)) == ["ppo - lr 1e-6", "ppo - lr 1e-5"]
    row = {"step": 1, "mismatch/k3_kl": 1e-4, "reward/mean": 0.1}
    row |= {f"mismatch_position/{label}/k3_kl": 1e-4 for label in ("ge_16", "4_to_16", "lt_4")}
    assert list(read_signals([row]).buckets["mismatch_position"]) == ["lt_4", "4_to_16", "ge_16"]
