"""The vocabulary-chunked head is compared with float64."""

import itertools

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


# Any two of these values occur together in some form.
PAIRS = [
    *((max_chunk, *rest) for max_chunk in (60, 12) for rest in ((1.0, 0.1), (0.7, 3.0))),
    *((max_chunk, *rest) for max_chunk in (30, 7) for rest in ((0.7, 0.1), (1.0, 3.0))),
]
OTHERS = [form for form in itertools.product((60, 30, 12, 7), (1.0, 0.7), (0.1, 3.0)) if form not in PAIRS]


@pytest.mark.parametrize(
    ("max_chunk", "temperature", "scale"),
    [*PAIRS, *(pytest.param(*form, marks=pytest.mark.harness) for form in OTHERS)],
)
def test_values_match_float64_for_every_chunking(max_chunk, temperature, scale):
    hidden, table, targets = example(scale)
    with jax.default_matmul_precision("highest"):
        logprobs, entropy, *_ = token_logprobs(
            jnp.asarray(hidden), jnp.asarray(table), jnp.asarray(targets), temperature=temperature, max_chunk=max_chunk
        )
    expected_logprobs, expected_entropy = reference(hidden, table, targets, temperature)
    # The tolerance is 1e-5 of the range, because logits reach 60 at scale 3.
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5 * max(1, scale), rtol=1e-6)
    np.testing.assert_allclose(entropy, expected_entropy, atol=1e-5 * max(1, scale), rtol=1e-5)


@pytest.mark.parametrize(("max_chunk", "stored"), [(60, False), (12, False), (60, True), (12, True)])
def test_gradients_match_the_plain_form(max_chunk, stored):
    hidden, table, targets = (jnp.asarray(x) for x in example())
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, 13)).astype(np.float32))

    def chunked(hidden, table):
        how = {"max_chunk": max_chunk, "stored": stored}
        logprobs, entropy, *_ = token_logprobs(hidden, table, targets, temperature=0.8, **how)
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
    logprobs = token_logprobs(*low, jnp.asarray(targets)).logprobs
    expected, _ = reference(*(np.asarray(x, np.float64) for x in low), targets, 1.0)
    assert logprobs.dtype == jnp.float32
    np.testing.assert_allclose(logprobs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("dtype", "lost"), [("bfloat16", 2.0**-9), ("float16", 2.0**-12)])
def test_a_float32_head_multiplies_the_published_values(dtype, lost):
    """16 bits hold 1 but not 1 + lost. With the state 4 the logits are 4 and 0, so log p is -log(1 + exp(-4))."""

    def logprob(master):
        hidden, table = jnp.full((1, 1), 4.0 + 2 * lost).astype(dtype), master.astype(dtype)
        return token_logprobs(hidden, table, jnp.zeros(1, int), dtype=jnp.float32)[0][0]

    master = jnp.asarray([[1.0 + lost], [0.0]])
    assert float(jax.jit(logprob)(master)) == pytest.approx(-np.log1p(np.exp(-4.0)), abs=2e-7)
    assert abs(np.log1p(np.exp(-4.0)) - np.log1p(np.exp(-4.0 * (1.0 + lost)))) > 1e-5
    # XLA for CPUs keeps a pair of casts. For other devices only this operation keeps the rounding.
    assert jax.jit(logprob).lower(master).as_text().count("reduce_precision") == 2


@pytest.mark.parametrize("max_chunk", [60, 12])
def test_gradients_of_a_float32_head_are_rounded_once(max_chunk):
    """The gradients have the dtype of the inputs. They are the exact gradients at these inputs, rounded once."""
    hidden, table, targets = example()
    low = [jnp.asarray(x).astype(jnp.bfloat16) for x in (hidden, table)]

    def summed(hidden, table, dtype):
        logprobs, entropy, *_ = token_logprobs(
            hidden, table, jnp.asarray(targets), temperature=0.8, dtype=dtype, max_chunk=max_chunk
        )
        return jnp.sum(logprobs) + 0.5 * jnp.sum(entropy)

    exact = jax.grad(summed, (0, 1))(*(x.astype(jnp.float32) for x in low), None)
    worst = {}
    for name, dtype in (("float32", jnp.float32), ("compute", None)):
        found = jax.grad(summed, (0, 1))(*low, dtype)
        assert all(g.dtype == jnp.bfloat16 for g in found)
        worst[name] = max(float(jnp.abs(g - e).max()) for g, e in zip(found, exact, strict=True))
        if name == "float32":
            for g, e in zip(found, exact, strict=True):
                np.testing.assert_allclose(g.astype(jnp.float32), e, rtol=2.0**-8, atol=1e-6)
    assert worst["float32"] < worst["compute"]


def test_chunks_divide_the_vocabulary():
    assert vocabulary_chunks(151_936) == 16
    assert vocabulary_chunks(16) == 1
    assert vocabulary_chunks(60, 7) == 10
    assert vocabulary_chunks(61, 7) == 1  # a prime has one chunk


def test_temperature_zero_is_refused():
    hidden, table, targets = (jnp.asarray(x) for x in example())
    with pytest.raises(ValueError, match=r"temperature must be positive to score tokens, got 0\.0"):
        token_logprobs(hidden, table, targets, temperature=0.0)


@pytest.mark.parametrize(
    ("tokens", "max_chunk", "stored", "products"),
    [(5, 60, True, 3), (5, 12, True, 3), (5, 12, False, 4), (2**27 // 60 + 1, 12, True, 4)],
    ids=["one chunk", "five chunks", "not stored", "too many"],
)
def test_few_stored_logits_are_computed_once(tokens, max_chunk, stored, products):
    """The products are the logits, the gradients of both operands, and the logits in the backward pass."""

    def loss(hidden, table, targets):
        return jnp.sum(token_logprobs(hidden, table, targets, max_chunk=max_chunk, stored=stored).logprobs)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((tokens, 8), (60, 8))]
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    assert str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*shapes, targets)).count("dot_general[") == products


@pytest.mark.parametrize("max_chunk", [60, 12])
def test_stored_logits_change_no_gradient(max_chunk):
    hidden, table, targets = (jnp.asarray(x) for x in example())

    def gradient(stored):
        def loss(hidden, table):
            scores = token_logprobs(hidden, table, targets, max_chunk=max_chunk, stored=stored)
            return jnp.sum(scores.logprobs + 0.5 * scores.entropy)

        return jax.grad(loss, (0, 1))(hidden, table)

    for ours, expected in zip(gradient(True), gradient(False), strict=True):
        np.testing.assert_array_equal(ours, expected)
