"""In router replay of a mixture of experts, the trainer's forward takes the engine's routes."""

import functools
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_step import MESH, batch_shape, forward_of, fresh_state, make_step
from tiny_step import packed as pack

from rljax.policy import experts
from rljax.policy.config import PolicyConfig
from rljax.policy.model import hidden_states, init_params, lm_head_table
from rljax.policy.score import segment_ends
from rljax.rollout.embedded import JaxEngine
from rljax.rollout.types import SamplingParams
from rljax.schedule import inject_learning_rate
from rljax.trainer.measure import DiagnosisConfig, balance_loss
from rljax.trainer.packing import TrainSequence, unpack_whole
from rljax.trainer.update import MultipleUpdates, SingleUpdate, UpdateOptions

pytestmark = pytest.mark.slow

OF_EXPERTS = {"family": "qwen3_moe", "num_experts": 16, "experts_per_token": 2, "expert_size": 16}
CONFIG = PolicyConfig(32, 32, 48, 3, 4, 2, 8, initializer_range=0.3, normalize_gates=True, **OF_EXPERTS)
SGD = inject_learning_rate(lambda rate: optax.sgd(rate), 1.0)  # one for all, so that equal steps share programs
PROMPTS, GROUP, LONGEST, ROW = 6, 4, 48, 64
COUNT = PROMPTS * GROUP


@functools.cache
def sampled(dtype="bfloat16"):
    """Returns sequences that the embedded engine sampled, with its log-probabilities and routes."""
    with closing(JaxEngine(CONFIG, dtype, 8, mesh=MESH, with_routes=True)) as engine:
        engine.publish(init_params(CONFIG, 0), 0)
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 32, rng.integers(3, 9)).astype(np.int32) for _ in range(PROMPTS)]
        responses = list(engine.generate(prompts, GROUP, SamplingParams(LONGEST - 8, 1.0, (3,)), seed=0))
    return [TrainSequence(r.ids, r.prompt_length, r.columns, (-1.0) ** r.sample_index) for r in responses]


def batches(sequences):
    return pack(sequences, ROW, 4, len(sequences), LONGEST)


def make(count=COUNT):
    how = {"config": CONFIG, "dtype": "float32"}
    shape = {"shape": batch_shape(ROW, 4, count, LONGEST), "count": count, "limit": LONGEST}
    return make_step(SGD, **how, **shape, diagnosis=DiagnosisConfig()), fresh_state(SGD, **how)


def test_the_engine_reports_the_experts_that_its_tokens_went_to():
    """In float32 the engine's routes are those of the trainer's own forward. The last token has none."""
    sequences, (step, state) = sampled("float32"), make()
    batch = batches(sequences)
    forward = forward_of(step, COUNT, diagnosis=None)
    routes = forward(state.params, batch._replace(routes=None), with_routes=True)[1].routes
    own = unpack_whole(np.asarray(routes), batch, sequences)
    for s, expected in zip(sequences, own, strict=True):
        given = s.columns["routes"]
        assert (given.shape, given.dtype) == ((len(s.ids), 3, 2), np.uint8)
        np.testing.assert_array_equal(given[:-1].reshape(len(given) - 1, -1), expected[:-1])
        assert not given[-1].any()


def test_a_gate_is_the_trainers_own_for_a_replayed_choice():
    """The router's own choices, when given, change nothing. Other choices give their own output, in whatever order."""
    params = init_params(CONFIG, 1)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (1, 5)))
    ones, positions = jnp.ones_like(tokens), jnp.arange(5)[None]
    given = jnp.asarray(np.random.default_rng(1).permuted(np.tile(np.arange(16), (5, 3, 1)), axis=-1)[None, ..., :2])

    @jax.jit
    def logits(choices):
        with jax.default_matmul_precision("highest"):
            hidden, seen = hidden_states(params, CONFIG, tokens, segment_ends(ones), positions, choices=choices)
            return jnp.einsum("btd,vd->btv", hidden, lm_head_table(params)), seen.router

    own_logits, own = logits(None)
    free_logits, _ = logits(jnp.full_like(given, -1))
    np.testing.assert_array_equal(own_logits, free_logits)
    same_logits, same = logits(jnp.moveaxis(own.choices, 0, 2))
    np.testing.assert_allclose(same_logits, own_logits, atol=1e-5, rtol=0)
    assert int(same.differing.sum()) == 0
    assert int(same.given.sum()) == 5 * 3 * 2
    other_logits, other = logits(given)
    assert jnp.abs(other_logits - own_logits).max() > 1e-2
    np.testing.assert_array_equal(other.choices, jnp.moveaxis(given, 2, 0))
    np.testing.assert_allclose(logits(given[..., ::-1])[0], other_logits, atol=1e-5, rtol=0)  # in another order


@pytest.mark.harness
def test_an_update_measures_free_routing_on_request():
    (step, state), sequences = make(), sampled()
    update = SingleUpdate(step, forward_of(step, COUNT), batches)
    batch = update.pack(sequences)
    updated = update(state, batch, sequences, UpdateOptions(1e-3, 0, False, free_routing=True))
    free, replayed = (updated.row[f"{kind}/logprob_abs_diff_mean"] for kind in ("mismatch_free_routing", "mismatch"))
    assert free > 1.5 * replayed
    assert len(updated.trainer().logprobs) == COUNT
    again = update(updated.state, batch, sequences, UpdateOptions(1e-3, 0, False, free_routing=False))
    assert not [name for name in again.row if name.startswith("mismatch_free_routing")]
    assert step.compilations == 1


@pytest.mark.harness
def test_r2_replays_the_forward_before_the_first_update():
    """After a large step the router would choose otherwise. Later updates of a batch keep the first update's routes."""
    taken, sequences = {}, [s.without("routes") for s in sampled()]
    for replays_own in (False, True):
        step, state = make(COUNT // 2)
        how = {"mini_batches": 2, "epochs": 2, "group_size": GROUP, "replays_own": replays_own}
        update = MultipleUpdates(step, forward_of(step, COUNT), batches, batches, **how)
        taken[replays_own] = update(state, update.pack(sequences), sequences, UpdateOptions(0.3, 0, False)).row
    assert "router/disagreement" not in taken[False]
    assert 0.01 < taken[True]["router/disagreement"] < 1.0
    assert taken[True]["policy/clip_fraction"] < taken[False]["policy/clip_fraction"]


def test_the_balance_loss_is_that_of_transformers(monkeypatch):
    torch = pytest.importorskip("torch")
    moe = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    tokens, segments = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 9))), np.ones((2, 9), np.int32)
    segments[1, 6:] = 0
    rows = (tokens, segment_ends(jnp.asarray(segments)), jnp.broadcast_to(jnp.arange(9), (2, 9)))
    recorded, own = [], experts.router_logits

    def recording(x, weight):
        logits = own(x, weight)
        jax.debug.callback(lambda each: recorded.append(np.asarray(each).reshape(-1, 16)), logits, ordered=True)
        return logits

    monkeypatch.setattr(experts, "router_logits", recording)
    router = jax.jit(lambda params: hidden_states(params, CONFIG, *rows)[1].router)(init_params(CONFIG, 2))
    jax.effects_barrier()
    assert len(recorded) == CONFIG.num_layers
    expected = moe.load_balancing_loss_func(tuple(map(torch.tensor, recorded)), 16, 2, torch.tensor(segments))
    np.testing.assert_allclose(balance_loss(router), float(expected), rtol=1e-5)
