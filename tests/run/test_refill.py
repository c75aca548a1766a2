"""Groups without signal are replaced: the problems of each batch, the counts of its row, and resumes."""

import jax
import numpy as np
import pytest
from scripted_engine import RowList, ScriptedEngine
from scripted_runs import TOKENIZER, Stop, compiled_step, half_right, opened_parts, settings, sum_of, trained
from toy_runs import without_clock

from rljax.algorithms.advantages import AdvantageConfig
from rljax.data.prompts import PromptStream
from rljax.errors import ServersLostError
from rljax.rewards.pool import RewardPool
from rljax.rollout.types import RolloutConfig, SamplingParams
from rljax.run.config import Config
from rljax.run.pipeline import Batches, BatchesAhead
from rljax.run.sampling import REFILL_LIMIT, RefillingSampler, Sampler, SingleTurn, rollout_row, step_seed, sum_rows
from rljax.run.stop import StopRequest, Timers

PROBLEMS = [{"prompt": f"{i}+0=", "answer": str(i)} for i in range(100, 117)]
SEED, SIZE = 5, 4


def in_order(count):
    """Returns the prompts of the first problems of the stream, which starts again after the last problem."""
    return [problem["prompt"] for problem in PromptStream(PROBLEMS, SIZE, SEED).take(count)]


class Shuffled(ScriptedEngine):
    """An engine whose groups have signal for the prompts in ``with_signal``, with answers of 4 and of 2 tokens.

    Other groups have two wrong answers of 8 tokens. Each request has its own order of responses. The calls in ``lost``
    fail in their middle.
    """

    def __init__(self, with_signal, lost=()):
        super().__init__(TOKENIZER, self.answer)
        self.with_signal, self.lost, self.seeds, self.published = with_signal, list(lost), [], [0]

    def answer(self, prompt, sample, seed):
        if prompt not in self.with_signal:
            return "7777777$"
        return "7$" if sample else f"{prompt[:3]}$"

    def respond(self, prompts, n, sampling, seed, metrics):
        self.seeds.append(seed)
        responses = list(super().respond(prompts, n, sampling, seed, metrics))
        for count, k in enumerate(np.random.default_rng(len(self.asked)).permutation(len(responses))):
            if count == 1 and len(self.asked) in self.lost:
                raise ServersLostError("none is left")
            yield responses[k]


def refilling(engine, **advantage):
    """Returns a sampler that refills, and its stream."""
    rollout = RolloutConfig(group_size=2, max_response_tokens=8, refill=True)
    config = Config(rollout=rollout, advantage=AdvantageConfig(**advantage))
    stream = PromptStream(PROBLEMS, SIZE, SEED)
    source = SingleTurn(engine, TOKENIZER, RewardPool("addition", 0))
    sampler = Sampler(source, SamplingParams(8, 1.0, (14,)), 2, seed=SEED)
    return RefillingSampler(sampler, stream, config), stream


def prompts_of(sampled):
    return [TOKENIZER.decode(group[0].prompt) for group in sampled.responses]


def sample(signal, size=SIZE, **advantage):
    """Samples step 3. The characters of ``signal`` mark the stream's problems, and S stands for signal."""
    prompts = in_order(len(signal))
    engine = Shuffled({prompt for prompt, mark in zip(prompts, signal, strict=True) if mark == "S"})
    sampler, stream = refilling(engine, **advantage)
    sampled = sampler.sample(stream.take(size), 3)
    places = [prompts.index(prompt) for prompt in prompts_of(sampled)]
    return sampled, places, engine, stream.state_dict()["problems_drawn"]


def test_further_rounds_replace_groups_until_none_lacks():
    """Two of the problems 0 to 3 lack signal, and 4 and 5 replace them. Problem 4 has none either, so 6 replaces it."""
    sampled, places, engine, drawn = sample("S.S..SS")
    assert places == [0, 2, 5, 6]
    assert [len(prompts) for prompts in engine.asked] == [4, 2, 1]
    assert engine.seeds == [step_seed(SEED, 3), step_seed(SEED, 3, 1), step_seed(SEED, 3, 2)]
    assert drawn == 7
    assert sampled.row["rollout/refilled_groups"] == 3
    assert sampled.row["rollout/refill_rounds"] == 2
    assert sampled.row["rollout/refilled_tokens"] == 3 * 2 * 8
    assert sampled.row["rollout/requests"] == 14
    assert sampled.row["reward/errors"] == 0
    np.testing.assert_array_equal(sampled.rewards, [[1.0, 0.0]] * 4)


def test_the_row_measures_all_that_was_sampled():
    """Four groups have 4 and 2 tokens, and three have 8 and 8: 14 responses of 72 tokens, and 4 of them are right."""
    rollouts = sample("S.S..SS")[0]
    row = rollout_row(rollouts, policy_version=0)
    assert row["response_length/mean"] == pytest.approx(72 / 14)
    assert row["response_length/max"] == 8.0
    assert row["response_length/truncated_fraction"] == 0.0
    assert row["reward/mean"] == pytest.approx(4 / 14)
    assert row["reward/groups_with_signal"] == pytest.approx(4 / 7)
    assert rollouts.num_tokens == 72
    assert len(rollouts.all()) == 8


def test_at_the_limit_the_earliest_groups_fill_the_batch():
    """The batch and four further rounds have signal in problems 1 and 6 alone. Problems 0 and 2 fill the batch up."""
    sampled, places, engine, drawn = sample(".S....S......")
    assert places == [1, 6, 0, 2]
    assert (drawn, len(engine.asked)) == (13, 5)
    assert sampled.row["rollout/refilled_groups"] == 9
    assert rollout_row(sampled, 0)["reward/groups_with_signal"] == pytest.approx(2 / 13)


def test_no_signal_at_all_gives_the_first_batch_back():
    sampled, places, engine, drawn = sample("." * 20)
    assert places == [0, 1, 2, 3]
    assert (drawn, [len(prompts) for prompts in engine.asked]) == (20, [4] * 5)
    assert sampled.row["rollout/refilled_groups"] == 16


def test_a_batch_with_signal_is_sampled_as_without_refilling():
    sampled, places, engine, drawn = sample("SSSS")
    assert (places, drawn, engine.seeds) == ([0, 1, 2, 3], 4, [step_seed(SEED, 3)])
    counts = ("refilled_groups", "refill_rounds", "refilled_tokens")
    assert [sampled.row[f"rollout/{name}"] for name in counts] == [0, 0, 0]
    assert sampled.dropped is None


def test_a_group_that_the_penalty_gives_loss_is_kept():
    """All rewards are 0. Responses of 8 tokens are above a buffer of 4, so only groups of equal lengths lack signal."""

    class Uneven(Shuffled):
        def answer(self, prompt, sample, seed):
            return "7$" if sample and prompt in self.with_signal else "7777777$"

    prompts = in_order(5)
    sampler, stream = refilling(Uneven({prompts[0], prompts[3], prompts[4]}), overlong_buffer_tokens=4)
    sampled = sampler.sample(stream.take(3), 1)
    assert prompts_of(sampled) == [prompts[0], prompts[3], prompts[4]]
    assert sampled.row["rollout/refilled_groups"] == 2


def test_rounds_add_up_and_fractions_are_of_all_responses():
    rows = [{"time/generate_s": 1.0, "rollout/mixed_fraction": 0.5}, {"time/generate_s": 0.25, "rollout/retries": 2}]
    rows[1]["rollout/mixed_fraction"] = 0.0
    summed = {"time/generate_s": 1.25, "rollout/mixed_fraction": 0.375, "rollout/retries": 2}
    assert sum_rows(rows, [3, 1]) == summed


def test_seeds_of_rounds_are_those_of_no_step():
    steps = {step_seed(SEED, step) for step in range(500)}
    rounds = {step_seed(SEED, step, number) for step in range(100) for number in range(1, 5)}
    assert len(rounds) == 400
    assert not rounds & steps
    assert step_seed(SEED, 7, 0) == step_seed(SEED, 7)


def test_any_number_of_problems_goes_on_across_epochs():
    stream = PromptStream(PROBLEMS, SIZE, SEED)
    counts = [4, 3, 1, 15, 2, 20]
    taken = [stream.take(count) for count in counts]
    assert [problem["prompt"] for batch in taken for problem in batch] == in_order(sum(counts))
    for epoch in range(2):
        drawn = in_order(45)[17 * epoch : 17 * (epoch + 1)]
        assert sorted(drawn) == [problem["prompt"] for problem in PROBLEMS]
    resumed = PromptStream(PROBLEMS, SIZE, SEED)
    resumed.load_state_dict({"problems_drawn": 8})
    assert [resumed.take(count) for count in counts[3:]] == taken[3:]


# ---- batches ahead of training ---------------------------------------------------------------------------------------

WITH_SIGNAL = {prompt for i, prompt in enumerate(in_order(17)) if i % 3 != 1}
STEPS = 5


def expected_batches(steps=STEPS, size=SIZE):
    """Returns the prompts of each batch, and the number of problems drawn after it.

    The rule is written out once more.
    """
    order, at, batches = in_order(300), 0, []
    for _ in range(steps):
        signal, silent, rounds, asked = [], [], 0, size
        while True:
            for prompt in order[at : at + asked]:
                (signal if prompt in WITH_SIGNAL else silent).append(prompt)
            at, asked = at + asked, size - len(signal)
            if not asked or rounds == REFILL_LIMIT:
                break
            rounds += 1
        batches.append((signal + silent[: size - len(signal)], at))
    return batches


def go_on(engine, k, first=1, at=0):
    """Returns (prompts, problems drawn) of each batch from step ``first`` on."""
    sampler, stream = refilling(engine)
    stop = StopRequest()
    batches = Batches(stream, sampler.sample)
    if k:
        batches = BatchesAhead(stream, sampler.sample, engine, stop, steps=STEPS, max_staleness=k)
    batches.load_state_dict({"problems_drawn": at})
    batches.start(first - 1)
    found = []
    try:
        for step in range(first, STEPS + 1):
            sampled = batches.take(Timers(stop))
            found.append((prompts_of(sampled), batches.state_dict()["problems_drawn"]))
            with batches.paused({}, step, Timers(stop), drains=False):
                engine.publish({}, step)
    finally:
        batches.close()
    return found


@pytest.mark.parametrize("k", [0, 1, 3])
def test_batches_are_those_of_the_rule(k):
    expected = expected_batches()
    assert any(drawn % SIZE for _, drawn in expected)
    engine = Shuffled(WITH_SIGNAL)
    assert go_on(engine, k) == expected
    assert [prompt for prompts in engine.asked for prompt in prompts] == in_order(expected[-1][1])


@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_resume_loses_no_problem_and_uses_none_twice(k):
    expected = expected_batches()
    assert go_on(Shuffled(WITH_SIGNAL), k, first=3, at=expected[1][1]) == expected[2:]


@pytest.mark.parametrize("lost", [[1], [2], [3], [4]])
def test_a_lost_batch_takes_its_own_problems_again(lost):
    """Whichever round is lost, the batch begins again with its first problems, and the next batch follows it."""
    engine = Shuffled(WITH_SIGNAL, lost)
    assert go_on(engine, 1) == expected_batches()
    assert len(engine.asked) > len(lost) + STEPS


# ---- whole runs ------------------------------------------------------------------------------------------------------


def odd_sums_have_signal(prompt, sample, seed):
    return half_right(prompt, sample, seed) if int(sum_of(prompt)) % 2 else "7777777$"


def go(directory, update, *, stop_after=None, last_row=None):
    """Runs ``train`` from the state of a directory. Returns rows, engine and last weights."""
    config, rows = settings(directory, rollout={"refill": True}), RowList()
    engine = ScriptedEngine(TOKENIZER, odd_sums_have_signal)
    stop = Stop(0.0, lambda: len(rows) == stop_after)
    with opened_parts(config, engine, update=update, stop=stop) as (parts, _):
        *_, weights = trained(parts, rows, last_row, stop)
    return rows, engine, weights


def test_a_run_trains_on_full_batches_and_resumes(tmp_path):
    update = compiled_step(tmp_path / "update")
    whole, engine, weights = go(tmp_path / "whole", update)
    assert {2} < {len(prompts) for prompts in engine.asked}
    assert any(row["rollout/refilled_groups"] for row in whole)
    for row in whole:
        groups = 2 + row["rollout/refilled_groups"]
        assert row["reward/groups_with_signal"] == pytest.approx(2 / groups)
        assert row["reward/mean"] == pytest.approx(1 / groups)
        assert row["rollout/requests"] == 2 * groups
        # The trained batch has two groups with signal, each with a wrong answer of 8 tokens.
        assert row["mismatch/sequence_count"] == 4
        assert row["rollout/refilled_tokens"] == 16 * row["rollout/refilled_groups"]
        sampled = row["mismatch/token_count"] + row["rollout/refilled_tokens"]
        assert row["response_length/mean"] == pytest.approx(sampled / (2 * groups))
        assert row["perf/response_tokens_per_s"] * row["time/rollout_s"] == pytest.approx(sampled)
        assert row["optimizer/skipped_updates"] == 0
    first, before, _ = go(tmp_path / "run", update, stop_after=2)
    second, after, resumed = go(tmp_path / "run", update, last_row=first[-1])
    assert [row["step"] for row in second] == [3, 4]
    assert without_clock([*first, *second]) == without_clock(whole)
    assert before.asked + after.asked == engine.asked
    jax.tree.map(np.testing.assert_array_equal, resumed, weights)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_the_mean_of_the_batch_is_refused():
    with pytest.raises(ValueError, match=r"^rollout\.refill .* advantage\.estimator = reinforce they carry loss"):
        Config(rollout=RolloutConfig(refill=True), advantage=AdvantageConfig(estimator="reinforce"))
