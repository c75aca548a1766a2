"""Every objective in the step: cuts change no gradient, one mini-batch is the fused step, references are frozen."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_step
from records import train_sequence
from tiny_step import COUNT, MESH, UNCORRECTED, batch_shape, check_close, forward_of
from tiny_step import packed as pack

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.mismatch import importance_weights, mismatch_metrics
from rljax.policy.config import PolicyConfig
from rljax.policy.head import TokenScores
from rljax.policy.model import init_params
from rljax.policy.score import make_scorer, packed_logprobs
from rljax.record.token_arrays import to_rows
from rljax.schedule import inject_learning_rate
from rljax.trainer.measure import DiagnosisConfig
from rljax.trainer.objective import Objective
from rljax.trainer.state import PrecisionConfig
from rljax.trainer.step import TrainStep
from rljax.trainer.update import MultipleUpdates, SingleUpdate, UpdateOptions, reference_logprobs

pytestmark = pytest.mark.slow

CONFIG = PolicyConfig(24, 32, 64, 1, 4, 2, 8, tie_word_embeddings=True, initializer_range=0.2)
LIMIT = 14
fresh_state = functools.partial(tiny_step.fresh_state, config=CONFIG)


@functools.cache
def on_policy_logprobs():
    """Returns the policy's own log-probabilities of the responses, so that ratios are near 1."""
    scored = make_scorer(CONFIG, jnp.float32)(init_params(CONFIG, 0), [s.ids for s in drawn()])
    return [values[len(s.prompt) :] for s, values in zip(drawn(), scored, strict=True)]


def as_rows(given):
    """Returns the policy's log-probabilities, the rollout's and the mask [n, r] of sequences from ``sequences``."""
    rollout, mask = [s["rollout_logprobs"] for s in given], [s.sampled for s in given]
    return [to_rows(each, 0.0) for each in (on_policy_logprobs(), rollout, mask)]


@functools.cache
def drawn():
    rng, result = np.random.default_rng(5), []
    for i in range(COUNT):
        text = [rng.integers(0, 24, n) for n in (rng.integers(1, 6), rng.integers(1, LIMIT))]
        result.append(train_sequence(*text, None, float(rng.normal()), i % 4 != 3))
    return result


def sequences(old_noise=None):
    """Returns sequences whose rollout log-probabilities have noise, and old ones, if asked for, of ``old_noise``."""
    rng, result = np.random.default_rng(6), []
    for s, own in zip(drawn(), on_policy_logprobs(), strict=True):
        rollout = (own + rng.normal(0, 0.3, len(own))).astype(np.float32)
        old = {} if old_noise is None else {"old_logprobs": own + rng.normal(0, old_noise, len(own))}
        result.append(s.add({"rollout_logprobs": rollout, **old}))
    return result


def make_step(loss, correction, row, rows, **options):
    shape = {"config": CONFIG, "row": row, "rows": rows, "limit": LIMIT}
    return tiny_step.make_step(loss=loss, correction=correction, **shape, **options)


def gradient(loss, correction, batch_sequences, row, rows):
    step = make_step(loss, correction, row, rows)
    state, metrics, _ = jax.device_get(step(fresh_state(), pack(batch_sequences, row, rows), 0.1, True, True))
    return state.opt_state.inner_state.trace, metrics


PPO, GSPO = LossConfig(), {"kind": "gspo", "clip_low": 0.05, "clip_high": 0.05}
IN_REGION = CorrectionConfig(level="token", threshold=1.2, reject_k3=0.06, region="moment", region_threshold=0.04)
OBJECTIVES = {
    "gspo, sequence mean, vexact in a region": (LossConfig(**GSPO, aggregation="sequence_mean"), IN_REGION, 0.1),
    "cispo, sequence sum, normalised sequence TIS": (
        LossConfig(kind="cispo", aggregation="sequence_sum"),
        CorrectionConfig(level="sequence", mode="truncate", threshold=2.0, normalize=True),
        0.2,
    ),
    "ppo, geometric rejection": (PPO, CorrectionConfig(reject_geometric_low=0.93, reject_geometric_high=1.07), None),
    "bypass": (LossConfig(kind="ppo_clip", old_logprobs="rollout"), UNCORRECTED, None),
}


@pytest.mark.harness  # integration/test_staleness_split.py has a run with it
@pytest.mark.parametrize("fields", [{"level": "token", "threshold": 1.2}, {"level": "sequence", "reject_k3": 0.06}])
@pytest.mark.parametrize("part", ["numerics", "drift"])
def test_a_correction_of_one_part_uses_its_two_logprobs(fields, part):
    """Tokens of the newest policy, and of a policy that is not kept, have no drift."""
    loss, rng, stale, same = LossConfig(kind="policy_gradient"), np.random.default_rng(7), [], []
    for i, s in enumerate(sequences(old_noise=0.2)):
        behaviour = (s["old_logprobs"] + rng.normal(0, 0.3, len(s.response))).astype(np.float32)
        behind = rng.integers(0, 3, len(s.response)).astype(np.int32)
        behaviour[behind == 2] = np.nan if i % 2 else behaviour[behind == 2]
        then = np.where((behind > 0) & np.isfinite(behaviour), behaviour, s["old_logprobs"])
        stale.append(s.add({"behaviour_logprobs": behaviour, "staleness": behind}))
        same.append(s.add({"old_logprobs" if part == "numerics" else "rollout_logprobs": then}))
    found, measured = gradient(loss, CorrectionConfig(**fields, part=part), stale, 240, 1)
    expected, wanted = gradient(loss, CorrectionConfig(**fields), same, 240, 1)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), found, expected)
    for name in ("weight_mean", "weight_max", "changed_fraction", "rejected_sequence_fraction"):
        assert measured[f"correction/{name}"] == pytest.approx(wanted[f"correction/{name}"], rel=1e-5)
    whole, _ = gradient(loss, CorrectionConfig(**fields), stale, 240, 1)
    assert not np.allclose(whole["embed"], found["embed"], rtol=1e-3)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.harness] * ("vexact" not in name)) for name in OBJECTIVES]
)
def test_no_cut_changes_the_gradient_of_any_objective(name):
    loss, correction, old_noise = OBJECTIVES[name]
    batch_sequences = sequences(old_noise)
    expected, whole = gradient(loss, correction, batch_sequences, 240, 1)
    found, cut = gradient(loss, correction, batch_sequences, 20, 2)
    check_close(found, expected)
    for key in ("policy/loss", "policy/clip_fraction", *(k for k in whole if k.startswith("correction/"))):
        assert cut[key] == pytest.approx(whole[key], rel=1e-5, abs=1e-7), key
    assert not correction.cuts_batch or 0 < whole["correction/outside_fraction"] < 1
    assert not correction.rejections or 0 < whole["correction/rejected_sequence_fraction"] < 1
    assert np.isnan(whole["optimizer/grad_noise"])
    assert cut["optimizer/grad_noise"] > 0


@pytest.mark.harness  # test_step_sharding.py has both in a step
def test_normalised_weights_leave_the_kl_penalty_as_it_is():
    """The gradient is the sum of the normalised policy loss's gradient and of a penalty's that no weight changes."""
    penalty = LossConfig(kl="k2", kl_coefficient=0.7)
    weights = CorrectionConfig(level="token", mode="truncate", threshold=1.2, normalize=True)
    rng, given = np.random.default_rng(7), sequences(0.1)
    given = [s.add({"reference_logprobs": s["old_logprobs"] + rng.normal(0, 0.5, len(s.response))}) for s in given]
    both, metrics = gradient(penalty, weights, given, 20, 2)
    policy, _ = gradient(PPO, weights, given, 20, 2)
    # Without advantages only the penalty is left.
    alone, pure = gradient(penalty, UNCORRECTED, [dataclasses.replace(s, advantage=0.0) for s in given], 20, 2)
    assert metrics["correction/weight_mean"] < 0.97
    for found, p, a in zip(*map(jax.tree.leaves, (both, policy, alone)), strict=True):
        assert np.abs(a).max() > 0.02 * np.abs(p).max()
        assert np.abs(found - (p + a)).max() / np.abs(found).max() < 2.4e-6
    assert metrics["policy/reference_kl"] == pytest.approx(pure["policy/reference_kl"], rel=4e-7)


def test_token_weights_multiply_the_gradient_of_each_token():
    """The corrected gradient is written out as equation 3, with each token's advantage times its masked ratio."""
    given, step = sequences(), measured_step()
    state, metrics, _ = jax.device_get(step(fresh_state(), pack(given), 0.1, True, True))
    trainer, rollout, mask = as_rows(given)
    mask &= np.array([[s.in_loss] for s in given])
    weights, _ = importance_weights(trainer, rollout, mask, level="token", mode="mask", threshold=2.0)
    assert weights.max() > 1.5
    of_tokens = np.float32(weights * mask * np.array([[s.advantage] for s in given]) / mask.sum())

    @jax.jit
    @jax.grad
    def corrected(params):
        return -jnp.sum(of_tokens * response_logprobs(params, given)[:, : mask.shape[1]])

    with jax.default_matmul_precision("highest"):
        expected = corrected(init_params(CONFIG, 0))
    check_close(state.opt_state.inner_state.trace, expected, 2e-5)
    assert metrics["correction/weight_max"] == pytest.approx(weights.max(), rel=1e-4)


def response_logprobs(params, batch_sequences):
    """Returns the log-probabilities [n, LIMIT] of responses, each sequence alone in a row. After its end they are 0."""
    places = np.zeros((len(batch_sequences), LIMIT), np.int32)
    for row, s in zip(places, batch_sequences, strict=True):
        row[: len(s.response)] = range(len(s.prompt), len(s.ids))
    found = packed_logprobs(params, CONFIG, *map(jnp.asarray, tiny_step.in_own_rows(batch_sequences))).logprobs
    return jnp.where(places > 0, jnp.take_along_axis(found, places, axis=1), 0.0)


@pytest.mark.harness  # test_step_math.py has a batch without tokens in the loss
def test_when_every_sequence_is_rejected_nothing_moves():
    tx = inject_learning_rate(lambda rate: optax.adamw(rate, weight_decay=0.5), 1.0)
    step = make_step(PPO, CorrectionConfig(veto=0.999), 20, 2, tx=tx)
    before = jax.device_get(fresh_state(tx))
    state, metrics, _ = jax.device_get(step(fresh_state(tx), pack(sequences()), 0.1, True))
    assert metrics["correction/rejected_sequence_fraction"] == 1.0
    jax.tree.map(np.testing.assert_array_equal, before.params, state.params)
    assert metrics["optimizer/skipped_updates"] == 1
    assert metrics["policy/loss"] == 0.0
    assert metrics["precision/overflows"] == 0


def train(update, state, given, rate, **options):
    """Packs and then updates, as the loop does."""
    return update(state, update.pack(given), given, UpdateOptions(rate, **options))


def make_forward():
    return forward_of(make_step(PPO, UNCORRECTED, 20, 2))


def measured_step():
    return make_step(PPO, CorrectionConfig(preset="token_mis"), 20, 2, diagnosis=DiagnosisConfig())


@pytest.mark.parametrize("mini_batches", [1, 4])
def test_one_mini_batch_with_loss_is_the_fused_step(mini_batches):
    forward, step = make_forward(), make_step(PPO, CorrectionConfig(preset="token_mis"), 20, 2)
    single = SingleUpdate(measured_step(), forward, pack)
    several = MultipleUpdates(step, forward, pack, pack, mini_batches=mini_batches, epochs=1, group_size=3)
    with_loss = COUNT // mini_batches
    given = [dataclasses.replace(s, in_loss=s.in_loss and i < with_loss) for i, s in enumerate(sequences())]
    a, b = (train(update, fresh_state(), given, 0.1, seed=0, noise=True) for update in (single, several))
    for x, y in zip(*(jax.tree.leaves(u.state.opt_state.inner_state.trace) for u in (a, b)), strict=True):
        # Sequences come in another order, and the old log-probabilities come from another graph.
        np.testing.assert_allclose(x, y, atol=2e-6 * float(jnp.abs(x).max()) + 1e-9, rtol=1e-4)
    assert a.row.keys() - b.row.keys() <= {"optimizer/grad_noise"}
    assert b.row["optimizer/skipped_updates"] == mini_batches - 1
    for key in a.row.keys() - {"optimizer/grad_noise", "optimizer/skipped_updates"}:
        assert b.row[key] == pytest.approx(a.row[key], rel=2e-4, abs=1e-6), key
    for x, y in zip(a.trainer().logprobs, b.trainer().logprobs, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)


def test_epochs_train_on_every_group_against_the_first_logprobs():
    tx, taken = inject_learning_rate(lambda rate: optax.sgd(rate), 1.0), []

    class Watched(TrainStep):
        def __call__(self, state, batch, *rest):
            taken.append(batch)
            state, metrics, values = super().__call__(state, batch, *rest)
            metrics |= {"precision/activation_max": jnp.float32(1e6 - len(taken))}
            return state, metrics | dict.fromkeys(("x", "x_max", "x_count"), jnp.float32(len(taken))), values

    precision, objective = PrecisionConfig("float32"), Objective(PPO, UNCORRECTED, 6, LIMIT)
    how = {"precision": precision, "objective": objective, "batch_shape": batch_shape(20, 1, 6), "diagnosis": None}
    step, pack_half = Watched(CONFIG, tx, MESH, **how), functools.partial(pack, row=20, rows=1, count=6)
    update = MultipleUpdates(step, make_forward(), pack, pack_half, mini_batches=2, epochs=2, group_size=3)
    given = sequences()
    updated = train(update, fresh_state(tx), given, 0.5, seed=3, noise=True)
    assert len(taken) == 4
    # The forward has measured sequences without loss. They are computed again only if they fill up a micro-batch.
    assert all(int(batch.used) == int(batch.with_loss) for batch in taken)
    assert any(batch.response_mask[batch.used :].any() for batch in taken)
    assert not any(batch.loss_mask[batch.used :].any() for batch in taken)
    for first in (0, 2):
        tokens = sorted(t for batch in taken[first : first + 2] for t in batch.tokens[batch.response_mask].tolist())
        assert tokens == sorted(t for s in given for t in s.response.tolist())
    old = np.sort(np.concatenate(on_policy_logprobs()))
    found = np.sort(np.concatenate([batch.old_logprobs[batch.response_mask] for batch in taken[2:]]))
    np.testing.assert_allclose(found, old, atol=2e-6, rtol=1e-5)
    # Only the very first mini-batch sees a ratio of 1.
    assert updated.row["policy/clip_fraction"] > 0
    assert updated.row["optimizer/skipped_updates"] == 0
    # The four updates gave 1 to 4: their mean, the largest, and the sum of an epoch.
    assert [updated.row[key] for key in ("x", "x_max", "x_count")] == [2.5, 4.0, 5.0]
    assert updated.row["precision/activation_max"] == 1e6 - 1
    assert step.compilations == 1
    expected = mismatch_metrics(*as_rows(given))
    assert updated.row["mismatch/k3_kl"] == pytest.approx(expected["k3_kl"], rel=1e-3)
    taken.clear()  # of two groups only one has tokens, so there is one mini-batch an epoch
    train(update, fresh_state(tx), given[:3], 0.5, seed=3, noise=True)
    assert len(taken) == 2
    assert step.compilations == 1
    again = train(update, fresh_state(tx), given, 0.5, seed=3, noise=True)
    jax.tree.map(np.testing.assert_array_equal, again.state.params, updated.state.params)


def test_a_kl_penalty_pulls_towards_the_frozen_reference():
    """At the reference the k2 penalty and its gradient are 0. Away from it the gradient is coef (lp - ref)."""
    silent = [dataclasses.replace(s, advantage=0.0) for s in sequences()]
    step, forward = make_step(LossConfig(kl="k2", kl_coefficient=0.7), UNCORRECTED, 20, 2), make_forward()

    def towards(reference):
        update = SingleUpdate(step, forward, pack, functools.partial(reference_logprobs, forward, reference))
        return train(update, fresh_state(), silent, 0.1, seed=0, noise=False)

    assert towards(init_params(CONFIG, 0)).row["optimizer/grad_norm"] < 1e-6
    reference = init_params(CONFIG, 1)
    updated = towards(reference)
    in_loss = [s for s in silent if s.in_loss]

    @jax.jit
    @jax.value_and_grad
    def penalty(params):
        gaps = response_logprobs(params, in_loss) - response_logprobs(reference, in_loss)
        return jnp.sum(0.5 * gaps**2) / sum(len(s.response) for s in in_loss)

    with jax.default_matmul_precision("highest"):
        value, expected = penalty(init_params(CONFIG, 0))
    assert updated.row["policy/reference_kl"] == pytest.approx(float(value), rel=1e-4)
    assert updated.row["policy/loss"] == pytest.approx(0.7 * float(value), rel=1e-4)
    check_close(updated.state.opt_state.inner_state.trace, jax.tree.map(lambda x: 0.7 * x, expected), 1e-4)


def test_a_sequence_sum_is_divided_by_the_length_limit():
    batch = pack(sequences(), 240, 1)
    micro = jax.tree.map(lambda array: array[0], batch._replace(with_loss=None, used=None))

    def loss(constant):
        chosen = LossConfig(kind="policy_gradient", aggregation="sequence_sum", sequence_constant=constant)
        objective = Objective(chosen, UNCORRECTED, COUNT, max_response_tokens=512)
        scores = TokenScores(-jnp.ones(micro.tokens.shape), jnp.zeros(micro.tokens.shape))
        return float(jax.jit(lambda: objective.micro_loss(scores, micro, jnp.float32(1.0))[0])())

    assert loss(100) != 0.0
    assert loss(0) == pytest.approx(loss(100) * 100 / 512, rel=1e-6)
