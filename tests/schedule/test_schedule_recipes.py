"""The recipes of docs/schedule.md run unchanged, with optimizers built in the way of those projects.

``tests/peers`` runs the recipes for tunix, SkyRL tx, EasyDeL and MaxText in those packages.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pages import run_block
from surging import LENGTHS, RATES, early_controller

from rljax import schedule
from rljax.schedule import get_learning_rate

nnx = pytest.importorskip("flax.nnx")
TrainState = pytest.importorskip("flax.training.train_state").TrainState


def run(title, **names):
    """Executes the block called ``title``; a controller in it calls early enough for a short test."""
    public = {name: getattr(schedule, name) for name in schedule.__all__}
    space = {"jax": jax, "optax": optax, **public, "LengthTriggeredLR": early_controller, **names}
    return run_block("schedule.md", f"# {title}\n", **space)


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


def test_flax_nnx(mean_length):
    rates, traces = [], []

    @nnx.jit
    def step(model, optimizer, x):
        traces.append(None)
        optimizer.update(model, nnx.grad(squared)(model, x))

    def train_step(model, optimizer, x):
        step(model, optimizer, x)
        rates.append(get_learning_rate(optimizer.opt_state))

    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    batches = [jnp.ones((2, 4))] * 100
    run("flax.nnx", nnx=nnx, model=model, train_step=train_step, mean_length=mean_length, batches=batches)
    np.testing.assert_array_equal(rates, RATES)
    assert len(traces) == 1


class PeftTrainer:
    """A trainer like tunix's: an nnx.Optimizer over the adapter, a jitted nnx step, hooks around each micro-batch."""

    def __init__(self, tx, dtype, micro_batches):
        self.model = Policy(dtype)
        self.micro_batches = micro_batches
        self.config = SimpleNamespace(get_with_default=lambda name, default: micro_batches or default)
        tx = optax.MultiSteps(tx, micro_batches) if micro_batches else tx
        self.optimizer = nnx.Optimizer(self.model, tx, wrt=nnx.LoRAParam)
        self.iter_steps = self.traces = 0

    def with_training_hooks(self, hooks):
        self.hooks = hooks

    def train(self, steps, sample):
        @nnx.jit
        def step(model, optimizer, x):
            self.traces += 1
            grads = nnx.grad(squared, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, x)
            optimizer.update(model, grads)

        self.hooks.on_train_start(self)
        for _ in range(steps):
            for _ in range(self.micro_batches or 1):
                sample()
                self.hooks.on_train_step_start(self)
                step(self.model, self.optimizer, jnp.ones((2, 4)))
                self.iter_steps += 1
            yield get_learning_rate(self.optimizer.opt_state)
            self.hooks.on_train_step_end(self, self.iter_steps, 0.0)
        self.hooks.on_train_end(self)


@pytest.mark.parametrize("micro_batches", [None, 2])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_tunix(mean_length, dtype, micro_batches):
    trainer = PeftTrainer(schedule.inject_learning_rate(optax.adamw, 1e-6), dtype, micro_batches)
    logged = []
    cluster = SimpleNamespace(
        actor_trainer=trainer, buffer_metrics=lambda metrics, mode="train": logged.append(metrics)
    )
    run("tunix", TrainingHooks=object, rl_cluster=cluster)
    halves = iter([half for length in LENGTHS for half in (0.5 * length, 1.5 * length)])

    def sample():
        """Buffers a length: the batches of an update differ in length, and an evaluation's lengths must not count."""
        value = next(halves) if micro_batches else mean_length()
        cluster.buffer_metrics({"rewards/mean": (1.0, np.mean), "completions/mean_length": (value, np.mean)})
        cluster.buffer_metrics({"completions/mean_length": (9e9, np.mean)}, mode="eval")

    np.testing.assert_array_equal(list(trainer.train(100, sample)), RATES)
    assert trainer.traces == 1
    assert len(logged) == 200 * (micro_batches or 1)


class MaxTextConfig:
    learning_rate = 1e-6
    frozen = False


def get_optimizer(config, learning_rate_schedule):
    """Returns an optimizer like MaxText's: AdamW with a mask and its own moment dtype.

    If some parameters are frozen, it is under multi_transform.
    """
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
        # The count in a state that jit returns is a jax array, so the state begins with a jax array to keep the
        # signature.
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
    np.testing.assert_array_equal(rates, RATES)
    assert compiled._cache_size() == 1


def test_skyrl_tx(mean_length):
    """SkyRL tx uses plain inject_hyperparams, and every request overwrites the hyperparameters."""
    model = Policy()
    tx = optax.inject_hyperparams(optax.adamw)(learning_rate=0.0)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    rates, trained = [], []

    @nnx.jit
    def compute_grads_and_update(model, optimizer, x):
        grads = nnx.grad(squared, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, x)
        optimizer.update(model, grads)

    def optim_step(adam):
        hyperparams = optimizer.opt_state.hyperparams
        for theirs, ours in {"learning_rate": "learning_rate", "b1": "beta1", "b2": "beta2", "eps": "eps"}.items():
            hyperparams[theirs][...] = getattr(adam, ours)
        compute_grads_and_update(model, optimizer, trained[-1])
        rates.append(get_learning_rate(optimizer.opt_state))

    run(
        "SkyRL tx",
        AdamParams=SimpleNamespace,
        forward_backward=trained.append,
        optim_step=optim_step,
        mean_length=mean_length,
        batches=[jnp.ones((2, 4))] * 100,
    )
    np.testing.assert_array_equal(rates, RATES)


def test_easydel():
    """EasyDeL builds an optimizer around the scheduler, and its pure step reads the rate of the metrics from it."""
    arguments = run("EasyDeL", TrainingArguments=SimpleNamespace, settings={"model_name": "any"})["arguments"]
    scheduler = arguments.custom_scheduler(400)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(scheduler))
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
