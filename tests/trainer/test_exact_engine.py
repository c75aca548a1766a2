"""Tests of the engine that samples from the trainer's executable: its samples, its records, and a mismatch of 0."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from records import train_sequence
from small_engines import PROMPTS, assert_same_bits, in_order
from tiny_step import CONFIG, MESH, UNCORRECTED, check_close, fresh_state, keep_gradient, make_step

from rljax.algorithms.correction_choice import CorrectionConfig
from rljax.algorithms.losses import LossConfig
from rljax.policy.model import init_params
from rljax.policy.score import make_scorer
from rljax.rollout.engine import TurnQueue, TurnRequest
from rljax.rollout.exact import ExactEngine
from rljax.rollout.types import RolloutConfig, SamplingParams
from rljax.run.config import Config
from rljax.run.episodes import TokenRecorder
from rljax.sharding import MeshConfig, make_mesh
from rljax.trainer.exact import ExactPass, ExactUpdate, lay_out
from rljax.trainer.measure import DiagnosisConfig
from rljax.trainer.objective import Objective
from rljax.trainer.packing import TrainSequence, max_micro_batches, pack
from rljax.trainer.state import OptimizerConfig, PrecisionConfig, make_optimizer
from rljax.trainer.update import UpdateOptions

pytestmark = pytest.mark.slow

ROWS, ROW_TOKENS, LIMIT, N, STOPS = 4, 16, 10, 3, (0, 1)
COUNT = len(PROMPTS) * N
ZERO = ("kl", "k3_kl", "slope_per_1k")
ZERO_PREFIXES = ("log_ppl_diff", "log_ppl_abs_diff", "chi2_", "logprob_abs_diff_", "prob_abs_diff_")
CUT, PLAIN = {"top_k": 5, "top_p": 0.9, "reported": 5}, LossConfig()
WITH_REFERENCE = LossConfig(kl="k3", kl_coefficient=0.1)
NORMALIZED = CorrectionConfig(level="token", normalize=True)


@functools.cache
def make_pass(loss, precision, mesh, **sampled):
    """Returns an executable. It is compiled once for all tests with the same arguments."""
    objective = Objective(loss, UNCORRECTED, COUNT, LIMIT)
    shape = {"rows": max(ROWS, mesh.shape["fsdp"]), "row_tokens": ROW_TOKENS}
    return ExactPass(CONFIG, mesh, precision=precision, objective=objective, **shape, **sampled)


def make(dtype="bfloat16", *, mesh=(1, 1), loss=PLAIN, tx=None, temperature=0.8, head="compute", **sampled):
    """Returns the pass, its update and a fresh state. ``sampled`` says what is reported, and whether it is cut."""
    mesh, precision = make_mesh(MeshConfig(*mesh)), PrecisionConfig(dtype, lm_head_dtype=head)
    exact = make_pass(loss, precision, mesh, **sampled)
    tx = tx or make_optimizer(OptimizerConfig(learning_rate=1e-2))
    reference = None if loss.kl == "none" else init_params(CONFIG, 0)
    how = {"precision": precision, "temperature": temperature, "diagnosis": DiagnosisConfig(), "reference": reference}
    return exact, ExactUpdate(exact, CONFIG, tx, **how), fresh_state(tx, mesh=mesh, dtype=dtype)


def draw(engine, n=N, *, seed=0, temperature=0.8, limit=LIMIT, stops=STOPS, **asked):
    return in_order(engine.generate(PROMPTS, n, SamplingParams(limit, temperature, stops, **asked), seed=seed))


def to_train(responses, seed=0):
    draws = np.random.default_rng(seed).normal(size=len(responses))
    pairs = enumerate(zip(responses, draws, strict=True))
    return [TrainSequence(r.ids, r.prompt_length, r.columns, float(a), i % 5 != 4) for i, (r, a) in pairs]


def not_exact(row):
    """Returns the metrics that differ from their values without mismatch."""
    names = {k.removeprefix("mismatch/"): v for k, v in row.items() if k.startswith("mismatch/")}
    assert {*ZERO, "ppl_ratio"} <= names.keys()
    expected = {k: float(k == "ppl_ratio") for k in names if k in (*ZERO, "ppl_ratio") or k.startswith(ZERO_PREFIXES)}
    return {k: names[k] for k, v in expected.items() if names[k] != v}


def of_pass(asked):
    return {"reported": asked["reported"], "cut": "top_k" in asked} if asked else {}


def published(exact, state, version=0):
    engine = ExactEngine(exact)
    engine.publish(state.params, version)
    return engine


def trained(dtype, steps, asked=None, **options):
    """Returns the rows of some steps of sampling and training. ``asked`` has the cut and the reported tokens."""
    asked = asked or {}
    exact, update, state = make(dtype, **options, **of_pass(asked))
    engine, rows = ExactEngine(exact), []
    for step in range(steps):
        engine.publish(state.params, step)
        sequences = to_train(draw(engine, seed=step, **asked), step)
        state, row, _, trainer = update(state, update.pack(sequences), sequences, UpdateOptions(1e-2, 0, step == 0))
        for sequence, ours in zip(sequences, trainer().logprobs, strict=True):
            np.testing.assert_array_equal(ours, sequence["rollout_logprobs"])
        rows.append(row)
    return rows


# integration/test_exact_run.py has whole runs in 16 bits, and test_the_gradient_is_that_of_the_packed_step has a cut.
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        *(pytest.param(dtype, {}, marks=pytest.mark.harness) for dtype in ("float32", "bfloat16", "float16")),
        *(pytest.param("bfloat16", {"asked": asked}, marks=pytest.mark.harness) for asked in (CUT, {"reported": 3})),
        pytest.param("bfloat16", {"loss": WITH_REFERENCE, "head": "float32"}, marks=pytest.mark.harness),
        pytest.param("bfloat16", {"mesh": (2, 2)}, marks=pytest.mark.mesh),
    ],
    ids=str,
)
def test_the_mismatch_is_exactly_zero_at_every_step_of_training(dtype, options):
    """A reference, and a head in float32, are scored by the same executable."""
    rows = trained(dtype, 3, **options)
    for number, row in enumerate(rows):
        assert not_exact(row) == {}
        assert "loss" not in options or (row["policy/reference_kl"] > 0.0) == (number > 0)
        assert row["optimizer/grad_norm"] > 0
        assert row["optimizer/skipped_updates"] == 0
        assert row["precision/loss_scale"] == (2.0**15 if dtype == "float16" else 1.0)
        assert 0.5 < row["policy/entropy"] < (np.log(5) if options.get("asked") == CUT else np.log(24))
    assert len({row["mismatch/training_log_ppl"] for row in rows}) == 3
    assert rows[0]["optimizer/grad_noise"] > 0
    assert "optimizer/grad_noise" not in rows[1]


def test_each_token_follows_from_its_row_and_the_seed():
    """A sample of a categorical distribution is the largest of log-probability plus Gumbel noise."""
    exact, _, state = make()
    responses, every = draw(published(exact, state, 7), seed=11), []
    for first in range(0, COUNT, ROWS):
        batch = [r.ids for r in responses[first : first + ROWS]]
        tokens = np.stack([np.pad(ids, (0, ROW_TOKENS - len(ids))) for ids in batch])
        every.extend(np.asarray(exact.log_softmax(state.params, tokens, np.int32([len(ids) for ids in batch]), 0.8)))
    for r, said in zip(responses, every, strict=True):
        for position, token in enumerate(r.response):
            kept, key = said[r.prompt_length + position - 1], jax.random.key(11)
            for number in (r.prompt_index, r.sample_index, position):
                key = jax.random.fold_in(key, number)
            assert int(np.argmax(kept + np.asarray(jax.random.gumbel(key, kept.shape)))) == token
            assert kept[token] == r["rollout_logprobs"][position]
            assert np.exp(kept, dtype=np.float64).sum() == pytest.approx(1.0, abs=1e-5)
        assert set(r.versions.tolist()) == {7}


def test_responses_end_with_a_stop_token_or_at_the_limit():
    exact, _, state = make()
    engine = published(exact, state)
    responses = draw(engine, 6)
    assert {r.truncated for r in responses} == {True, False}
    for r in responses:
        assert not set(r.response[:-1]) & set(STOPS)
        assert r.truncated == (r.response[-1] not in STOPS)
        assert not r.truncated or r.length == LIMIT
        assert r["version"].shape == (r.length,)
    assert_same_bits(draw(engine, 6), responses)
    # A sample depends on its own prompt and number, not on how many there are.
    for r in draw(engine):
        np.testing.assert_array_equal(r.response, responses[6 * r.prompt_index + r.sample_index].response)
    other = draw(engine, 6, seed=1)
    assert any(list(r.response) != list(s.response) for r, s in zip(responses, other, strict=True))


def test_greedy_takes_the_argmax_and_scores_it_at_temperature_1():
    exact, _, state = make("float32")
    score = make_scorer(CONFIG, jnp.float32, multiple=16)
    for r in draw(published(exact, state), 1, temperature=0.0, stops=(), limit=3):
        prompt = PROMPTS[r.prompt_index]
        for i, token in enumerate(r.response):
            context = np.concatenate([prompt, r.response[:i]])
            every = [values[-1] for values in score(state.params, [np.append(context, t) for t in range(24)])]
            assert int(np.argmax(every)) == token
            assert r["rollout_logprobs"][i] == pytest.approx(every[token], abs=2e-5)


@pytest.mark.parametrize("asked", [pytest.param({}, marks=pytest.mark.harness), CUT], ids=["whole", "cut"])
def test_the_gradient_is_that_of_the_packed_step(asked):
    """If sampling is cut, the trainer's scores of the support have the bits of the engine's scores."""
    exact, update, state = make("float32", tx=keep_gradient(), **of_pass(asked))
    sequences = to_train(draw(published(exact, state), **asked))
    shape = (max_micro_batches(COUNT, 16, 32, 2), 2, 32)
    step = make_step(shape=shape, count=COUNT, limit=LIMIT, temperature=0.8, cut=bool(asked))
    packed = pack(sequences, row_tokens=32, rows_per_micro_batch=2, micro_batches=shape[0])
    expected, metrics, _ = step(fresh_state(), packed, 1e-2, True)
    found = update(state, update.pack(sequences), sequences, UpdateOptions(1e-2, 0, False))
    check_close(*(one.opt_state.inner_state.trace for one in (found.state, expected)))
    for name in ("policy/loss", "policy/entropy", "optimizer/grad_norm", "precision/activation_max"):
        assert found.row[name] == pytest.approx(float(metrics[name]), rel=1e-4, abs=1e-6), name
    assert found.row["mismatch/logprob_abs_diff_max"] == 0.0
    assert not asked or any((s["top_ids"] < 0).any() for s in sequences)


def test_sequences_lie_where_they_were_drawn():
    """Trajectory 1 failed before its first token, so it has no sequence."""
    lengths, numbers = [3, 1, 2, 4, 2], [0, 2, 3, 4, 5]
    pairs = enumerate(zip(lengths, numbers, strict=True))
    batch = lay_out([train_sequence([9, 9], [i] * n, trajectory=number) for i, (n, number) in pairs], 2, 8)
    assert batch.tokens.shape == (3, 2, 8)
    assert int(batch.used) == 3
    for i, n in enumerate(lengths):
        row = numbers[i] // 2, numbers[i] % 2
        assert batch.tokens[row].tolist() == [9, 9] + [i] * n + [0] * (6 - n)
        assert batch.sequence_ids[row].tolist() == [i] * (2 + n) + [0] * (6 - n)
        assert batch.response_mask[row].tolist() == [False] * 2 + [True] * n + [False] * (6 - n)
    assert not batch.segment_ids[0, 1].any()


def test_what_does_not_fit_is_refused():
    exact, _, state = make()
    with pytest.raises(RuntimeError, match="no policy was published"):
        draw(ExactEngine(exact))
    with pytest.raises(ValueError, match=r"a prompt has 6 tokens, expected 1 to 5: rows of 16 .*= 11"):
        draw(published(exact, state), limit=11)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rollout": RolloutConfig(engine="exact", dtype="float16")}, "must be precision.compute_dtype = bfloat16"),
        ({"loss": LossConfig(epochs=2)}, "makes one update a step"),
        ({"loss": LossConfig(mini_batches=2)}, "makes one update a step"),
        ({"loss": WITH_REFERENCE, "correction": NORMALIZED}, "correction.normalize must be false"),
        ({"correction": CorrectionConfig(preset="m2po")}, "correction.region = moment needs a forward before the up"),
    ],
)
def test_one_executable_means_one_dtype_and_one_update(settings, said):
    with pytest.raises(ValueError, match=said):
        Config(**{"rollout": RolloutConfig(engine="exact"), **settings})


BEGINNINGS = [np.asarray([1, 2, 3][: 1 + key % 3], np.int32) for key in range(6)]
TURNS = [3, 1, 2, 1, 1, 3]  # turns of each trajectory: trajectories 1 and 5 share a row of the executable
ENVIRONMENT = np.asarray([20, 21], np.int32)
LIMITS = SamplingParams(6, 0.8, (0, 5))
LONGER = 24  # tokens of a row


def room(tokens):
    return min(6, LONGER - len(tokens))


def converse(engine):
    """Returns the trajectories as sequences to train on, and the metrics of sampling them."""
    queue, recorders = TurnQueue(6), [TokenRecorder(prompt) for prompt in BEGINNINGS]
    for key, prompt in enumerate(BEGINNINGS):
        queue.put(TurnRequest(key, 1, prompt, room(prompt)))
    samples = engine.answer(queue, LIMITS, seed=0)
    for response in samples:
        key, turn = response.prompt_index, response.sample_index + 1
        assert response.length <= room(recorders[key].tokens())
        recorders[key].add_turn(response)
        if turn == TURNS[key] or len(recorders[key].tokens()) + 2 >= LONGER:
            queue.end(key)
            continue
        recorders[key].add_text(ENVIRONMENT)
        tokens = recorders[key].tokens()
        queue.put(TurnRequest(key, turn + 1, tokens, room(tokens)))
    rows = [recorder.response(key, 0, truncated=False) for key, recorder in enumerate(recorders)]
    sequences = [TrainSequence(r.ids, r.prompt_length, r.columns, (-1.0) ** key) for key, r in enumerate(rows)]
    return sequences, samples.metrics


def test_trajectories_of_several_turns_have_no_mismatch():
    objective, state = Objective(LossConfig(), UNCORRECTED, 6, LONGER), fresh_state()
    how = {"precision": PrecisionConfig("bfloat16")}
    exact = ExactPass(CONFIG, MESH, **how, objective=objective, rows=ROWS, row_tokens=LONGER)
    how |= {"temperature": 0.8, "diagnosis": DiagnosisConfig()}
    engine, update = ExactEngine(exact), ExactUpdate(exact, CONFIG, keep_gradient(), **how)
    engine.publish(state.params, 0)
    sequences, metrics = converse(engine)
    assert {int(sequence.turns.max()) for sequence in sequences} == {1, 2, 3}
    assert metrics["rollout/executable_runs"] >= 5  # two rows in the first round, and two more rounds
    found = update(state, update.pack(sequences), sequences, UpdateOptions(1e-2, 0, False))
    for sequence, trainer in zip(sequences, found.trainer().logprobs, strict=True):
        sampled = sequence.turns > 0
        np.testing.assert_array_equal(trainer[sampled], sequence["rollout_logprobs"][sampled])
    assert found.row["mismatch/logprob_abs_diff_max"] == 0.0
    assert found.row["optimizer/grad_norm"] > 0
    queue = TurnQueue(1)  # a turn that does not fit a row is refused
    queue.put(TurnRequest(0, 3, np.ones(20, np.int32), 5))
    said = "turn 3 of trajectory 0 would have 20 tokens before it and up to 5 of its own; rows have 24"
    with pytest.raises(ValueError, match=said):
        list(engine.answer(queue, LIMITS, seed=0))
