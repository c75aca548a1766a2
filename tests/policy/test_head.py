"""The vocabulary-chunked head against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.policy.head import token_logprobs, vocabulary_chunks


def reference(hidden, table, targets, temperature):
    logits = hidden.astype(np.float64) @ table.astype(np.float64).T / temperature
    logits -= logits.max(-1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(logp, targets[:, None], -1)[:, 0], -(np.exp(logp) * logp).sum(-1)


def example(scale=1.0):
    rng = np.random.default_rng(0)
    hidden = (rng.normal(size=(13, 24)) * scale).astype(np.float32)
    table = rng.normal(size=(60, 24)).astype(np.float32)
    return hidden, table, rng.integers(0, 60, 13).astype(np.int32)


@pytest.mark.parametrize("max_chunk", [60, 30, 12, 7])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_values_match_float64_for_every_chunking(max_chunk, temperature, scale):
    hidden, table, targets = example(scale)
    with jax.default_matmul_precision("highest"):
        logprobs, entropy = token_logprobs(
            jnp.asarray(hidden), jnp.asarray(table), jnp.asarray(targets), temperature=temperature, max_chunk=max_chunk
        )
    expected_logprobs, expected_entropy = reference(hidden, table, targets, temperature)
    # 1e-5 of the range: logits reach 60 at scale 3.
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5 * max(1, scale), rtol=1e-6)
    np.testing.assert_allclose(entropy, expected_entropy, atol=1e-5 * max(1, scale), rtol=1e-5)


@pytest.mark.parametrize("max_chunk", [60, 12])
def test_gradients_match_the_plain_form(max_chunk):
    hidden, table, targets = (jnp.asarray(x) for x in example())
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, 13)).astype(np.float32))

    def chunked(hidden, table):
        logprobs, entropy = token_logprobs(hidden, table, targets, temperature=0.8, max_chunk=max_chunk)
        return jnp.sum(weights[0] * logprobs + weights[1] * entropy)

    def plain(hidden, table):
        logp = jax.nn.log_softmax(hidden @ table.T / 0.8)
        entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
        return jnp.sum(weights[0] * jnp.take_along_axis(logp, targets[:, None], -1)[:, 0] + weights[1] * entropy)

    with jax.default_matmul_precision("highest"):
        ours = jax.grad(chunked, (0, 1))(hidden, table)
        expected = jax.grad(plain, (0, 1))(hidden, table)
    for g, e in zip(ours, expected, strict=True):
        np.testing.assert_allclose(g, e, atol=5e-6, rtol=1e-5)


def test_sixteen_bit_inputs_are_not_rounded_per_token():
    hidden, table, targets = example()
    low = [jnp.asarray(x).astype(jnp.bfloat16) for x in (hidden, table)]
    logprobs, _ = token_logprobs(*low, jnp.asarray(targets))
    expected, _ = reference(*(np.asarray(x, np.float64) for x in low), targets, 1.0)
    assert logprobs.dtype == jnp.float32
    np.testing.assert_allclose(logprobs, expected, atol=1e-5, rtol=0)


def test_chunks_divide_the_vocabulary():
    assert vocabulary_chunks(151_936) == 16
    assert vocabulary_chunks(16) == 1
    assert vocabulary_chunks(60, 7) == 10
    assert vocabulary_chunks(61, 7) == 1  # a prime: one chunk


def test_temperature_zero_is_refused():
    hidden, table, targets = (jnp.asarray(x) for x in example())
    with pytest.raises(ValueError, match=r"temperature must be positive to score tokens, got 0\.0"):
        token_logprobs(hidden, table, targets, temperature=0.0)
