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


def supported():
    return with_supports(packed(sequences()), CONFIG.vocab_size, K)


def log_softmax(params, batch, temperature):
    """Returns the log-softmax [m, b, t, v] that each token was sampled from."""
    arrays = (batch.tokens, batch.segment_ids, batch.positions)
    tokens, segments, positions = (jnp.asarray(np.concatenate(each)) for each in arrays)
    hidden, _ = hidden_states(params, CONFIG, tokens, segment_ends(segments), positions)
    logits = jnp.einsum("btd,vd->btv", hidden, lm_head_table(params)) / temperature
    before = jnp.pad(logits[:, :-1], ((0, 0), (1, 0), (0, 0))).reshape(*batch.tokens.shape, -1)
    return cut_log_softmax(before, jnp.asarray(batch.top_ids))


@pytest.mark.harness  # policy/test_score.py has such scores and gradients, and test_exact_engine.py such a step
@pytest.mark.parametrize(("remat", "temperature"), [(False, 1.0), (True, 0.7)])
def test_a_cut_step_learns_the_cut_distribution(remat, temperature):
    """The row, log-probabilities and gradient equal those of logits that are masked outside the support."""
    batch, step = supported(), make_step(cut=True, remat=remat, temperature=temperature)

    def loss(params):
        logp = log_softmax(params, batch, temperature)
        picked = jnp.take_along_axis(logp, jnp.asarray(batch.tokens)[..., None], axis=-1)[..., 0]
        return -jnp.sum(jnp.where(batch.loss_mask, batch.advantages * picked, 0.0)) / np.sum(batch.loss_mask), logp

    grads, row, logprobs = run(step, batch)
    with jax.default_matmul_precision("highest"):
        params = init_params(CONFIG, 0)
        expected, logp = jax.jit(jax.grad(loss, has_aux=True))(params)
    check_close(grads, expected)
    mask = batch.response_mask
    picked = np.take_along_axis(np.asarray(logp), batch.tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(logprobs[mask], picked[mask], atol=2e-5)
    assert not logprobs[~mask].any()
    entropy = -np.sum(np.exp(logp) * logp, axis=-1)
    assert row["policy/entropy"] == pytest.approx(entropy[mask].mean(), rel=1e-5)
    # The forward alone has the same scores.
    alone, values = step.forward(jax.device_put(params), batch, num_sequences=COUNT, diagnosis=None)
    np.testing.assert_allclose(values.logprobs, logprobs, atol=2e-6, rtol=0)
    assert float(alone["policy/entropy"]) == pytest.approx(float(row["policy/entropy"]), rel=1e-6)


@pytest.mark.slow
def test_likeliest_tokens_that_nobody_needs_change_nothing():
    step, batch = make_step(cut=False, diagnosis=DiagnosisConfig()), packed(sequences())
    jax.tree.map(np.testing.assert_array_equal, run(step, supported()), run(step, batch))


def test_the_lowered_step_takes_the_likeliest_tokens():
    step = make_step(cut=True)
    (_, lowered, _), _ = step.lower(reported=K).args_info
    found, expected = (jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype)), x) for x in (lowered, supported()))
    assert found == expected
    with pytest.raises(ValueError, match="the batch must have the sampler's likeliest tokens"):
        step.lower()


@pytest.mark.parametrize("cut", [False, True])
def test_scores_have_what_was_asked_for(cut):
    given, params = supported()._replace(with_loss=None, used=None), init_params(CONFIG, 0)
    micro, make = jax.tree.map(lambda x: jnp.asarray(x)[0], given), make_step(cut=cut).score
    jax.tree.map(np.testing.assert_array_equal, with_all_rows(micro), micro)
    plain, every = jax.jit(lambda *both: (make()(*both), make(tops=True, collision=True)(*both)))(params, micro)
    assert (plain.tops is not None, plain.collision) == (cut, None)
    np.testing.assert_allclose(every.logprobs, plain.logprobs, atol=1e-6)
    mask = np.asarray(micro.response_mask)
    assert np.allclose(np.exp(every.tops).sum(-1)[mask], 1.0, atol=1e-5) == cut
    # A distribution over n tokens has at least 1 / n, if it is spread evenly.
    sizes = np.asarray(micro.top_ids >= 0).sum(-1)[mask] if cut else CONFIG.vocab_size
    assert np.all(np.asarray(every.collision)[mask] >= 1 / sizes - 1e-6)
