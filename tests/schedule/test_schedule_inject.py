"""The injected rate is read and written through every wrapper, in one trace and one compilation.

The factor from the effective sample size scales it, with the same numbers in every form.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from rljax.schedule import (
    LengthTriggeredLR,
    SurgeConfig,
    effective_sample_share,
    get_learning_rate,
    inject_learning_rate,
    length_decay_schedule,
    length_triggered_schedule,
    sample_size_factor,
    scaled_by_sample_size,
    set_learning_rate,
)

PARAMS = {"w": np.linspace(-1, 1, 6).reshape(2, 3), "b": np.zeros(3)}
RATES = [1e-3, 5e-4, 5e-4, 1.25e-4, 1e-6, 0.0]


def params_of(dtype):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), PARAMS)


def injected(rate=1e-3):
    return inject_learning_rate(optax.adamw, rate)


def is_matrix(params):
    return jax.tree.map(lambda x: x.ndim == 2, params)


def names(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "vector", params)


WRAPPERS = {
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), injected()),
    "multi_transform": lambda: optax.multi_transform({"matrix": injected(), "vector": injected()}, names),
    "frozen": lambda: optax.multi_transform({"matrix": injected(), "vector": optax.set_to_zero()}, names),
    "nested": lambda: optax.inject_hyperparams(lambda max_norm: optax.chain(optax.clip(max_norm), injected()))(1.0),
    "apply_if_finite": lambda: optax.apply_if_finite(injected(), 3),
    "deep": lambda: optax.chain(optax.clip(1.0), optax.MultiSteps(optax.masked(injected(), is_matrix), 2)),
    "lion": lambda: inject_learning_rate(optax.lion, 1e-3),
    "adafactor": lambda: inject_learning_rate(lambda rate: optax.adafactor(rate, momentum=0.9), 1e-3),
    "muon": lambda: inject_learning_rate(optax.contrib.muon, 1e-3),
}


def counted(function):
    """Returns the jitted function, and a list that grows by one with each trace."""
    traces = []

    def body(*args, **kwargs):
        traces.append(None)
        return function(*args, **kwargs)

    return jax.jit(body), traces


def leaf_types(tree):
    return [(leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.harness)])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_whole_run_is_one_trace_and_one_compilation(wrapper, dtype):
    tx = WRAPPERS[wrapper]()
    params = params_of(dtype)
    state = jax.jit(tx.init)(params)
    types = leaf_types(state)

    def update(params, state):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        return optax.apply_updates(params, updates), state

    step, traces = counted(update)
    for rate in RATES:
        state = set_learning_rate(state, rate)
        read = get_learning_rate(state)
        assert (read.dtype, read.weak_type, read.shape) == (jnp.float32, False, ())
        assert read == np.float32(rate)
        params, state = step(params, state)
        assert get_learning_rate(state) == np.float32(rate)
        assert leaf_types(state) == types
    assert len(traces) == 1
    assert step._cache_size() == 1
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.harness)])
def test_updates_are_those_of_the_optimizer_itself_at_that_rate(dtype):
    params, grads = params_of(dtype), jax.tree.map(lambda x: jnp.asarray(x + 0.5, dtype), PARAMS)
    tx = injected(3e-4)
    updates, _ = tx.update(grads, set_learning_rate(tx.init(params), 7e-4), params)
    plain = optax.adamw(jnp.float32(7e-4))
    expected, _ = plain.update(grads, plain.init(params), params)
    jax.tree.map(lambda got, want: np.testing.assert_array_equal(got, want.astype(dtype)), updates, expected)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(updates))


def test_a_rate_is_float32_whatever_is_given():
    values = (1, 5e-4, np.float64(5e-4), np.asarray(5e-4), jnp.float32(5e-4), jnp.asarray(5e-4, jnp.bfloat16))
    params = params_of(jnp.bfloat16)
    for value in values:
        rate = set_learning_rate(injected().init(params_of(jnp.float32)), value).hyperparams["learning_rate"]
        assert (rate, rate.dtype, rate.weak_type) == (np.float32(value), jnp.float32, False)
    for rate in (*values, lambda count: 1e-3, length_decay_schedule(1e-3, 3)):
        tx = inject_learning_rate(optax.sgd, rate)
        state, rates = tx.init(params), []
        for _ in range(12):
            _, state = tx.update(params, state, params)
            value = state.hyperparams["learning_rate"]
            assert (value.dtype, value.weak_type) == (jnp.float32, False)
            rates.append(value)
    # The last one follows Algorithm 1.
    expected = [max(1e-3 * 0.5 ** (update // 3), 1e-4) for update in range(1, 13)]
    np.testing.assert_array_equal(rates, np.float32(expected))


def test_a_traced_rate_is_set_and_read_in_one_trace():
    """A rate of 16 bits is float32 after the step, too."""
    tx, params = optax.chain(optax.clip(1.0), injected()), params_of(jnp.float32)
    step, traces = counted(lambda state, rate: tx.update(params, set_learning_rate(state, rate), params)[1])
    state = tx.init(params)
    for rate in jnp.asarray(RATES, jnp.bfloat16):
        state = step(state, rate)
        read = jax.jit(get_learning_rate)(state)
        assert (read, read.dtype, read.weak_type) == (np.float32(rate), jnp.float32, False)
    assert len(traces) == 1


def test_the_other_leaves_are_the_same_objects():
    """The state of the optimizer may stand in other containers."""
    state = {"train": (3, optax.chain(optax.clip(1.0), injected()).init(params_of(jnp.float32))), "extra": [1.0, None]}
    changed = set_learning_rate(state, 1e-5)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(changed), strict=True)
    assert sum(before is not after for before, after in pairs) == 1
    assert (get_learning_rate(state), get_learning_rate(changed)) == (np.float32(1e-3), np.float32(1e-5))
    assert jax.tree.structure(state) == jax.tree.structure(changed)


def test_a_rate_outlives_a_donated_state():
    state = injected().init(params_of(jnp.float32))
    rate = get_learning_rate(state)
    jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)(state)
    assert float(rate) == np.float32(1e-3)


def test_every_rate_is_written_and_differing_ones_are_refused():
    tx = optax.multi_transform({"matrix": injected(1e-3), "vector": injected(1e-4)}, names)
    state = tx.init(params_of(jnp.float32))
    with pytest.raises(ValueError, match="differ"):
        get_learning_rate(state)
    state = set_learning_rate(state, 1e-5)
    rates = [inner.inner_state.hyperparams["learning_rate"] for inner in state.inner_states.values()]
    assert rates == [np.float32(1e-5)] * 2


def test_what_cannot_be_set_or_read_is_refused():
    """A schedule sets its own rate, an optimizer without an injected rate has none, and some values are no rates."""
    params = params_of(jnp.float32)
    for rate in (length_decay_schedule(1e-3, 10), length_triggered_schedule(1e-3)):
        state = optax.chain(optax.clip(1.0), injected(rate)).init(params)
        assert get_learning_rate(state) == np.float32(1e-3)
        with pytest.raises(ValueError, match=r"set by its schedule.*0\.0005"):
            set_learning_rate(state, 5e-4)
    state = optax.adamw(1e-3).init(params)
    with pytest.raises(ValueError, match="no injected learning rate"):
        set_learning_rate(state, 1e-3)
    with pytest.raises(ValueError, match="no injected learning rate"):
        get_learning_rate(state)
    for value in (-1e-3, np.nan, np.inf, np.ones(2), None):
        with pytest.raises(ValueError, match="finite, non-negative scalar"):
            set_learning_rate(injected().init(params), value)
        with pytest.raises(ValueError, match="finite, non-negative scalar"):
            inject_learning_rate(optax.adamw, value)


def test_the_in_graph_form_under_inject_and_multi_steps():
    """Under MultiSteps a group of mini-batches is a step, and the schedule observes the length of its last one."""
    config = SurgeConfig(window=12, warmup=6, smooth=3, persistence=1)
    make = optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)
    inner = make(learning_rate=length_triggered_schedule(1e-3, config=config, multiplier=1.0))
    tx = optax.MultiSteps(inner, 2)
    params = params_of(jnp.float32)
    step, traces = counted(lambda state, length: tx.update(params, state, params, response_length=length)[1])
    state = tx.init(params)
    for number in range(1, 12):
        # The length of this first mini-batch would cause a call at once if the schedule saw it.
        state = step(state, np.float32(1e6))
        assert get_learning_rate(state) == np.float32(1e-3)
        state = step(state, np.float32(100.0 if number < 10 else 400.0))
    surge = state.inner_opt_state.hyperparams_states["learning_rate"].surge
    assert (int(surge.step), int(surge.surge_step)) == (11, 11)
    assert get_learning_rate(state) == np.float32(5e-4)
    assert len(traces) == 1


def test_a_variable_of_nnx_is_written_in_place_in_one_trace():
    """A rate of 0 stops the model."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), injected()), wrt=nnx.Param)
    variable, traces = optimizer.opt_state[1].hyperparams["learning_rate"], []

    @nnx.jit
    def step(model, optimizer, x):
        traces.append(None)
        optimizer.update(model, nnx.grad(lambda model: jnp.square(model(x)).mean())(model))

    for rate in RATES:
        before = np.asarray(model.kernel[...])
        set_learning_rate(optimizer.opt_state, rate)
        step(model, optimizer, jnp.ones((4, 2)))
        assert optimizer.opt_state[1].hyperparams["learning_rate"] is variable
        assert get_learning_rate(optimizer.opt_state) == np.float32(rate)
        assert np.array_equal(model.kernel[...], before) == (rate == 0.0)
    assert len(traces) == 1


def test_a_refusal_leaves_every_variable_of_nnx_as_it_was():
    tx = optax.chain(injected(1e-3), injected(length_decay_schedule(1e-3, 5)))
    optimizer = nnx.Optimizer(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)
    with pytest.raises(ValueError, match="set by its schedule"):
        set_learning_rate(optimizer.opt_state, 1e-4)
    assert get_learning_rate(optimizer.opt_state) == np.float32(1e-3)


def test_the_factor_of_the_sample_size_by_hand():
    """Weights 1, 1, 1, 5: (1 + 1 + 1 + 5)^2 / (1 + 1 + 1 + 25) = 64 / 28, of 4 sequences."""
    share = effective_sample_share(np.log([1, 1, 1, 5]))
    assert share == pytest.approx(64 / 28 / 4)
    assert sample_size_factor(share) == pytest.approx(0.7559, abs=5e-5)
    assert sample_size_factor(share, 0.55) == 1.0
    assert sample_size_factor(0.25, 0.5) == pytest.approx(np.sqrt(0.5))
    for log_weight in (0.0, 5000.0, -5000.0):
        assert effective_sample_share([log_weight] * 7) == pytest.approx(1.0)
    assert effective_sample_share([5000.0, 0.0]) == pytest.approx(0.5)
    assert sample_size_factor(None) == 1.0  # no batch before
    assert sample_size_factor(float("nan")) == sample_size_factor(0.0) == 0.0


@pytest.mark.parametrize("base", [1.0, 0.55])
def test_the_factor_is_the_same_in_both_forms(base):
    """The compiled optimizer has the rates of the host: the schedule's own times the factor of the batch before."""
    draw = np.random.default_rng(0)
    lengths = np.concatenate([np.full(20, 10.0), np.full(40, 40.0)])
    shares = np.asarray([*draw.uniform(0, 1, 58), np.nan, 0.0], np.float32)
    host = LengthTriggeredLR(1e-3)
    schedule = scaled_by_sample_size(length_triggered_schedule(1e-3), base)
    tx = inject_learning_rate(optax.sgd, schedule)
    state, before = tx.init({"w": np.float32(0)}), None
    update = jax.jit(tx.update)
    for length, share in zip(lengths, shares, strict=True):
        how = {"response_length": length, "effective_sample_share": share}
        _, state = update({"w": np.float32(1)}, state, {"w": np.float32(0)}, **how)
        expected = host.step(length) * sample_size_factor(before, base)
        np.testing.assert_allclose(get_learning_rate(state), expected, rtol=1e-6)
        before = share
    assert host.surge_step is not None
    assert update._cache_size() == 1


def test_a_plain_schedule_is_scaled_too():
    tx = inject_learning_rate(optax.sgd, scaled_by_sample_size(optax.linear_schedule(1.0, 0.0, 4)))
    state, rates = tx.init({"w": np.float32(0)}), []
    for share in (0.25, 1.0, 0.25):
        _, state = tx.update({"w": np.float32(1)}, state, None, effective_sample_share=share)
        rates.append(float(get_learning_rate(state)))
    assert rates == pytest.approx([1.0, 0.5 * 0.75, 0.5])
