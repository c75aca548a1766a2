"""The recipes of docs/schedule.md, run as they stand against optimizers built as those projects build them."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from rljax import schedule
from rljax.schedule import get_learning_rate

DOCS = (Path(__file__).parents[2] / "docs" / "schedule.md").read_text()
# Called at step 26 with the rules below, the period is 47.
LENGTHS = [1000.0] * 20 + [4000.0] * 80
EXPECTED = np.float32([max(1e-6 * 0.5 ** (step // 47), 1e-7) for step in range(1, 101)])


def recipe(title):
    return re.search(rf"```python\n(# {title}\n.*?)```", DOCS, re.DOTALL)[1]


def run(title, **names):
    """Executes the block called ``title``; a controller in it calls early enough for a short test."""

    def controller(init_value):
        config = schedule.SurgeConfig(window=40, warmup=10)
        return schedule.LengthTriggeredLR(init_value, tracker=schedule.SurgeTracker(config))

    public = {name: getattr(schedule, name) for name in schedule.__all__}
    space = {"jax": jax, "jnp": jnp, "optax": optax, **public, "LengthTriggeredLR": controller, **names}
    exec(compile(recipe(title), f"docs/schedule.md: {title}", "exec"), space)
    return space


@pytest.fixture
def mean_length():
    lengths = iter(LENGTHS)
    return lambda: next(lengths)


def test_in_graph_form():
    space = run("The in-graph form", params={"w": jnp.ones(3)}, grads={"w": jnp.ones(3)}, length=jnp.float32(800))
    assert space["rate"] == np.float32(1e-6)
    assert int(space["opt_state"].hyperparams_states["learning_rate"].surge.step) == 1


class Policy(nnx.Module):
    def __init__(self, dtype=jnp.float32):
        self.base = nnx.Linear(4, 4, param_dtype=dtype, rngs=nnx.Rngs(0))
        self.adapter = nnx.LoRA(4, 2, 4, param_dtype=dtype, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.base(x) + self.adapter(x)


def squared(model, x):
    return jnp.square(model(x)).mean()


class PeftTrainer:
    """As tunix has it: an nnx.Optimizer over the adapter, a jitted nnx step, hooks around it."""

    def __init__(self, tx, dtype):
        self.model = Policy(dtype)
        self.optimizer = nnx.Optimizer(self.model, tx, wrt=nnx.LoRAParam)
        self.traces = 0

    def with_training_hooks(self, hooks):
        self.hooks = hooks
        return self

    def train(self, steps):
        @nnx.jit
        def step(model, optimizer, x):
            self.traces += 1
            grads = nnx.grad(squared, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, x)
            optimizer.update(model, grads)

        for _ in range(steps):
            self.hooks.on_train_step_start(self)
            step(self.model, self.optimizer, jnp.ones((2, 4)))
            yield get_learning_rate(self.optimizer.opt_state)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_tunix(mean_length, dtype):
    space = run("tunix", TrainingHooks=object, mean_length=mean_length, make_trainer=lambda tx: PeftTrainer(tx, dtype))
    trainer = space["trainer"]
    np.testing.assert_array_equal(list(trainer.train(100)), EXPECTED)
    assert trainer.traces == 1


class MaxTextConfig:
    learning_rate = 1e-6
    frozen = False


def get_optimizer(config, learning_rate_schedule):
    """As MaxText has it: AdamW with a mask and its own moment dtype, under multi_transform where some is frozen."""
    base = optax.adamw(
        learning_rate_schedule,
        b1=0.9,
        b2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        mu_dtype=jnp.bfloat16,
        mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    )
    if not config.frozen:
        return base
    transforms = {"trainable": base, "frozen": optax.set_to_zero()}
    return optax.multi_transform(
        transforms, lambda params: jax.tree.map(lambda x: "trainable" if x.ndim > 1 else "frozen", params)
    )


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_maxtext(mean_length, dtype, frozen):
    params = {"kernel": jnp.ones((4, 2), dtype), "bias": jnp.zeros(2, dtype)}
    rates = []

    def apply(params, x):
        return x @ params["kernel"] + params["bias"][None]

    def body(state, x):
        grads = jax.grad(lambda params: jnp.square(state.apply_fn(params, x)).mean())(state.params)
        return state.apply_gradients(grads=grads)

    compiled = jax.jit(body, donate_argnums=0)

    def train_step(state, batch):
        state = compiled(state, batch)
        rates.append(get_learning_rate(state.opt_state))
        return state

    config = MaxTextConfig()
    config.frozen = frozen

    def make_train_state(tx):
        # The count of a state that jit returns is a jax array; starting with one keeps the first signature.
        return TrainState.create(apply_fn=apply, params=params, tx=tx).replace(step=jnp.int32(0))

    run(
        "MaxText",
        config=config,
        get_optimizer=get_optimizer,
        make_train_state=make_train_state,
        train_step=train_step,
        mean_length=mean_length,
        batches=[jnp.ones((3, 4), dtype)] * 100,
    )
    np.testing.assert_array_equal(rates, EXPECTED)
    assert compiled._cache_size() == 1


def test_skyrl_tx(mean_length):
    """As SkyRL tx has it: plain inject_hyperparams at rate 0 over the adapter, an nnx-jitted update."""
    model = Policy()
    tx = optax.inject_hyperparams(optax.adamw)(learning_rate=0.0)
    optimizers = {"adapter": nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)}
    rates, traces = [], []

    @nnx.jit
    def compute_grads_and_update(model, optimizer, x):
        traces.append(None)
        grads = nnx.grad(squared, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, x)
        optimizer.update(model, grads)

    def optim_step(model_id, batch):
        compute_grads_and_update(model, optimizers[model_id], batch)
        rates.append(get_learning_rate(optimizers[model_id].opt_state))

    batches = [jnp.ones((2, 4))] * 100
    run(
        "SkyRL tx",
        optimizers=optimizers,
        model_id="adapter",
        optim_step=optim_step,
        mean_length=mean_length,
        batches=batches,
    )
    np.testing.assert_array_equal(rates, EXPECTED)
    assert len(traces) == 1


def test_easydel():
    """As EasyDeL has it: a pure step that reads the rate of its metrics from the scheduler."""
    space = run("EasyDeL")
    tx, scheduler = space["tx"], space["scheduler"]
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=tx)

    @jax.jit
    def training_step(state, grads):
        return state.apply_gradients(grads=grads), {"learning_rate": scheduler(state.step)}

    moved, before = [], state.params
    for _ in range(400):
        state, metrics = training_step(state, {"w": jnp.ones(3)})
        moved.append(float(metrics["learning_rate"]))
    expected = [max(1e-6 * 0.5 ** (update // 198), 1e-7) for update in range(1, 401)]
    np.testing.assert_array_equal(np.float32(moved), np.float32(expected))
    assert jnp.all(state.params["w"] < before["w"])
