"""Tests of injected mismatch: the change of each kind to weights or samples, and no mismatch at all for size 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engines import MESH, PROMPTS, assert_same_bits, exact_pass, in_order

from rljax.mismatch import mismatch_metrics
from rljax.policy.config import PolicyConfig
from rljax.policy.model import init_params, logical_axes
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.exact import ExactEngine
from rljax.rollout.injected import InjectedEngine, add_noise
from rljax.rollout.types import InjectConfig, SamplingParams
from rljax.trainer.exact import lay_out, micro_of
from rljax.trainer.packing import TrainSequence

pytestmark = pytest.mark.slow

CONFIG = PolicyConfig(24, 32, 64, 2, 4, 2, 8, tie_word_embeddings=True, initializer_range=0.2)
LOGICAL = logical_axes(CONFIG)


def largest_difference(a, b):
    return max(float(jnp.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


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
    """Noise of logits moves a log-probability by the token's own noise less the mean noise.

    That has about the standard deviation of the noise, and its mean size is 0.8 of the standard deviation.
    """
    none, small, large = (mismatch(exact, params, weight_noise=size) for size in (0.0, 1e-3, 3e-2))
    assert none["logprob_abs_diff_mean"] == none["logprob_abs_diff_max"] == none["k3_kl"] == none["kl"] == 0.0
    assert 0 < small["logprob_abs_diff_mean"] < 0.1 * large["logprob_abs_diff_mean"]
    assert 0 < small["k3_kl"] < 0.01 * large["k3_kl"]
    for size in (0.01, 0.3):
        assert 0.6 * size < mismatch(exact, params, logit_noise=size)["logprob_abs_diff_mean"] < size


def test_noise_of_logits_is_recorded_and_repeats_by_seed(exact, params):
    """The embedded engine records the noisy distribution. The exact engine's noise depends on seed and token."""
    inject = InjectConfig(logit_noise=0.3)
    engines = JaxEngine(CONFIG, "float32", 6, mesh=MESH, inject=inject), ExactEngine(exact, inject=inject)
    for engine in engines:
        engine.publish(params, 0)
    responses = sample(engines[0])
    plain = engines[0].score([PROMPTS[one.prompt_index] for one in responses], [one.response for one in responses])
    recorded = np.concatenate([one["rollout_logprobs"] for one in responses])
    assert 0.6 * 0.3 < np.abs(recorded - np.concatenate(plain)).mean() < 1.0 * 0.3
    first, again, other = ([r["rollout_logprobs"].tolist() for r in sample(engines[1], seed=s)] for s in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("is_exact", [True, False])
def test_greedy_sampling_has_no_logit_noise(is_exact, exact, params):
    found = []
    for noise in (InjectConfig(), InjectConfig(logit_noise=3.0)):
        embedded = JaxEngine(CONFIG, "float32", 6, mesh=MESH, inject=noise)
        engine = ExactEngine(exact, inject=noise) if is_exact else embedded
        engine.publish(params, 0)
        found.append(sample(engine, temperature=0.0))
    assert_same_bits(*found)


def test_coarser_weights_mismatch_more(exact, params):
    found = [{"dtype": "float16"}, {"dtype": "bfloat16"}, {"quantize": "int8"}, {"quantize": "fp8"}]
    means = [mismatch(exact, params, **inject)["logprob_abs_diff_mean"] for inject in found]
    assert means == sorted(means)
    assert means[0] > 0


def test_noise_has_the_relative_size_and_is_one_for_a_version(params):
    def noisy(size, seed, version):
        return add_noise(params, LOGICAL, np.float32(size), np.uint32(seed), np.uint32(version))

    # The second layer's weights are ten times as large. Each layer counts as a tensor of its own.
    gate = params["layers"]["mlp"]["gate"]
    params = {**params, "layers": {**params["layers"], "mlp": {**params["layers"]["mlp"], "gate": gate.at[1].mul(10)}}}
    found = noisy(0.05, 0, 4)
    wide, changed = params["layers"]["mlp"]["gate"], found["layers"]["mlp"]["gate"]
    for weight, noisy_weight in ((params["embed"], found["embed"]), (wide[0], changed[0]), (wide[1], changed[1])):
        spread = float(jnp.std(noisy_weight - weight) / jnp.sqrt(jnp.mean(weight**2)))
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
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


@pytest.mark.parametrize("kind", ["exact", "jax"])
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
