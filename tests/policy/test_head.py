"""The head in chunks: log-probabilities of targets and of given ids, entropies and sums of squared probabilities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.policy.head import token_logprobs, vocabulary_chunks

N, V, D, K = 13, 60, 24, 7


def example(dtype=jnp.float32, scale=1.0):
    """Returns inputs with ids twice in a row, ids that are targets, and places without an id."""
    rng = np.random.default_rng(0)
    hidden, table = (jnp.asarray(rng.normal(size=(n, D)) * size, dtype) for n, size in ((N, scale), (V, 1.0)))
    ids = rng.integers(0, V, (N, K)).astype(np.int32)
    ids[:, 1] = ids[:, 0]
    ids[3:, -1] = -1
    ids[5] = -1
    targets = rng.integers(0, V, N).astype(np.int32)
    ids[0, 2] = targets[0]
    return hidden, table, jnp.asarray(targets), jnp.asarray(ids)


def summed(head, hidden, table, targets, ids):
    """Returns a weighted sum of all values with a gradient. Places without an id are left out."""
    rng, (logprobs, entropy, tops, *_) = np.random.default_rng(1), head(hidden, table, targets, ids)
    values = (logprobs, entropy, jnp.where(ids >= 0, tops, 0.0))
    return sum(jnp.sum(jnp.asarray(rng.normal(size=x.shape), jnp.float32) * x) for x in values)


def gradients(head):
    return jax.jit(jax.grad(functools.partial(summed, head), (0, 1)))


def plain(hidden, table, targets, ids, temperature=1.0):
    logp = jax.nn.log_softmax(hidden @ table.T / temperature)
    picked = jnp.take_along_axis(logp, targets[:, None], axis=-1)[:, 0]
    tops = jnp.take_along_axis(logp, jnp.maximum(ids, 0), axis=-1)
    p = jnp.exp(logp)
    return picked, -jnp.sum(p * logp, -1), jnp.where(ids >= 0, tops, -jnp.inf), jnp.sum(p**2, -1)


@pytest.mark.parametrize(
    ("max_chunk", "temperature", "scale", "stored"),
    [(60, 0.7, 3.0, False), (60, 1.0, 0.1, True), (12, 1.0, 1.0, True), (12, 0.7, 0.1, False), (7, 0.7, 3.0, False)],
)
def test_values_and_gradients_match_the_plain_form(max_chunk, temperature, scale, stored):
    arrays = example(scale=scale)
    how = {"temperature": temperature, "max_chunk": max_chunk, "collision": True, "stored": stored}
    head, reference = functools.partial(token_logprobs, **how), functools.partial(plain, temperature=temperature)
    size = max(1, scale)  # logits reach 60 at scale 3
    with jax.default_matmul_precision("highest"):
        for found, expected in zip(jax.jit(head)(*arrays)[:4], reference(*arrays), strict=True):
            assert found.dtype == jnp.float32
            np.testing.assert_allclose(found, expected, atol=1e-5 * size, rtol=1e-5)
        ours, theirs = (gradients(way)(*arrays) for way in (head, reference))
    for found, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5 * size**2, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "error"), [(None, 1e-2), (jnp.float32, 2.0**-8)])
def test_a_sixteen_bit_head_is_near_the_exact_one(dtype, error):
    """Log-probabilities are not rounded to 16 bits. Gradients of a float32 head are rounded once."""
    arrays = example(jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in arrays[:2]]
    head = functools.partial(token_logprobs, dtype=dtype, max_chunk=12)
    with jax.default_matmul_precision("highest"):
        values, of_plain = plain(*wide, *arrays[2:]), gradients(plain)(*wide, *arrays[2:])
    for found, expected in zip(jax.jit(head)(*arrays)[:3], values, strict=False):
        np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-5)
    for found, wanted in zip(gradients(head)(*arrays), of_plain, strict=True):
        assert found.dtype == jnp.bfloat16
        apart = jnp.linalg.norm(found.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)
        assert 0 < float(apart) < error


def test_a_missing_id_never_gives_nan():
    hidden, table, targets, ids = example()
    nowhere = jnp.full_like(ids, -1).at[0].set(V)  # or an id past the vocabulary
    assert np.array_equal(jax.jit(token_logprobs)(hidden, table, targets, nowhere).tops, np.full((N, K), -np.inf))

    @jax.jit
    def pulled(cotangent):
        _, pull = jax.vjp(lambda *two: token_logprobs(*two, targets, nowhere, max_chunk=12).tops, hidden, table)
        return pull(jnp.full((N, K), cotangent))

    for cotangent in (0.0, 1.0, jnp.nan):
        assert not any(jnp.any(part) for part in pulled(cotangent))
    # In the loss, places without an id have probability 0, and terms p log p of 0.
    for value in (jnp.exp, lambda x: jnp.where(x > -jnp.inf, jnp.exp(x) * x, 0.0)):
        grads = jax.jit(jax.grad(lambda *two: jnp.sum(value(token_logprobs(*two, targets, ids).tops)), (0, 1)))  # noqa: B023
        assert all(np.isfinite(part).all() for part in grads(hidden, table))


def test_sums_of_squares_survive_logits_far_apart():
    """Each chunk raises the running maximum by 100, and the last chunk decides. They have no gradient."""
    table, zero = jnp.asarray([[0.0], [0.0], [100.0], [100.0], [200.0], [200.0]]), jnp.zeros(1, int)
    score = jax.jit(functools.partial(token_logprobs, max_chunk=2, collision=True))
    scores = score(jnp.ones((1, 1)), table, zero, jnp.asarray([[5]]))
    assert scores.collision == pytest.approx(0.5, abs=1e-6)
    assert float(scores.tops[0, 0]) == pytest.approx(np.log(0.5), abs=1e-5)
    hidden, table, targets, _ = example()
    grads = jax.grad(lambda *two: jnp.sum(token_logprobs(*two, targets, collision=True).collision), (0, 1))
    assert not any(jnp.any(part) for part in jax.jit(grads)(hidden, table))


def test_nothing_else_is_computed_unless_asked():
    hidden, table, targets, ids = example()
    with pytest.raises(ValueError, match=r"temperature must be positive to score tokens, got 0\.0"):
        token_logprobs(hidden, table, targets, temperature=0.0)
    assert not any(x is not None for x in token_logprobs(hidden, table, targets)[2:])
    assert token_logprobs(hidden, table, targets, ids).collision is None

    for more in ((), (ids,)):
        grad = jax.grad(lambda h, more=more: jnp.sum(token_logprobs(h, table, targets, *more)[0]))
        assert ("scatter" in str(jax.make_jaxpr(grad)(hidden))) == bool(more)


def test_no_pass_keeps_all_logits():
    """Values of the size [n, v] are neither saved for the backward pass nor made in it."""
    loss = functools.partial(summed, functools.partial(token_logprobs, max_chunk=12, collision=True))
    text = str(jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(*example()))
    assert f"f32[{N},12]" in text
    assert not any(shape in text for shape in (f"[{N},{V}]", f"[{V // 12},{N},"))


@pytest.mark.parametrize(("dtype", "lost"), [("bfloat16", 2.0**-9), ("float16", 2.0**-12)])
def test_a_float32_head_multiplies_the_published_values(dtype, lost):
    """16 bits hold 1 but not 1 + lost. With the state 4 the logits are 4 and 0, so log p is -log(1 + exp(-4))."""

    def logprob(master):
        hidden, table = jnp.full((1, 1), 4.0 + 2 * lost).astype(dtype), master.astype(dtype)
        return token_logprobs(hidden, table, jnp.zeros(1, int), dtype=jnp.float32)[0][0]

    master = jnp.asarray([[1.0 + lost], [0.0]])
    assert float(jax.jit(logprob)(master)) == pytest.approx(-np.log1p(np.exp(-4.0)), abs=2e-7)  # else 1e-5 away
    # XLA for CPUs keeps a pair of casts. For other devices only this operation keeps the rounding.
    assert jax.jit(logprob).lower(master).as_text().count("reduce_precision") == 2


def test_chunks_divide_the_vocabulary():
    sizes = [(151_936,), (16,), (60, 7), (61, 7)]  # a prime has one chunk
    assert [vocabulary_chunks(*each) for each in sizes] == [16, 1, 10, 1]


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
