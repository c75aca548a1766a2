"""Tests of injected mismatch: none at all for size 0, the change of each kind, and weights and caches in 8 bits."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from small_engines import MESH, PROMPTS, assert_same_bits, counted_loops, exact_pass, in_order

from rljax.mismatch import mismatch_metrics
from rljax.policy.attention import attend
from rljax.policy.config import PolicyConfig
from rljax.policy.mixers import BlockState
from rljax.policy.model import cast_params, init_params, logical_axes
from rljax.rollout.build import make_engine
from rljax.rollout.decoding import cached
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.exact import ExactEngine
from rljax.rollout.injected import InjectedEngine, add_noise, quantize, restore, summed_axes, to_cache
from rljax.rollout.types import InjectConfig, RolloutConfig, SamplingParams
from rljax.trainer.exact import lay_out, micro_of
from rljax.trainer.packing import TrainSequence

pytestmark = pytest.mark.slow

CONFIG = PolicyConfig(24, 32, 64, 2, 4, 2, 8, tie_word_embeddings=True, initializer_range=0.2)
LOGICAL = logical_axes(CONFIG)
NOISY = InjectConfig(logit_noise=0.3)
MORE = (("int8", "float32"), ("int8", "bfloat16"), ("fp8", "float32"))


def largest_difference(a, b):
    return max(float(np.abs(np.subtract(*pair)).max()) for pair in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def engine_of(params, dtype="float32", width=6, **settings):
    engine = JaxEngine(CONFIG, dtype, width, mesh=MESH, **settings)
    engine.publish(params, 0)
    return engine


def sample(engine, *, seed=0, temperature=1.0):
    return in_order(engine.generate(PROMPTS, 2, SamplingParams(10, temperature), seed=seed))


@pytest.fixture(scope="module")
def exact():
    return exact_pass(CONFIG, 8, 10, rows=8, row_tokens=16)


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, 0)


def mismatch(exact, params, **inject):
    """Returns the metrics of the injected engine's samples against the executable that trains."""
    config = InjectConfig(**inject)
    engine = InjectedEngine(ExactEngine(exact, inject=config), config, CONFIG, MESH)
    engine.publish(params, 3)
    sequences = [TrainSequence(r.ids, r.prompt_length, r.columns) for r in sample(engine)]
    micro = micro_of(lay_out(sequences, 8, 16), 0)
    one = exact.scalar(1.0)
    trainer = np.asarray(exact(params, exact.place(micro), one, one, one).scores.logprobs)
    return mismatch_metrics(trainer, micro.rollout_logprobs, micro.response_mask)


def test_noise_is_a_dial_from_exactly_zero(exact, params):
    """Noise of logits moves a log-probability by its own noise less the mean noise, on average by 0.8 of its size."""
    none, small, large = (mismatch(exact, params, weight_noise=size) for size in (0.0, 1e-3, 3e-2))
    assert none["logprob_abs_diff_mean"] == none["logprob_abs_diff_max"] == none["k3_kl"] == none["kl"] == 0.0
    assert 0 < small["logprob_abs_diff_mean"] < 0.1 * large["logprob_abs_diff_mean"]
    assert 0 < small["k3_kl"] < 0.01 * large["k3_kl"]
    for size in (0.01, 0.3):
        assert 0.6 * size < mismatch(exact, params, logit_noise=size)["logprob_abs_diff_mean"] < size


def test_noise_of_logits_is_recorded_and_repeats_by_seed(exact, params):
    """The embedded engine records the noisy distribution. The exact engine's noise depends on seed and token."""
    embedded, exact = engine_of(params, inject=NOISY), ExactEngine(exact, inject=NOISY)
    responses = sample(embedded)
    plain = embedded.score([PROMPTS[one.prompt_index] for one in responses], [one.response for one in responses])
    recorded = np.concatenate([one["rollout_logprobs"] for one in responses])
    assert 0.6 * 0.3 < np.abs(recorded - np.concatenate(plain)).mean() < 1.0 * 0.3
    exact.publish(params, 0)
    first, again, other = ([r["rollout_logprobs"].tolist() for r in sample(exact, seed=seed)] for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("is_exact", [True, pytest.param(False, marks=pytest.mark.harness)])
def test_greedy_sampling_has_no_logit_noise(is_exact, exact, params):
    found = []
    for noise in (InjectConfig(), NOISY):
        engine = ExactEngine(exact, inject=noise) if is_exact else engine_of(params, inject=noise)
        engine.publish(params, 0)
        found.append(sample(engine, temperature=0.0))
    assert_same_bits(*found)


def test_noise_has_the_relative_size_and_is_one_for_a_version(params):
    @jax.jit
    def noisy(size, seed, version):
        return add_noise(params, LOGICAL, size, seed, version)

    # The second layer's weights are ten times as large. Each layer counts as a tensor of its own.
    gate = params["layers"]["mlp"]["gate"]
    params = {**params, "layers": {**params["layers"], "mlp": {**params["layers"]["mlp"], "gate": gate.at[1].mul(10)}}}
    found = noisy(0.05, 0, 4)
    wide, changed = params["layers"]["mlp"]["gate"], found["layers"]["mlp"]["gate"]
    for weight, noisy_weight in ((params["embed"], found["embed"]), (wide[0], changed[0]), (wide[1], changed[1])):
        spread = float(np.std(np.subtract(noisy_weight, weight)) / np.sqrt(np.mean(np.square(weight))))
        assert spread == pytest.approx(0.05, rel=0.1)
    assert largest_difference(noisy(0.05, 0, 4), found) == 0
    assert largest_difference(noisy(0.0, 0, 4), params) == 0
    for other in (noisy(0.05, 0, 5), noisy(0.05, 1, 4)):
        assert largest_difference(other, found) > 0.01
    up = found["layers"]["mlp"]["up"] - params["layers"]["mlp"]["up"]
    assert abs(np.corrcoef(np.ravel(up), np.ravel(changed - wide))[0, 1]) < 0.1


class Published:
    """A stand-in for an engine that only takes what is published."""

    def publish(self, params, policy_version):
        self.params, self.version = jax.tree.map(np.asarray, params), policy_version


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.harness)])
def test_another_dtype_rounds_the_weights_to_it(dtype, params):
    """The noise of stale weights follows their version."""
    end, stale, fresh = Published(), Published(), Published()
    InjectedEngine(end, InjectConfig(dtype=dtype), CONFIG, MESH).publish(params, 5)
    assert end.version == 5
    for found, weight in zip(jax.tree.leaves(end.params), jax.tree.leaves(params), strict=True):
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, np.asarray(weight).astype(jnp.dtype(dtype)).astype(np.float32))
    engine = InjectedEngine(stale, InjectConfig(staleness=1, weight_noise=0.1, dtype=dtype), CONFIG, MESH)
    for version in (6, 7):
        engine.publish(params, version)
    InjectedEngine(fresh, InjectConfig(weight_noise=0.1, dtype=dtype), CONFIG, MESH).publish(params, 6)
    assert stale.version == 6
    assert largest_difference(stale.params, fresh.params) == 0


@pytest.mark.parametrize("kind", ["exact", pytest.param("jax", marks=pytest.mark.harness)])
def test_stale_weights_are_of_the_version_they_are_said_to_be(kind, exact):
    """The trainer's next step takes over the buffers of the published weights."""
    inside, plain = (
        ExactEngine(exact) if kind == "exact" else JaxEngine(CONFIG, "float32", 6, mesh=MESH) for _ in range(2)
    )
    stale, versions = InjectedEngine(inside, InjectConfig(staleness=2), CONFIG, MESH), []
    for version in range(5):
        published = init_params(CONFIG, version)
        stale.publish(published, version)
        jax.tree.map(lambda leaf: leaf.delete(), published)
        found = sample(stale)
        versions += found[0].versions.tolist()
        plain.publish(init_params(CONFIG, versions[-1]), versions[-1])
        assert_same_bits(found, sample(plain))
    assert versions == [0, 0, 0, 1, 2]


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
def test_a_cache_stores_the_hand_worked_numbers():
    """A cache of the dtype of its numbers stores what it gets."""
    four = [1.0, 1.05, 1.0625, 1.1875, -19.0, 500.0, -1e9], [1.0, 1.0, 1.0, 1.25, -20.0, 448.0, -448]
    five = [1.0, 1.1, 1.125, 1.375, -19.0, 500.0, -1e9], [1.0, 1.0, 1.0, 1.5, -20.0, 512.0, -57344.0]
    for dtype, (x, expected) in ((jnp.float8_e4m3fn, four), (jnp.float8_e5m2, five)):
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
    engine = engine_of(params, width=16, kv_cache_dtype=kind)
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
