"""The recipes of docs/schedule.md for optax and flax run unchanged, and tests/peers runs others in their packages.

The code of docs/torch_peers.md for prime-rl, NeMo-RL and slime runs on stand-ins with the original signatures. The
example of a plain loop runs where only jax, optax and their requirements can be imported, the core with numpy alone.
"""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from isolated import run_with_only
from pages import code_block, run_block
from surging import LENGTHS, RATES, early_controller
from torch.distributed import checkpoint

from rljax import schedule
from rljax.schedule import SurgeConfig, SurgeTracker
from rljax.schedule.torch import LengthTriggeredScheduler

UPDATES = 2


def run(title, **names):
    """Executes the block called ``title``; a controller in it calls early enough for a short test."""
    public = {name: getattr(schedule, name) for name in schedule.__all__}
    space = {"jax": jax, "optax": optax, **public, "LengthTriggeredLR": early_controller, **names}
    return run_block("schedule.md", f"# {title}\n", **space)


def test_in_graph_form():
    space = run("The in-graph form", params={"w": jnp.ones(3)}, grads={"w": jnp.ones(3)}, length=jnp.float32(800))
    assert space["rate"] == np.float32(1e-6)
    assert int(space["opt_state"].hyperparams_states["learning_rate"].surge.step) == 1


def test_flax_nnx():
    rates, traces, lengths = [], [], iter(LENGTHS)

    @nnx.jit
    def step(model, optimizer, x):
        traces.append(None)
        optimizer.update(model, nnx.grad(lambda model: jnp.square(model(x)).mean())(model))

    def train_step(model, optimizer, x):
        step(model, optimizer, x)
        rates.append(schedule.get_learning_rate(optimizer.opt_state))

    model, batches = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), [jnp.ones((2, 4))] * 100
    given = {"model": model, "train_step": train_step, "batches": batches, "mean_length": lambda: next(lengths)}
    run("flax.nnx", nnx=nnx, **given)
    np.testing.assert_array_equal(rates, RATES)
    assert len(traces) == 1


@pytest.fixture
def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1e-6)


def early_scheduler(optimizer):
    """Returns a scheduler that can call a surge after 10 steps."""
    return LengthTriggeredScheduler(optimizer, tracker=SurgeTracker(SurgeConfig(window=40, warmup=10)))


def two_lengths(mean):
    """Returns two different response lengths with this mean."""
    return int(mean) - 300, int(mean) + 300


def micro_batches(mean):
    """Returns packed rows like prime-rl's: two sequences with prompts, and a row of padding with an empty mask."""
    short, long = two_lengths(mean)
    first, second = [False] * 5 + [True] * short, [False] * 7 + [True] * long + [False] * 3
    packed = {"loss_mask": torch.tensor([first + second]), "sequence_lengths": [len(first), len(second)]}
    return [packed, {"loss_mask": torch.zeros(1, 16, dtype=torch.bool), "sequence_lengths": [16]}]


def test_prime_rl(optimizer):
    """prime-rl observes before each update and steps the scheduler after it. Each batch has one update."""
    code = run_block("torch_peers.md", "# prime-rl\n")
    scheduler = code["setup_length_triggered_scheduler"](optimizer)
    assert isinstance(scheduler, LengthTriggeredScheduler)
    scheduler, rates = early_scheduler(optimizer), []
    for mean in LENGTHS:
        code["observe_lengths"](scheduler, micro_batches(mean), None)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    np.testing.assert_array_equal(np.float32(rates), RATES)


def test_torchs_distributed_checkpoint_keeps_the_state(optimizer, tmp_path):
    """prime-rl and NeMo-RL save with this checkpoint. It fills the state of a scheduler that has seen no length."""
    first = early_scheduler(optimizer)
    for length in LENGTHS[:60]:
        first.observe(length)
    checkpoint.save({"scheduler": first.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    second = early_scheduler(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1e-6))
    state = {"scheduler": second.state_dict()}
    checkpoint.load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    second.load_state_dict(state["scheduler"])
    assert second.state_dict() == first.state_dict()
    assert second.surge_step == 26
    np.testing.assert_array_equal(np.float32([second.observe(x) for x in LENGTHS[60:]])[:, 0], RATES[60:])


class NemoWorker:
    """A worker like NeMo-RL's ``DTensorPolicyWorkerV2Impl``: several updates a rollout batch, then a scheduler step."""

    def __init__(self, optimizer, scheduler, rates):
        self.optimizer, self.scheduler, self.rates = optimizer, scheduler, rates
        self.dp_mesh = SimpleNamespace(get_group=lambda: None)

    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None, check_dim_skip_keys=None):
        for _ in range(UPDATES):
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            if not eval_mode:
                self.optimizer.step()
        if not eval_mode:
            self.scheduler.step()
        return {"gbs": gbs}


def test_nemo_rl(optimizer):
    code = run_block("torch_peers.md", "# NeMo-RL\n", DTensorPolicyWorkerV2Impl=NemoWorker)
    worker = code["LengthTriggeredPolicyWorker"](optimizer, early_scheduler(optimizer), rates := [])
    for mean in LENGTHS:
        short, long = two_lengths(mean)
        mask = torch.zeros(2, long + 9, dtype=torch.long)
        mask[0, 4 : 4 + short] = mask[1, 9:] = 1
        data = {"token_mask": mask, "sample_mask": torch.tensor([1.0, 0.0])}  # an overlong response has a length, too
        worker.train(data, None, eval_mode=True)
        assert worker.train(data, None, gbs=2) == {"gbs": 2}
    assert worker.scheduler.tracker.step == len(LENGTHS)
    np.testing.assert_array_equal(np.float32(rates).reshape(-1, 4)[:, 2:], np.stack([RATES] * UPDATES, 1))


class MegatronScheduler:
    """A scheduler like Megatron's ``OptimizerParamScheduler``, which writes its rate at its start and in ``step``."""

    def __init__(self, optimizer, warmup=0):
        self.optimizer, self.warmup, self.num_steps = optimizer, warmup, 0
        self.step(0)

    def get_lr(self, param_group):
        return 1e-6 * min(1.0, self.num_steps / self.warmup) if self.warmup else 1e-6

    def step(self, increment):
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group)


def slime_rates(place, optimizer, rollouts, warmup=0):
    """Returns the rates of slime's loop over rollouts [rollouts, updates], with its two hooks in a new process.

    A process of the critic's kind, without rollout data yet, keeps Megatron's rate.
    """
    code = run_block("torch_peers.md", "# slime\n")
    code["LengthTriggeredLR"] = early_controller
    args, scheduler = SimpleNamespace(save=str(place)), MegatronScheduler(optimizer, warmup)
    code["before_train_step"](args, 0, 0, [], optimizer, scheduler)
    assert optimizer.param_groups[0]["lr"] == scheduler.get_lr(None)
    rates = []
    for rollout_id in rollouts:
        code["after_rollout"](args, rollout_id, {"response_lengths": list(two_lengths(LENGTHS[rollout_id]))})
        for step_id in range(UPDATES):
            code["before_train_step"](args, rollout_id, step_id, [], optimizer, scheduler)
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step(increment=1)
    return np.reshape(rates, (-1, UPDATES))


def test_slime(optimizer, tmp_path):
    """The second process resumes from the checkpoint after rollout 59, although the first went on to 70."""
    both, file = np.stack([RATES] * UPDATES, 1), tmp_path / "new" / "response_lengths.json"
    np.testing.assert_allclose(slime_rates(tmp_path / "new", optimizer, range(70)), both[:70], rtol=2e-7)
    np.testing.assert_allclose(slime_rates(tmp_path / "new", optimizer, range(60, 100)), both[60:], rtol=2e-7)
    assert json.loads(file.read_text()) == LENGTHS
    # Rollouts before the first one that it sees are counted.
    slime_rates(tmp_path, optimizer, range(3, 5))
    means = json.loads((tmp_path / "response_lengths.json").read_text())
    np.testing.assert_array_equal(means, [np.nan] * 3 + LENGTHS[3:5])
    # Megatron's own rate is multiplied.
    rates = slime_rates(tmp_path / "warm", optimizer, range(3), warmup=4)
    np.testing.assert_allclose(rates, [[0, 0.25e-6], [0.5e-6, 0.75e-6], [1e-6, 1e-6]])


USE = """
import json
import rljax.schedule as schedule

lengths = [1000.0] * 60 + [3500.0] * 60
tracker = schedule.SurgeTracker(schedule.SurgeConfig())
calls = [step for step, length in enumerate(lengths, 1) if tracker.update(length, 0.0)]
controller = schedule.LengthTriggeredLR(1e-6, tracker=schedule.SurgeTracker())
rates = [controller.step(length) for length in lengths]
state = json.loads(json.dumps(controller.state_dict()))
print(json.dumps([calls, controller.decay_period, rates[117], rates[118], state["decay_period"]]))
assert schedule.decay_period_from_surge(110) == 198
assert "length_triggered_schedule" in dir(schedule)
"""


def test_tracker_and_controller_run_with_numpy_alone():
    """The call is at step 66, when six lengths in a row are long. The period is 118.8, rounded to 119."""
    done = run_with_only(["numpy"], USE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[66], 119, 1e-6, 5e-7, 119]


def test_what_needs_optax_says_how_to_install_it():
    done = run_with_only(["numpy"], "import rljax.schedule\nrljax.schedule.inject_learning_rate\n")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: rljax.schedule.inject_learning_rate needs ")
    assert last.endswith("pip install '.[optax]' in a checkout of rljax, or 'WHEEL[optax]' with its wheel")
    with pytest.raises(AttributeError, match="no attribute 'length_trigered_schedule'"):
        schedule.length_trigered_schedule  # noqa: B018


def test_the_example_of_the_docs_needs_nothing_else():
    block = code_block("schedule.md", "# A plain optax loop")
    assert len([line for line in block.splitlines() if line.strip()]) <= 13
    given = "import jax.numpy as jnp\nlengths = [1000.0] * 60 + [3500.0] * 60\nparams = {'w': jnp.ones(3)}\n"
    check = "assert controller.surge_step == 66, controller.surge_step\n"
    check += "assert get_learning_rate(opt_state) == jnp.float32(5e-7)\n"
    packages = ("absl", "jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum", "optax", "scipy")
    done = run_with_only(packages, given + block + check, room="schedule")
    assert done.stdout.strip() == "isolated", done.stderr
