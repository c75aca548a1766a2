"""Our losses and corrections on packed rows must agree with verl's and TRL's formulas, in numpy on padded rows.

verl: trainer/ppo/core_algos.py (agg_loss, compute_policy_loss_vanilla, _gspo, _cispo, kl_penalty_forward) and
trainer/ppo/rollout_corr_helper.py (compute_rollout_correction_weights, compute_rollout_rejection_mask). TRL:
trainer/grpo_trainer.py (_generate_and_score_completions for the vLLM ratio, _compute_loss).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algorithms.aggregation import aggregation_weights
from rljax.algorithms.correction_choice import CorrectionConfig, correct, gradient_divisor
from rljax.algorithms.losses import LossConfig, kl_penalty, policy_loss
from rljax.mismatch.correction import finalize_correction

pytestmark = pytest.mark.slow

LENGTHS = (7, 1, 12, 5, 9, 3)
S, T = len(LENGTHS), max(LENGTHS)
# The row and the first token of each sequence in the packed rows.
PLACES = ((0, 0), (1, 14), (2, 2), (0, 10), (1, 1), (2, 16))
PADDED = np.arange(T) < np.array(LENGTHS)[:, None]


def data(seed, spread=0.3):
    """Returns padded [s, T] float64: new, old and rollout log-probabilities, advantages, and reference.

    The advantage of a sequence is repeated.
    """
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1.0, (S, T))
    new, rollout, reference = (old + scale * rng.standard_normal((S, T)) for scale in (spread, 0.2, 0.1))
    return new, old, rollout, np.broadcast_to(rng.normal(size=(S, 1)), (S, T)), reference


def pack(array, fill=0.0):
    rows = np.full((3, 20), fill, np.asarray(array).dtype)
    for sequence, (row, start) in enumerate(PLACES):
        rows[row, start : start + LENGTHS[sequence]] = array[sequence, : LENGTHS[sequence]]
    return rows


def unpack(rows):
    array = np.zeros((S, T), np.asarray(rows).dtype)
    for sequence, (row, start) in enumerate(PLACES):
        array[sequence, : LENGTHS[sequence]] = rows[row, start : start + LENGTHS[sequence]]
    return array


MASK = pack(PADDED)
IDS = pack(np.broadcast_to(np.arange(S, dtype=np.int32)[:, None], (S, T)), 0)
WHERE = {"sequence_ids": IDS, "num_sequences": S}


def ours(loss, correction, seed, spread=0.3, constant=T):
    """Returns the loss and its gradient in padded form, for everything in one packed micro-batch in float64."""
    new, old, rollout, advantages, reference = data(seed, spread)
    with jax.enable_x64(True):

        @jax.jit
        def run(logprobs):
            weights, kept, totals = correct(correction, pack(old, np.nan), pack(rollout), MASK, **WHERE)
            losses, _ = policy_loss(loss, logprobs, pack(old, np.nan), pack(advantages), kept, **WHERE)
            share, denominator = aggregation_weights(loss.aggregation, kept, constant=constant, **WHERE)
            total = jnp.sum(share * weights * losses) / gradient_divisor(correction, totals)
            if loss.kl != "none":
                penalty = kl_penalty(loss.kl, logprobs, jnp.asarray(pack(reference)), kept)
                total += loss.kl_coefficient * jnp.sum(share * penalty)
            return total / denominator

        value, gradient = jax.value_and_grad(run)(jnp.asarray(pack(new)))
    return float(value), unpack(np.asarray(gradient))


def verl_agg_loss(losses, mask, mode, constant=T):
    if mode == "token-mean":
        return (losses * mask).sum() / mask.sum()
    per_sequence = (losses * mask).sum(1)
    if mode == "seq-mean-token-mean":
        per_sequence = per_sequence / (mask.sum(1) + 1e-8)
    number = (mask.sum(1) > 0).sum()
    return per_sequence.sum() / number / (constant if mode == "seq-mean-token-sum-norm" else 1)


def verl_losses(kind, new, old, advantages, low, high, mask):
    difference = np.clip(new - old, -20, 20)
    ratio = np.exp(difference)
    if kind == "cispo":
        return -np.clip(ratio, 1 - low, 1 + high) * advantages * new
    if kind == "gspo":
        mean = ((new - old) * mask).sum(1) / np.maximum(mask.sum(1), 1)
        ratio = np.exp(np.minimum(np.broadcast_to(mean[:, None], new.shape), 10))
    losses = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 1 - low, 1 + high))
    if kind == "ppo_clip":  # verl's dual clip at 3 does not occur here; we do not have it
        assert (np.minimum(-advantages * 3.0, losses)[mask & (advantages < 0)] == losses[mask & (advantages < 0)]).all()
    return losses


VERL_MODES = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "sequence_sum": "seq-mean-token-sum-norm",
}


@pytest.mark.parametrize("aggregation", VERL_MODES)
@pytest.mark.parametrize("kind", ["ppo_clip", "cispo", "gspo"])
def test_verl_policy_losses(kind, aggregation):
    low, high = (0.02, 0.03) if kind == "gspo" else (0.2, 0.28)
    config = LossConfig(kind=kind, clip_low=low, clip_high=high, aggregation=aggregation)
    new, old, _, advantages, _ = data(1)
    value, _ = ours(config, CorrectionConfig(), 1)
    losses = verl_losses(kind, new, old, advantages, low, high, PADDED)
    assert value == pytest.approx(verl_agg_loss(losses, PADDED, VERL_MODES[aggregation]), rel=1e-6)


def test_verl_gspo_gradient():
    """verl moves token t by sg(s_i) pi_t / sg(pi_t).

    With equal advantages this is the gradient of s_i itself.
    """
    config = LossConfig(kind="gspo", clip_low=0.02, clip_high=0.03, aggregation="sequence_mean")
    new, old, _, advantages, _ = data(2)
    _, gradient = ours(config, CorrectionConfig(), 2)
    n = PADDED.sum(1, keepdims=True)
    s = np.exp(((new - old) * PADDED).sum(1, keepdims=True) / n)
    taken = s * advantages <= np.clip(s, 0.98, 1.03) * advantages
    assert 0 < taken[:, 0].sum() < S
    np.testing.assert_allclose(gradient, np.where(PADDED & taken, -s * advantages / n / S, 0), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_verl_kl(kl):
    new, _, _, _, reference = data(3)
    with jax.enable_x64(True):
        found = kl_penalty(kl, jnp.asarray(new), jnp.asarray(reference))
    r = reference - new
    np.testing.assert_allclose(found, {"k1": -r, "k2": 0.5 * r**2, "k3": np.exp(r) - r - 1}[kl], rtol=1e-11)


@pytest.mark.parametrize(
    ("level", "threshold", "normalize"),
    [("token", 1.2, False), ("token", (0.8, 1.2), False), ("sequence", 1.2, True), ("token", 1.2, True)],
)
def test_verl_importance_weights(level, threshold, normalize):
    """In verl one number is TIS and "lower_upper" is the band; batch_normalize is over tokens or sequences."""
    _, old, rollout, _, _ = data(4)
    difference = (old - rollout) * PADDED
    if level == "sequence":
        difference = np.broadcast_to(difference.sum(1, keepdims=True), difference.shape)
    weights = np.exp(np.clip(difference, -20, 20)) * PADDED
    if isinstance(threshold, tuple):
        weights = np.where((weights >= threshold[0]) & (weights <= threshold[1]), weights, 0)
        fields = {"mode": "band", "threshold_low": threshold[0], "threshold": threshold[1]}
    else:
        weights = np.minimum(weights, threshold)
        fields = {"threshold": threshold}
    mean = weights[PADDED].mean() if level == "token" else weights[:, 0].mean()
    config = CorrectionConfig(level=level, normalize=normalize, **fields)
    found, kept, totals = jax.jit(functools.partial(correct, config, num_sequences=S))(
        pack(old).astype(np.float32), pack(rollout).astype(np.float32), MASK, sequence_ids=IDS
    )
    expected = weights / mean if normalize else weights
    np.testing.assert_allclose(unpack(np.asarray(found)) / gradient_divisor(config, totals), expected, rtol=3e-6)
    np.testing.assert_array_equal(kept, MASK)
    units = weights[PADDED] if level == "token" else weights[:, 0]
    row = finalize_correction(totals)
    assert float(row["effective_sample_size"]) == pytest.approx(1 / np.mean((units / mean) ** 2), rel=2e-6)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"reject_k3": 0.018}, {"seq_mean_k3": 0.018}),
        # verl bounds exp(-mean lr), so its pair is the inverse of ours.
        ({"reject_geometric_low": 0.97, "reject_geometric_high": 1.1}, {"seq_mean_k1": (1 / 1.1, 1 / 0.97)}),
        (
            {"reject_k3": 0.025, "reject_geometric_low": 0.95, "reject_geometric_high": 1.2},
            {"seq_mean_k3": 0.025, "seq_mean_k1": (1 / 1.2, 1 / 0.95)},
        ),
    ],
)
def test_verl_rejection_with_token_truncation(fields, options):
    """Weights, rejection and loss act together: rejected tokens leave the denominators."""
    new, old, rollout, advantages, _ = data(5)
    difference = np.clip(old - rollout, -20, 20)
    statistics = {"seq_mean_k3": np.exp(difference) - 1 - difference, "seq_mean_k1": -difference}
    keep = np.ones(S, bool)
    for name, bound in options.items():
        mean = (statistics[name] * PADDED).sum(1) / PADDED.sum(1)
        keep &= mean <= bound if name.endswith("k3") else (mean >= np.log(bound[0])) & (mean <= np.log(bound[1]))
    assert 0 < keep.sum() < S
    mask = PADDED & keep[:, None]
    weights = np.minimum(np.exp(difference), 1.2)
    correction = CorrectionConfig(level="token", threshold=1.2, **fields)
    for aggregation, mode in VERL_MODES.items():
        config = LossConfig(aggregation=aggregation)
        losses = verl_losses("ppo_clip", new, old, advantages, 0.2, 0.28, mask) * weights
        expected = verl_agg_loss(losses, mask, mode)
        value, gradient = ours(config, correction, 5)
        assert value == pytest.approx(expected, rel=1e-6)
        assert not gradient[~mask].any()


def trl_loss(loss_type, level, mode, seed, *, beta=0.0, low=0.2, high=0.28, clip_min=None, clip_max=1.2):
    """Returns TRL's loss on one batch; ``mode`` is vllm_importance_sampling_mode."""
    new, old, rollout, advantages, reference = data(seed)
    mask = PADDED.astype(float)
    difference = (old - rollout) * mask
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdims=True)
    vllm_ratio = np.exp(difference)
    if mode.endswith("truncate"):
        vllm_ratio = np.clip(vllm_ratio, clip_min, clip_max)
    else:
        outside = (vllm_ratio > clip_max) | (vllm_ratio < (-np.inf if clip_min is None else clip_min))
        vllm_ratio = np.where(outside, 0.0, vllm_ratio)
    log_weights = new - old
    if level == "sequence":
        log_weights = ((log_weights * mask).sum(-1) / np.maximum(mask.sum(-1), 1.0))[:, None]
    coef = np.exp(log_weights)
    if loss_type == "cispo":
        losses = -np.minimum(coef, high) * advantages * new  # epsilon_high is the bound itself in this loss
    else:
        losses = -np.minimum(coef * advantages, np.clip(coef, 1 - low, 1 + high) * advantages)
    losses = losses * vllm_ratio
    r = reference - new
    losses = losses + beta * (np.exp(r) - r - 1)
    if loss_type == "grpo":
        return ((losses * mask).sum(-1) / mask.sum(-1)).mean()
    if loss_type == "dr_grpo":
        return (losses * mask).sum() / (S * 100)
    return (losses * mask).sum() / mask.sum()  # dapo and cispo use num_items_in_batch


@pytest.mark.parametrize(
    ("loss", "loss_type", "level", "options"),
    [
        (LossConfig(aggregation="sequence_mean", kl="k3", kl_coefficient=0.3), "grpo", "token", {"beta": 0.3}),
        (LossConfig(aggregation="sequence_sum"), "dr_grpo", "token", {}),
        (LossConfig(), "dapo", "token", {}),
        (LossConfig(kind="cispo", clip_low=1.0, clip_high=0.1), "cispo", "token", {"high": 1.1}),
        (
            LossConfig(kind="gspo", clip_low=0.02, clip_high=0.03, aggregation="sequence_mean"),
            "grpo",
            "sequence",
            {"low": 0.02, "high": 0.03},
        ),
    ],
    ids=["grpo", "dr_grpo", "dapo", "cispo", "gspo"],
)
@pytest.mark.parametrize(
    "mode",
    [
        "token_truncate",
        "sequence_mask",
        pytest.param("token_mask", marks=pytest.mark.harness),  # test_verl_importance_weights has the band
    ],
)
def test_trl_losses(loss, loss_type, level, options, mode):
    where, action = mode.split("_")
    fields = {"level": where, "mode": action, "threshold": 1.2}
    if mode == "token_mask":
        fields |= {"mode": "band", "threshold_low": 0.8}
        options = {**options, "clip_min": 0.8}
    value, _ = ours(loss, CorrectionConfig(**fields), 6, constant=100)
    assert value == pytest.approx(trl_loss(loss_type, level, mode, 6, **options), rel=1e-6)
