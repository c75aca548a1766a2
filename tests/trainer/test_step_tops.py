"""Tests of the training step on batches with the sampler's likeliest tokens, and on cut distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_step import CONFIG, COUNT, check_close, fresh_state, make_step, packed, sequences
from tree_batches import cut_log_softmax, with_supports

from rljax.policy.model import hidden_states, init_params, lm_head_table
from rljax.policy.score import segment_ends
from rljax.trainer.measure import DiagnosisConfig
from rljax.trainer.micro_batches import with_all_rows

K = 5


def run(step, batch):
    state, row, values = jax.device_get(step(fresh_state(), batch, 1e-2, True))
    return state.opt_state.inner_state.trace, row, values.logprobs


def log_softmax(params, batch, temperature):
    """Returns the log-softmax [m, b, t, v] that each token was sampled from."""
    tokens, segments, positions = (
        np.concatenate(getattr(batch, name)) for name in ("tokens", "segment_ids", "positions")
    )
    hidden, _ = hidden_states(params, CONFIG, jnp.asarray(tokens), segment_ends(segments), jnp.asarray(positions))
    logits = jnp.einsum("btd,vd->btv", hidden, lm_head_table(params)) / temperature
    before = jnp.pad(logits[:, :-1], ((0, 0), (1, 0), (0, 0))).reshape(*batch.tokens.shape, -1)
    return cut_log_softmax(before, jnp.asarray(batch.top_ids))


def first_micro(batch):
    return jax.tree.map(lambda x: jnp.asarray(x)[0], batch._replace(with_loss=None, used=None))


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "temperature"), [pytest.param(False, 1.0, marks=pytest.mark.harness), (True, 0.7)])
def test_a_cut_step_learns_the_cut_distribution(remat, temperature):
    """The row, log-probabilities and gradient equal those of logits that are masked outside the support."""
    batch = with_supports(packed(sequences()), CONFIG.vocab_size, K)

    def loss(params):
        logp = log_softmax(params, batch, temperature)
        picked = jnp.take_along_axis(logp, jnp.asarray(batch.tokens)[..., None], axis=-1)[..., 0]
        return -jnp.sum(jnp.where(batch.loss_mask, batch.advantages * picked, 0.0)) / np.sum(batch.loss_mask)

    grads, row, logprobs = run(make_step(cut=True, remat=remat, temperature=temperature), batch)
    with jax.default_matmul_precision("highest"):
        params = init_params(CONFIG, 0)
        expected = jax.jit(jax.grad(loss))(params)
        logp = jax.jit(lambda params: log_softmax(params, batch, temperature))(params)
    check_close(grads, expected)
    mask = batch.response_mask
    picked = np.take_along_axis(np.asarray(logp), batch.tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(logprobs[mask], picked[mask], atol=2e-5)
    assert not logprobs[~mask].any()
    entropy = -np.sum(np.exp(logp) * logp, axis=-1)
    assert row["policy/entropy"] == pytest.approx(entropy[mask].mean(), rel=1e-5)


@pytest.mark.slow
def test_the_forward_alone_scores_the_cut_distribution():
    batch, step = (
        with_supports(packed(sequences()), CONFIG.vocab_size, K),
        make_step(cut=True, remat=True, temperature=0.7),
    )
    params = jax.device_put(init_params(CONFIG, 0))
    row, values = step.forward(params, batch, num_sequences=COUNT, diagnosis=DiagnosisConfig())
    _, of_step, expected = run(step, batch)
    np.testing.assert_allclose(values.logprobs, expected, atol=2e-6, rtol=0)
    assert float(row["policy/entropy"]) == pytest.approx(float(of_step["policy/entropy"]), rel=1e-6)


@pytest.mark.slow
def test_likeliest_tokens_that_nobody_needs_change_nothing():
    step, batch = make_step(cut=False), packed(sequences())
    jax.tree.map(np.testing.assert_array_equal, run(step, with_supports(batch, CONFIG.vocab_size, K)), run(step, batch))


def test_a_cut_step_refuses_batches_without_supports():
    step = make_step(cut=True)
    with pytest.raises(ValueError, match="the batch must have the sampler's likeliest tokens"):
        step.lower()


def test_the_lowered_step_takes_the_likeliest_tokens():
    batch = with_supports(packed(sequences()), CONFIG.vocab_size, K)
    (_, lowered, _), _ = make_step(cut=True).lower(reported=K).args_info
    assert jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype)), lowered) == jax.tree.map(
        lambda x: (x.shape, np.dtype(x.dtype)), batch
    )


def test_all_rows_keep_their_likeliest_tokens():
    micro = first_micro(with_supports(packed(sequences()), CONFIG.vocab_size, K))
    found = with_all_rows(micro)
    for name, value in micro._asdict().items():
        np.testing.assert_array_equal(getattr(found, name), value, err_msg=name)
        assert value is None or getattr(found, name).dtype == value.dtype


@pytest.mark.parametrize("cut", [False, True])
def test_scores_have_what_was_asked_for(cut):
    micro, params = first_micro(with_supports(packed(sequences()), CONFIG.vocab_size, K)), init_params(CONFIG, 0)
    make = make_step(cut=cut).score
    plain, every = make()(params, micro), make(tops=True, collision=True)(params, micro)
    assert (plain.tops is not None, plain.collision) == (cut, None)
    np.testing.assert_allclose(every.logprobs, plain.logprobs, atol=1e-6)
    masses = np.exp(every.tops).sum(-1)[np.asarray(micro.response_mask)]
    assert np.allclose(masses, 1.0, atol=1e-5) == cut
    # A distribution over n tokens has at least 1 / n, if it is spread evenly.
    sizes = np.asarray(micro.top_ids >= 0).sum(-1)[np.asarray(micro.response_mask)] if cut else CONFIG.vocab_size
    assert np.all(np.asarray(every.collision)[np.asarray(micro.response_mask)] >= 1 / sizes - 1e-6)
