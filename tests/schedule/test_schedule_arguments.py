"""Wrong arguments of the schedule's API are refused with the value that came and what was expected."""

import functools
import json
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

from rljax.schedule import (
    LengthTriggeredLR,
    SurgeConfig,
    SurgeTracker,
    decay_period_from_surge,
    effective_sample_share,
    get_learning_rate,
    inject_learning_rate,
    length_decay_schedule,
    length_triggered_schedule,
    sample_size_factor,
    scaled_by_sample_size,
    set_learning_rate,
)
from rljax.schedule.torch import LengthTriggeredCallback, LengthTriggeredScheduler

QUICK = SurgeConfig(window=12, warmup=6, smooth=3, persistence=1)


def scheduler_of(groups=1, **options):
    parameters = [{"params": [torch.nn.Parameter(torch.zeros(2))]} for _ in range(groups)]
    return LengthTriggeredScheduler(torch.optim.SGD(parameters, lr=1e-3), **options)


def in_graph(schedule=None, **arguments):
    tx = inject_learning_rate(optax.sgd, schedule or length_triggered_schedule(1e-3, config=QUICK))
    tx.update({"w": 1.0}, tx.init({"w": 1.0}), **arguments)


WRONG_TYPES = [
    (lambda: LengthTriggeredLR("1e-6"), "init_value must be a scalar, got init_value = '1e-6', a str"),
    (lambda: LengthTriggeredLR(True), "init_value must be a scalar, got init_value = True, a bool"),
    (lambda: LengthTriggeredLR(1e-6, multiplier=None), "multiplier must be a scalar, got multiplier = None"),
    (lambda: LengthTriggeredCallback(tracker=SurgeConfig()), "must be a SurgeTracker, got tracker = SurgeConfig"),
    (lambda: scheduler_of(tracker=SurgeTracker), "must be a SurgeTracker, got tracker = <class"),
    (lambda: SurgeTracker({"window": 60}), "must be a SurgeConfig, got config = {'window': 60}"),
    (lambda: length_triggered_schedule(1e-6, config=SurgeTracker()), "must be a SurgeConfig, got config = Surge"),
    (lambda: length_decay_schedule(1e-6, 12.5), "must be a whole number, got decay_period = 12.5"),
    (lambda: decay_period_from_surge(12.5), "must be a whole number, got surge_step = 12.5"),
    (lambda: SurgeConfig(window=60.0), "window must be a whole number, got window = 60.0"),
    (lambda: SurgeConfig(ratio="3"), "ratio must be a scalar, got ratio = '3'"),
    (lambda: SurgeConfig(max_truncated=False), "max_truncated must be a scalar, got max_truncated = False"),
]
REFUSED = [
    (lambda: length_decay_schedule(1e-6, 0), "decay_period = 0"),
    (lambda: decay_period_from_surge(0), "surge_step = 0"),
    (lambda: LengthTriggeredCallback(updates_per_batch=0), "must be at least 1, got updates_per_batch = 0"),
    (lambda: effective_sample_share([]), "log_weights must be finite numbers"),
    (lambda: effective_sample_share([0.0, np.inf]), "log_weights must be finite numbers"),
    (lambda: sample_size_factor(1.5), r"share must be in \[0, 1\]"),
    (lambda: sample_size_factor(0.5, 0.0), r"base must be in \(0, 1\]"),
    (lambda: scaled_by_sample_size(1e-3, 2.0), r"base must be in \(0, 1\]"),
    (lambda: in_graph(scaled_by_sample_size(1e-3)), "needs effective_sample_share="),
    (lambda: in_graph(scaled_by_sample_size(1e-3), effective_sample_share=1.7), "effective_sample_share must be in"),
    (lambda: in_graph(scaled_by_sample_size(1e-3), effective_sample_share=jnp.ones(1)), "share: scalars are expected"),
    (lambda: length_triggered_schedule(1e-3).update(5, response_length=100.0), "is no function of the count"),
    (lambda: in_graph(), "needs response_length="),
    (lambda: in_graph(truncated_fraction=0.1), "needs response_length="),
    (lambda: in_graph(response_length=jnp.ones(3)), "length: scalars are expected"),
    (lambda: inject_learning_rate(optax.adamw(1e-3), 1e-3), "make_optimizer must be a function .* got .*Transform"),
    (lambda: inject_learning_rate(optax.adamw, LengthTriggeredLR(1e-3)), "got LengthTriggeredLR.* set_learning_rate"),
    (lambda: inject_learning_rate(optax.adamw, "1e-3"), "learning rate must be a finite, non-negative scalar, got '1"),
    (lambda: set_learning_rate(inject_learning_rate(optax.sgd, 1.0).init(0.0), True), "non-negative scalar, got True"),
]


@pytest.mark.parametrize(("make", "message"), WRONG_TYPES + REFUSED)
def test_a_wrong_argument_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert isinstance(caught.value, TypeError) == ((make, message) in WRONG_TYPES)


OF_THE_LAW = [
    *(("init_value", value) for value in (0.0, -1e-6, math.inf)),
    *(("decay_factor", value) for value in (0.0, 1.0, math.nan)),
    *(("floor_ratio", value) for value in (-0.1, 1.1)),
    *(("multiplier", value) for value in (0.99, math.inf)),
]
OF_A_RULE = [
    *(("ratio", value) for value in (1.0, math.nan)),
    *(("smooth", value) for value in (4, -1)),
    *(("persistence", value) for value in (0, 41)),
    *(("held_ratio", value) for value in (0.0, 3.1)),
    *(("capped_ratio", value) for value in (1.0, math.nan)),
    *(("max_wait", value) for value in (0, 2**31)),
    *(("baseline_quantile", 1.5), ("warmup", 5), ("window", 9), ("max_truncated", 1.5)),
]


@pytest.mark.parametrize(("name", "value"), OF_THE_LAW + OF_A_RULE)
def test_what_is_out_of_range_is_refused_with_its_value(name, value):
    makers, given = [LengthTriggeredLR, length_triggered_schedule], {"init_value": 1e-6, name: value}
    if (name, value) in OF_A_RULE:
        makers, given = [SurgeConfig], {name: value}
    elif name != "multiplier":
        makers.append(functools.partial(length_decay_schedule, decay_period=100))
    for make in makers:
        with pytest.raises(ValueError, match=f"{name} = {value}"):
            make(**given)


@pytest.mark.parametrize("form", ["tracker", "controller", "torch", "graph"])
def test_a_length_that_is_no_number_is_refused(form):
    observe = {
        "tracker": SurgeTracker().update,
        "controller": LengthTriggeredLR(1e-6).step,
        "torch": scheduler_of().observe,
        "graph": lambda value: in_graph(response_length=value),
    }[form]
    for length in ("100", True, np.True_, jnp.bool_(1), b"100", None, [100.0], 1j):
        with pytest.raises(ValueError, match="length"):
            observe(length)


@pytest.mark.parametrize("share", [2.0, -0.1, np.float32(1.5), math.inf, True, "0.5"])
def test_a_share_outside_of_0_to_1_is_refused(share):
    with pytest.raises(ValueError, match=r"truncated_fraction must be .* got truncated_fraction = "):
        LengthTriggeredLR(1e-6).step(100.0, share)
    with pytest.raises(ValueError, match=r"truncated_fraction must be .* got truncated_fraction = "):
        in_graph(response_length=100.0, truncated_fraction=share)


def test_numbers_of_numpy_torch_and_jax_are_numbers():
    config = SurgeConfig(window=np.int64(40), ratio=np.float32(2.5), max_wait=np.int32(300))
    assert (type(config.window), type(config.ratio), config.max_wait) == (int, float, 300)
    assert SurgeTracker(config).update(100.0) is False
    rate = np.array(1e-6)
    controller = LengthTriggeredLR(rate, multiplier=np.float32(1.5), decay_factor=np.array(0.5))
    rate[...] = 5.0
    assert json.dumps(controller.step(100.0)) == "1e-06"
    assert controller.rate_from(np.array(2e-6)) == 2e-6
    for share in (None, math.nan, 0, 1, np.float32(1.0), 1.0 + 1e-7, torch.tensor(0.5)):  # unknown, or rounded
        assert LengthTriggeredLR(1e-6).step(torch.tensor(100.0), share) == 1e-6
    for scalar in (np.float64(0.75), np.float32(0.75), np.asarray(0.75), jnp.float32(0.75), 1):
        tracker = SurgeTracker()
        tracker.update(scalar, scalar)
        assert tracker.held_out == 1


def called():
    """A controller after its call at step 8: the third long length makes the median of three long."""
    controller = LengthTriggeredLR(1e-3, tracker=SurgeTracker(QUICK), multiplier=1.0)
    for length in [100.0] * 6 + [400.0] * 2:
        controller.step(length)
    return controller


def test_an_object_shows_its_state():
    assert repr(called()) == "LengthTriggeredLR(0.001, learning_rate=0.0005, step=8, decay_period=8)"
    assert repr(called().tracker) == "SurgeTracker(step=8, surge_step=8, ignored=0, held_out=0)"
    assert repr(length_triggered_schedule(1e-3)) == "LengthTriggeredSchedule(0.001, multiplier=1.8, floor=0.0001)"


BAD_STATES = [
    ({"decay_period": 0}, "decay_period must be at least 1, got decay_period = 0"),
    ({"decay_period": 2.5}, "decay_period must be a whole number, got decay_period = 2.5"),
    ({"decay_period": None}, "decay_period must be a period"),
    ({"tracker": None}, "dictionary .* got None"),
    ({"other": 3}, "the state must have the keys .* got .*other"),
    ({"step": -1}, "step must be at least 0, got step = -1"),
    ({"step": "8"}, "step must be a whole number, got step = '8'"),
    ({"surge_step": 9}, "surge_step must be at most step = 8, got surge_step = 9"),
    ({"surge_step": True}, "surge_step must be a whole number, got surge_step = True"),
    ({"crossing_since": 0}, "crossing_since must be at least 1, got crossing_since = 0"),
    ({"ignored": 9}, "ignored must be at most step = 8, got ignored = 9"),
    ({"lengths": "abc"}, "lengths must be a list of numbers, got lengths = 'abc'"),
    ({"lengths": [1.0, "b"]}, "lengths must be a scalar, got lengths = 'b'"),
    ({"lengths": [1.0, math.nan]}, "lengths must be finite and positive"),
]
BAD_STATES_OF_TORCH = [
    ({}, "base_lrs must be a list of 1 rates, one a parameter group, got base_lrs = .0.001, 0.001."),
    ({"base_lrs": [1e-3]}, "last_lr must be a list of 1 rates"),
    ({"base_lrs": ["a"], "last_lr": [1e-3]}, "base_lrs must be a scalar, got base_lrs = 'a'"),
    ({"base_lrs": [math.nan], "last_lr": [1e-3]}, "base_lrs must be finite"),
    ({"base_lrs": [1e-3], "last_lr": [1e-3], "last_epoch": 1.5}, "last_epoch must be a whole number"),
    ({"base_lrs": [1e-3], "last_lr": [1e-3], "controller": []}, "dictionary with the keys"),
]


@pytest.mark.parametrize(("changed", "message"), BAD_STATES + BAD_STATES_OF_TORCH, ids=str)
def test_a_wrong_state_is_refused_and_nothing_of_it_is_loaded(changed, message):
    if (changed, message) in BAD_STATES_OF_TORCH:
        fresh, state = scheduler_of(), scheduler_of(groups=2).state_dict() | changed
    else:
        fresh, state = LengthTriggeredLR(1e-3, tracker=SurgeTracker(QUICK), multiplier=1.0), called().state_dict()
        place = state if set(changed) <= {*state, "other"} else state["tracker"]
        place.update(changed)
    before = fresh.state_dict()
    with pytest.raises(ValueError, match=message):
        fresh.load_state_dict(state)
    assert fresh.state_dict() == before


def warned(call, times):
    """Returns the numbers of the calls that warned, from 1, and the messages."""
    found = []
    for number in range(1, times + 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        found += [(number, str(one.message)) for one in caught]
    return found


@pytest.mark.parametrize("form", ["controller", "torch"])
def test_lengths_that_are_no_lengths_are_said_once_after_20(form):
    for length in (math.nan, 0.0, -5, math.inf):
        observe = LengthTriggeredLR(1e-6).step if form == "controller" else scheduler_of().observe
        observe(100.0)
        [(number, text)] = warned(functools.partial(observe, length), 60)
        assert number == 20
        assert "20 of 21 mean response lengths were not finite and positive" in text


def test_a_scheduler_that_never_observes_says_so_once_after_20():
    """Many updates of one batch are no silence."""
    silent, observing = scheduler_of(), scheduler_of()
    silent.optimizer.step()
    [(number, text)] = warned(silent.step, 60)
    assert number == 20
    assert "observe() was not called in the first 20 updates" in text
    observing.observe(100.0)
    observing.optimizer.step()
    assert not warned(observing.step, 60)


PLAIN_USES = {
    "adamw": optax.adamw,
    "MultiSteps": lambda rate: optax.MultiSteps(optax.adamw(rate), 2),
    "chain": lambda rate: optax.chain(optax.clip(1.0), optax.sgd(rate)),
    "a function around it": lambda rate: optax.adamw(lambda count: 0.1 * rate(count)),
    "an injected function around it": lambda rate: inject_learning_rate(optax.adamw, lambda count: rate(count)),
    "join_schedules": lambda rate: optax.sgd(optax.join_schedules([rate, optax.constant_schedule(1.0)], [3])),
    "static": lambda rate: optax.inject_hyperparams(optax.adamw, static_args="learning_rate")(rate),
}


@pytest.mark.parametrize("name", PLAIN_USES)
def test_a_schedule_with_a_state_is_no_function_of_the_count(name):
    def train_once(compiles):
        params = {"w": jnp.ones(2)}
        tx = PLAIN_USES[name](length_triggered_schedule(1e-3))
        compiles(tx.update)(params, tx.init(params), params)

    for compiles in (jax.jit, lambda update: update):
        with pytest.raises(ValueError, match=r"is no function of the count.*inject_learning_rate\(optax.adamw"):
            train_once(compiles)


def test_nnx_takes_the_state():
    """The surge at step 8 sets the period 8 with the multiplier 1."""
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
    rate = length_triggered_schedule(1e-3, config=QUICK, multiplier=1.0)
    optimizer, rates = nnx.Optimizer(model, inject_learning_rate(optax.adamw, rate), wrt=nnx.Param), []
    for length in [100.0] * 6 + [400.0] * 12:
        optimizer.update(model, grads, response_length=length)
        rates.append(float(get_learning_rate(optimizer.opt_state)))
    assert rates == [float(np.float32(rate)) for rate in [1e-3] * 7 + [5e-4] * 8 + [2.5e-4] * 3]
