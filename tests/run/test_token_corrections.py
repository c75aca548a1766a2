"""Tests of corrections of single tokens beside other settings of a run: some fit, and others are refused in words."""

import pytest

from rljax.algorithms.advantages import AdvantageConfig
from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.policy.config import PolicyConfig
from rljax.record.trackers import RecordConfig
from rljax.rollout.episodes.config import EpisodeConfig
from rljax.rollout.types import RolloutConfig
from rljax.run.checkpoint import CheckpointConfig
from rljax.run.config import Config, EvalConfig
from rljax.run.training import make_objective
from rljax.trainer.state import OptimizerConfig

OFF, CENTERED = CorrectionConfig(), CorrectionConfig(score_centering=True)
WEIGHTED, TOPS_KL = CorrectionConfig(level="token", normalize=True), CorrectionConfig(preset="one_sided_tops_kl")
CENTERED_TIS = CorrectionConfig(preset="token_tis", score_centering=True)
PLAIN, TOPS, EXACT = RolloutConfig(), RolloutConfig(top_logprobs=20), RolloutConfig(engine="exact", dtype="bfloat16")
STALE = RolloutConfig(engine="vllm", urls=("http://127.0.0.1:1",), max_staleness=1)
LONG = RolloutConfig(episode=EpisodeConfig(max_rows=2))
TWICE = LossConfig(kind="policy_gradient", epochs=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout": PLAIN}, "score_centering needs the sampler's likeliest tokens: set rollout.top_log"),
        ({"loss": LossConfig(kind="gspo")}, "loss.kind must be policy_gradient, ppo_clip or cispo, got gspo"),
        ({"loss": LossConfig(old_logprobs="rollout")}, "loss.old_logprobs must be trainer, got rollout"),
        ({"loss": LossConfig(mini_batches=2)}, "needs one update a batch with loss.kind = ppo_clip"),
        ({"loss": LossConfig(kind="cispo", epochs=2)}, "needs one update a batch with loss.kind = cispo"),
        ({"loss": TWICE, "correction": CENTERED_TIS}, "loss.mini_batches and loss.epochs must be 1, got 1 and 2"),
        (
            {"rollout": PLAIN, "correction": TOPS_KL},
            "correction.region_over = tops needs the sampler's likeliest tokens",
        ),
        ({"correction": OFF, "loss": LossConfig(stale_clip_low=0.1)}, "and stale_clip_high do nothing where the ratio"),
        (
            {"correction": OFF, "loss": LossConfig(stale_clip_low=0.1, old_logprobs="rollout")},
            "are for rollouts that m",
        ),
        ({"correction": OFF, "loss": LossConfig(kind="vespo")}, "loss.kind = vespo is policy_gradient where the ratio"),
        (
            {"correction": WEIGHTED, "loss": LossConfig(router_balance=0.1), "rollout": EXACT},
            "exact knows the mean weight",
        ),
    ],
)
def test_settings_that_rule_a_correction_out(settings, message):
    with pytest.raises(ValueError, match=message):
        Config(**{"rollout": TOPS, "correction": CENTERED, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": LossConfig(kind="policy_gradient", old_logprobs="rollout")}, "does nothing for loss.kind"),
        ({"advantage": AdvantageConfig(overlong_buffer_tokens=9000)}, "= 9000 must be at most"),
        ({"checkpoint": CheckpointConfig(keep_best=True), "eval": EvalConfig(every=0, at_start=True)}, "keep_best ne"),
        ({"optimizer": OptimizerConfig(eps=0.0)}, "optimizer.eps must be above 0"),
        ({"record": RecordConfig(trackers=("wandbb",))}, "record.trackers must name wandb, trackio, "),
        ({"advantage": AdvantageConfig(estimator="optimal_token"), "rollout": LONG}, "max_rows = 2 must be 1"),
    ],
)
def test_an_older_runs_settings_may_not_begin_a_run(settings, message):
    config = Config(**settings)
    with pytest.raises(ValueError, match=message):
        config.check_start()


@pytest.mark.parametrize(
    ("settings", "needs_tops"),
    [
        ({"rollout": TOPS, "correction": CENTERED}, True),
        ({"rollout": RolloutConfig(top_k=20, top_p=0.9), "correction": CENTERED}, True),
        ({"rollout": TOPS, "correction": CENTERED, "loss": TWICE}, True),
        ({"rollout": TOPS, "correction": CorrectionConfig(preset="one_sided_tops_tv", score_centering=True)}, True),
        ({"correction": CorrectionConfig(preset="two_sided_tv"), "loss": LossConfig(mini_batches=2)}, False),
        ({"loss": LossConfig(kind="vespo", old_logprobs="rollout")}, False),
        ({"rollout": STALE, "loss": LossConfig(stale_clip_low=0.1, old_logprobs="rollout")}, False),
    ],
)
def test_settings_that_fit(settings, needs_tops):
    assert Config(**settings).correction.needs_tops == needs_tops


def test_where_the_tail_is():
    for rollout, has_tail in (({"top_logprobs": 20}, True), ({"top_logprobs": 64}, False), ({"top_k": 20}, False)):
        config = Config(rollout=RolloutConfig(**rollout), correction=CENTERED)
        assert make_objective(config, 8, PolicyConfig(64, 8, 8, 1, 1, 1, 8)).has_tail == has_tail
