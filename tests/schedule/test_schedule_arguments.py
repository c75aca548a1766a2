"""Wrong arguments of the schedule's API are refused with the value that came and what was expected."""

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
    get_learning_rate,
    inject_learning_rate,
    length_decay_schedule,
    length_triggered_schedule,
    set_learning_rate,
)
from rljax.schedule.torch import LengthTriggeredCallback, LengthTriggeredScheduler

QUICK = SurgeConfig(window=12, warmup=6, smooth=3, persistence=1)


def scheduler_of(groups=1, **options):
    parameters = [{"params": [torch.nn.Parameter(torch.zeros(2))]} for _ in range(groups)]
    return LengthTriggeredScheduler(torch.optim.SGD(parameters, lr=1e-3), **options)


WRONG = [
    (lambda: LengthTriggeredLR("1e-6"), "init_value must be a scalar, got init_value = '1e-6', a str"),
    (lambda: LengthTriggeredLR(True), "init_value must be a scalar, got init_value = True, a bool"),
    (lambda: LengthTriggeredLR(1e-6, multiplier="2"), "multiplier must be a scalar, got multiplier = '2'"),
    (lambda: LengthTriggeredLR(1e-6, floor_ratio=None), "floor_ratio must be a scalar, got floor_ratio = None"),
    (lambda: LengthTriggeredLR(1e-6, tracker=SurgeConfig()), "tracker must be a SurgeTracker, got tracker = SurgeConf"),
    (lambda: LengthTriggeredLR(1e-6, tracker=SurgeTracker), "tracker must be a SurgeTracker, got tracker = <class"),
    (lambda: scheduler_of(tracker=SurgeConfig()), "tracker must be a SurgeTracker, got tracker = SurgeConfig"),
    (lambda: LengthTriggeredCallback(tracker=3), "tracker must be a SurgeTracker, got tracker = 3"),
    (lambda: SurgeTracker({"window": 60}), "config must be a SurgeConfig, got config = {'window': 60}"),
    (
        lambda: length_triggered_schedule(1e-6, config=SurgeTracker()),
        "config must be a SurgeConfig, got config = Surge",
    ),
    (lambda: length_decay_schedule("1e-6", 3), "init_value must be a scalar, got init_value = '1e-6'"),
    (lambda: length_decay_schedule(1e-6, True), "decay_period must be a whole number, got decay_period = True"),
    (lambda: SurgeConfig(window=60.0), "window must be a whole number, got window = 60.0"),
    (lambda: SurgeConfig(ratio="3"), "ratio must be a scalar, got ratio = '3'"),
    (lambda: SurgeConfig(max_truncated=False), "max_truncated must be a scalar, got max_truncated = False"),
    (
        lambda: inject_learning_rate(optax.adamw(1e-3), 1e-3),
        "make_optimizer must be a function .* got .*Transformation",
    ),
    (lambda: inject_learning_rate(optax.adamw, LengthTriggeredLR(1e-3)), "got LengthTriggeredLR.* set_learning_rate"),
    (
        lambda: inject_learning_rate(optax.adamw, "1e-3"),
        "the learning rate must be a finite, non-negative scalar, got '1",
    ),
    (lambda: set_learning_rate(inject_learning_rate(optax.sgd, 1.0).init(0.0), True), "non-negative scalar, got True"),
]


@pytest.mark.parametrize(("make", "message"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_argument_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("length", ["100", True, np.True_, jnp.bool_(1), b"100", None, [100.0], 1j])
@pytest.mark.parametrize("form", ["tracker", "controller", "torch", "graph"])
def test_a_length_that_is_no_number_is_refused(form, length):
    observe = {
        "tracker": SurgeTracker().update,
        "controller": LengthTriggeredLR(1e-6).step,
        "torch": scheduler_of().observe,
        "graph": lambda value: in_graph(response_length=value),
    }[form]
    with pytest.raises(ValueError, match="length"):
        observe(length)


def in_graph(**arguments):
    schedule = length_triggered_schedule(1e-3, config=QUICK)
    return schedule.update(schedule.init(), **arguments)


@pytest.mark.parametrize("share", [2.0, -0.1, np.float32(1.5), math.inf, True, "0.5"])
def test_a_share_outside_of_0_to_1_is_refused(share):
    with pytest.raises(ValueError, match=r"truncated_fraction must be .* got truncated_fraction = "):
        LengthTriggeredLR(1e-6).step(100.0, share)
    with pytest.raises(ValueError, match=r"truncated_fraction must be .* got truncated_fraction = "):
        in_graph(response_length=100.0, truncated_fraction=share)


def test_numbers_of_numpy_become_numbers_of_python():
    config = SurgeConfig(window=np.int64(40), ratio=np.float32(2.5), max_wait=np.int32(300))
    assert (type(config.window), type(config.ratio), config.max_wait) == (int, float, 300)
    assert SurgeTracker(config).update(100.0) is False
    rate = np.array(1e-6)
    controller = LengthTriggeredLR(rate, multiplier=np.float32(1.5), decay_factor=np.array(0.5))
    rate[...] = 5.0
    assert json.dumps(controller.step(100.0)) == "1e-06"
    assert controller.rate_from(np.array(2e-6)) == 2e-6


@pytest.mark.parametrize("share", [None, math.nan, 0, 1, np.float32(1.0), 1.0 + 1e-7, torch.tensor(0.5)])
def test_a_share_may_be_unknown_or_rounded(share):
    assert LengthTriggeredLR(1e-6).step(torch.tensor(100.0), share) == 1e-6


# ---- states ----------------------------------------------------------------------------------------------------------


def called():
    """A controller after its call at step 8: the third long length makes the median of three long."""
    controller = LengthTriggeredLR(1e-3, tracker=SurgeTracker(QUICK), multiplier=1.0)
    for length in [100.0] * 6 + [400.0] * 2:
        controller.step(length)
    assert controller.state_dict()["decay_period"] == 8
    return controller


BAD_STATES = [
    ({"decay_period": 0}, "decay_period must be at least 1, got decay_period = 0"),
    ({"decay_period": "a"}, "decay_period must be a whole number, got decay_period = 'a'"),
    ({"decay_period": 2.5}, "decay_period must be a whole number, got decay_period = 2.5"),
    ({"decay_period": None}, "decay_period must be a period"),
    ({"tracker": None}, "dictionary .* got None"),
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


@pytest.mark.parametrize(("changed", "message"), BAD_STATES, ids=[str(changed) for changed, _ in BAD_STATES])
def test_a_wrong_state_is_refused_and_nothing_of_it_is_loaded(changed, message):
    state = called().state_dict()
    inner = {key: value for key, value in changed.items() if key not in state}
    state = state | {key: value for key, value in changed.items() if key in state}
    if inner:
        state["tracker"] = state["tracker"] | inner
    fresh = LengthTriggeredLR(1e-3, tracker=SurgeTracker(QUICK), multiplier=1.0)
    before = fresh.state_dict()
    with pytest.raises(ValueError, match=message):
        fresh.load_state_dict(state)
    assert fresh.state_dict() == before


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "base_lrs must be a list of 1 rates, one a parameter group, got base_lrs = .0.001, 0.001."),
        ({"base_lrs": [1e-3]}, "last_lr must be a list of 1 rates"),
        ({"base_lrs": ["a"], "last_lr": [1e-3]}, "base_lrs must be a scalar, got base_lrs = 'a'"),
        ({"base_lrs": [math.nan], "last_lr": [1e-3]}, "base_lrs must be finite"),
        ({"base_lrs": [1e-3], "last_lr": [1e-3], "last_epoch": 1.5}, "last_epoch must be a whole number"),
        ({"base_lrs": [1e-3], "last_lr": [1e-3], "controller": []}, "dictionary with the keys"),
    ],
)
def test_a_wrong_state_of_the_scheduler_is_refused(changed, message):
    fresh = scheduler_of()
    before = fresh.state_dict()
    with pytest.raises(ValueError, match=message):
        fresh.load_state_dict(scheduler_of(groups=2).state_dict() | changed)
    assert fresh.state_dict() == before


# ---- silence ---------------------------------------------------------------------------------------------------------


def warned(call, times):
    """Returns the numbers of the calls that warned, from 1, and the messages."""
    found = []
    for number in range(1, times + 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        found += [(number, str(one.message)) for one in caught]
    return found


@pytest.mark.parametrize("length", [math.nan, 0.0, -5, math.inf])
@pytest.mark.parametrize("form", ["controller", "torch"])
def test_lengths_that_are_no_lengths_are_said_once_after_20(form, length):
    observe = LengthTriggeredLR(1e-6).step if form == "controller" else scheduler_of().observe
    observe(100.0)
    [(number, text)] = warned(lambda: observe(length), 60)
    assert number == 20
    assert "20 of 21 mean response lengths were not finite and positive" in text


def test_a_scheduler_that_never_observes_says_so_once_after_20():
    scheduler = scheduler_of()
    scheduler.optimizer.step()
    [(number, text)] = warned(scheduler.step, 60)
    assert number == 20
    assert "observe() was not called in the first 20 updates" in text


def test_many_updates_of_one_batch_are_no_silence():
    scheduler = scheduler_of()
    scheduler.observe(100.0)
    scheduler.optimizer.step()
    assert not warned(scheduler.step, 60)


# ---- the schedule with a state, used as a function of the count ------------------------------------------------------


PLAIN_USES = {
    "adamw": optax.adamw,
    "scale_by_learning_rate": optax.scale_by_learning_rate,
    "scale_by_schedule": optax.scale_by_schedule,
    "MultiSteps": lambda rate: optax.MultiSteps(optax.adamw(rate), 2),
    "chain": lambda rate: optax.chain(optax.clip(1.0), optax.sgd(rate)),
    "a function around it": lambda rate: optax.adamw(lambda count: 0.1 * rate(count)),
    "an injected function around it": lambda rate: inject_learning_rate(optax.adamw, lambda count: rate(count)),
    "join_schedules": lambda rate: optax.sgd(optax.join_schedules([rate, optax.constant_schedule(1.0)], [3])),
    "static": lambda rate: optax.inject_hyperparams(optax.adamw, static_args="learning_rate")(rate),
}


@pytest.mark.parametrize("name", PLAIN_USES)
@pytest.mark.parametrize("jitted", [False, True])
def test_a_schedule_with_a_state_is_no_function_of_the_count(name, jitted):
    def train_once():
        params = {"w": jnp.ones(2)}
        tx = PLAIN_USES[name](length_triggered_schedule(1e-3))
        update = jax.jit(tx.update) if jitted else tx.update
        update(params, tx.init(params), params)

    with pytest.raises(ValueError, match=r"is no function of the count.*inject_learning_rate\(optax.adamw"):
        train_once()


def test_a_count_is_no_state_at_any_call():
    schedule = length_triggered_schedule(1e-3)
    for count in (0, 5, jnp.int32(0), np.arange(3), None):
        with pytest.raises(ValueError, match="is no function of the count"):
            schedule(count)
        with pytest.raises(ValueError, match="is no function of the count"):
            schedule.update(count, response_length=100.0)
    assert float(schedule(schedule.init())) == np.float32(1e-3)


RIGHT_USES = {
    "inject_learning_rate": lambda rate: inject_learning_rate(optax.adamw, rate),
    "inject_hyperparams": lambda rate: optax.inject_hyperparams(optax.adamw)(learning_rate=rate),
    "MultiSteps": lambda rate: optax.MultiSteps(inject_learning_rate(optax.adamw, rate), 1),
    "chain": lambda rate: optax.chain(optax.clip(1.0), inject_learning_rate(optax.sgd, rate)),
}
LENGTHS = [100.0] * 6 + [400.0] * 12
RATES = [1e-3] * 7 + [5e-4] * 8 + [2.5e-4] * 3  # the surge at step 8 sets the period 8 with the multiplier 1


@pytest.mark.parametrize("name", RIGHT_USES)
def test_right_uses_decay_with_one_compilation(name):
    tx = RIGHT_USES[name](length_triggered_schedule(1e-3, config=QUICK, multiplier=1.0))
    params = {"w": jnp.ones(2)}
    state, update, rates = tx.init(params), jax.jit(tx.update), []
    for length in LENGTHS:
        _, state = update(params, state, params, response_length=jnp.float32(length), truncated_fraction=jnp.float32(0))
        rates.append(float(get_learning_rate(state)))
    assert rates == [float(np.float32(rate)) for rate in RATES]
    assert update._cache_size() == 1


def test_nnx_refuses_the_count_and_takes_the_state():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
    plain = nnx.Optimizer(model, optax.adamw(length_triggered_schedule(1e-3)), wrt=nnx.Param)
    with pytest.raises(ValueError, match="is no function of the count"):
        plain.update(model, grads)
    rate = length_triggered_schedule(1e-3, config=QUICK, multiplier=1.0)
    right, rates = nnx.Optimizer(model, inject_learning_rate(optax.adamw, rate), wrt=nnx.Param), []
    for length in LENGTHS:
        right.update(model, grads, response_length=length)
        rates.append(float(get_learning_rate(right.opt_state)))
    assert rates == [float(np.float32(rate)) for rate in RATES]


# ---- one line --------------------------------------------------------------------------------------------------------


def test_each_public_object_shows_its_state_in_one_line():
    shown = [
        repr(called().tracker),
        repr(called()),
        repr(length_triggered_schedule(1e-3)),
        repr(scheduler_of()),
        repr(LengthTriggeredCallback()),
    ]
    assert shown == [
        "SurgeTracker(step=8, surge_step=8, ignored=0, held_out=0)",
        "LengthTriggeredLR(0.001, learning_rate=0.0005, step=8, decay_period=8)",
        "LengthTriggeredSchedule(0.001, multiplier=1.8, floor=0.0001)",
        "LengthTriggeredScheduler(step=0, decay_period=None)",
        "LengthTriggeredCallback(step=0, decay_period=None)",
    ]
