"""Tests of eight-bit weights and caches: the numbers are worked out by hand, and the engine samples from them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from small_engines import MESH, PROMPTS, assert_same_bits, counted_loops

from rljax.policy.attention import attend
from rljax.policy.config import PolicyConfig
from rljax.policy.mixers import BlockState
from rljax.policy.model import cast_params, init_params, logical_axes
from rljax.rollout.build import make_engine
from rljax.rollout.decoding import cached
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.injected import InjectedEngine, quantize, restore, summed_axes, to_cache
from rljax.rollout.types import InjectConfig, RolloutConfig, SamplingParams

pytestmark = pytest.mark.slow

CONFIG = PolicyConfig(24, 32, 64, 2, 4, 2, 8, tie_word_embeddings=True, initializer_range=0.2)
LOGICAL = logical_axes(CONFIG)


def engine_of(params, dtype, **settings):
    engine = JaxEngine(CONFIG, dtype, 6, mesh=MESH, **settings)
    engine.publish(params, 0)
    return engine


def sample(engine, *, seed=0):
    return list(engine.generate(PROMPTS, 2, SamplingParams(10, 1.0), seed=seed))


def test_which_axes_a_matrix_sums_over():
    layers, others = LOGICAL["layers"], (LOGICAL["embed"], LOGICAL["final_norm"]["scale"], ("layers", "embed"))
    attention, mlp = layers["attention"], layers["mlp"]
    inputs = [attention["query"], attention["key"], attention["value"], mlp["gate"], mlp["up"], mlp["down"]]
    assert {summed_axes(axes) for axes in inputs} == {(1,)}
    assert summed_axes(attention["output"]) == (1, 2)
    assert {summed_axes(axes) for axes in (*others, layers["mlp_norm"]["scale"])} == {()}


# The matrix has one layer, two inputs and two output channels. The channels' largest weights are 1.27 and 2.54 for
# int8, and 448 and 0.875 for fp8.
@pytest.mark.parametrize(
    ("kind", "weight", "expected"),
    [
        # The steps are 0.01 and 0.02: -0.504 becomes -0.50, and 0.031 (1.55 steps) becomes 0.04.
        ("int8", [[1.27, 0.031], [-0.504, -2.54]], [[1.27, 0.04], [-0.50, -2.54]]),
        # Three bits of mantissa: 19 becomes 20 (18 and 20 are as near; ties go to even). -0.875 is 448 steps, and 0.03
        # is 15.36 steps, which become 15.
        ("fp8", [[448.0, 0.03], [19.0, -0.875]], [[448.0, 15 * 0.875 / 448], [20.0, -0.875]]),
        ("int8", [[0.0, 1.27], [0.0, 0.0]], [[0.0, 1.27], [0.0, 0.0]]),  # a channel of zeros stays zero
    ],
)
def test_quantized_weights_are_the_hand_worked_ones(kind, weight, expected):
    params = {"matrix": jnp.asarray(weight, jnp.float32)[None], "norm": jnp.asarray([[0.123, 7.0]])}
    logical = {"matrix": ("layers", "embed", "mlp"), "norm": ("layers", "norm")}
    stored = quantize(params, logical, kind)
    assert stored["matrix"].values.dtype == {"int8": jnp.int8, "fp8": ml_dtypes.float8_e4m3fn}[kind]
    found = restore(stored)
    np.testing.assert_allclose(found["matrix"][0], expected, rtol=1e-6)
    np.testing.assert_array_equal(found["norm"], params["norm"])


# float8_e4m3fn has 3 bits of mantissa and ends at 448. float8_e5m2 has 2 bits and ends at 57344. Ties go to even.
@pytest.mark.parametrize(
    ("dtype", "x", "expected"),
    [
        (jnp.float8_e4m3fn, [1.0, 1.05, 1.0625, 1.1875, -19.0, 500.0, -1e9], [1.0, 1.0, 1.0, 1.25, -20.0, 448.0, -448]),
        (jnp.float8_e5m2, [1.0, 1.1, 1.125, 1.375, -19.0, 500.0, -1e9], [1.0, 1.0, 1.0, 1.5, -20.0, 512.0, -57344.0]),
    ],
)
def test_a_cache_stores_the_hand_worked_numbers(dtype, x, expected):
    """A cache of the dtype of its numbers stores what it gets."""
    for given in (jnp.float32, jnp.bfloat16):
        stored = to_cache(jnp.asarray(x, given), dtype)
        assert stored.dtype == dtype
        np.testing.assert_array_equal(np.asarray(stored, np.float32), expected)
    own = jnp.asarray([1.1, np.inf], jnp.bfloat16)
    assert to_cache(own, jnp.bfloat16) is own


def test_attention_reads_what_the_cache_stores():
    """Attention also reads the newest token's own keys and values rounded. Here numpy rounds them."""
    rng, dtype, room = np.random.default_rng(0), ml_dtypes.float8_e4m3fn, ((0, 0), (0, 2), (0, 0), (0, 0))
    q, k, v = (jnp.asarray(rng.normal(size=(2, 3, heads, 8)), jnp.bfloat16) for heads in (4, 2, 2))
    empty = jnp.zeros((1, 2, 5, 2, 8), dtype)
    mask = jnp.asarray(np.tril(np.ones((3, 5), bool))[None].repeat(2, 0))
    where = cached(CONFIG, jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3), bool), mask, 0)
    out, ((keys, values), _) = jax.jit(where.attend)(q, k, v, BlockState((empty, empty), jnp.int32(0)))
    assert keys.dtype == values.dtype == dtype
    rounded = [jnp.asarray(np.asarray(x).astype(np.float32).astype(dtype).astype(np.float32), q.dtype) for x in (k, v)]
    expected, plain = (attend(q, *(jnp.pad(x, room) for x in pair), mask) for pair in (rounded, (k, v)))
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), rtol=1e-2, atol=1e-3)
    off = [float(jnp.abs(x.astype(jnp.float32) - out.astype(jnp.float32)).mean()) for x in (expected, plain)]
    assert off[1] > 20 * off[0]


MORE = (("int8", "float32"), ("int8", "bfloat16"), ("fp8", "float32"))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("fp8", "bfloat16"), *(pytest.param(*form, marks=pytest.mark.harness) for form in MORE)]
)
def test_the_engine_samples_from_weights_in_eight_bits(kind, dtype):
    """The samples are those of an engine that gets the rounded numbers. Weights in the rollout dtype are rounded."""
    params = init_params(CONFIG, 0)
    rounded = restore(quantize(cast_params(params, dtype), LOGICAL, kind))
    inject = InjectConfig(dtype="same" if dtype == "float32" else dtype, quantize=kind)
    engine = make_engine(RolloutConfig(dtype=dtype, inject=inject), CONFIG, MESH, max_prompt_tokens=6, max_tokens=16)
    engine.publish(params, 0)
    found = sample(engine)
    assert_same_bits(found, sample(engine_of(rounded, dtype)))
    with pytest.raises(AssertionError):
        assert_same_bits(found, sample(engine_of(params, dtype)))


def test_eight_bits_repeat_and_compile_nothing_again(caplog):
    decoder = JaxEngine(CONFIG, "bfloat16", 6, mesh=MESH, kv_cache_dtype="fp8_e4m3")
    engine = InjectedEngine(decoder, InjectConfig(dtype="bfloat16", quantize="fp8"), CONFIG, MESH)
    engine.publish(init_params(CONFIG, 0), 0)
    first = sample(engine)
    with counted_loops(caplog) as loops:
        engine.publish(init_params(CONFIG, 1), 1)
        with pytest.raises(AssertionError):
            assert_same_bits(first, sample(engine))
        engine.publish(init_params(CONFIG, 0), 2)
        assert_same_bits(first, sample(engine))
        assert loops() == 0


def both_paths(params, kind):
    """Returns the log-probabilities of given responses of ten tokens, from decode and from prefill."""
    responses = [np.arange(i, i + 10, dtype=np.int32) for i in range(len(PROMPTS))]
    whole = [np.concatenate(pair) for pair in zip(PROMPTS, responses, strict=True)]
    engine = JaxEngine(CONFIG, "float32", 16, mesh=MESH, kv_cache_dtype=kind)
    engine.publish(params, 0)
    prefilled = engine.score_prefill(whole)
    assert [len(vector) for vector in prefilled] == [len(ids) - 1 for ids in whole]
    return np.concatenate(engine.score(PROMPTS, responses)), np.concatenate([vector[-10:] for vector in prefilled])


def test_prefill_and_decode_of_given_tokens_agree():
    """In float32 both paths have the same numbers. An 8-bit cache moves both alike, far more than they differ."""
    params = init_params(CONFIG, 0)
    decoded, prefilled = both_paths(params, "auto")
    np.testing.assert_allclose(prefilled, decoded, atol=3e-6, rtol=0)
    rounded_decoded, rounded = both_paths(params, "fp8_e5m2")
    np.testing.assert_allclose(rounded, rounded_decoded, atol=4e-6, rtol=0)
    assert np.abs(rounded - prefilled).mean() > 0.03
