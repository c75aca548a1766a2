"""Groups without signal are replaced: the problems of each batch, the counts of its row, and resumes."""

import numpy as np
import pytest
from scripted_engine import RowList, ScriptedEngine
from scripted_runs import TOKENIZER, half_right, opened_parts, settings, sum_of, trained

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
    """An engine whose groups have signal for some prompts, with answers of 4 and of 2 tokens, not two of 8 tokens.

    Each request has its own order of responses. The calls in ``lost`` fail in their middle.
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
    counts = {"rollout/refilled_groups": 3, "rollout/refill_rounds": 2, "rollout/refilled_tokens": 3 * 2 * 8}
    assert (counts | {"rollout/requests": 14, "reward/errors": 0}).items() <= sampled.row.items()
    np.testing.assert_array_equal(sampled.rewards, [[1.0, 0.0]] * 4)
    # Four groups have 4 and 2 tokens, and three have 8 and 8: 14 responses of 72 tokens, and 4 of them are right.
    row, lengths = rollout_row(sampled, policy_version=0), ("mean", "max", "truncated_fraction")
    assert [row[f"response_length/{name}"] for name in lengths] == pytest.approx([72 / 14, 8.0, 0.0])
    assert (row["reward/mean"], row["reward/groups_with_signal"]) == pytest.approx((4 / 14, 4 / 7))
    assert (sampled.num_tokens, len(sampled.all())) == (72, 8)


def test_at_the_limit_the_earliest_groups_fill_the_batch():
    """The batch and four further rounds have signal in problems 1 and 6 alone. Problems 0 and 2 fill the batch up."""
    sampled, places, engine, drawn = sample(".S....S......")
    assert places == [1, 6, 0, 2]
    assert (drawn, len(engine.asked)) == (13, 5)
    assert sampled.row["rollout/refilled_groups"] == 9
    assert rollout_row(sampled, 0)["reward/groups_with_signal"] == pytest.approx(2 / 13)
    # Without signal the first batch comes back.
    sampled, places, engine, drawn = sample("." * 20)
    assert (places, drawn, len(engine.asked)) == ([0, 1, 2, 3], 20, 5)
    assert sampled.row["rollout/refilled_groups"] == 16
    # A batch with signal is sampled as without refilling.
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


def test_any_number_of_problems_goes_on_across_epochs():
    stream = PromptStream(PROBLEMS, SIZE, SEED)
    taken = [stream.take(count) for count in (4, 3, 1, 15, 2, 20)]
    drawn = in_order(45)
    assert [problem["prompt"] for batch in taken for problem in batch] == drawn
    assert sorted(drawn[:17]) == sorted(drawn[17:34]) == [problem["prompt"] for problem in PROBLEMS]


WITH_SIGNAL = {prompt for i, prompt in enumerate(in_order(17)) if i % 3 != 1}
STEPS = 5


def expected_batches():
    """Returns the prompts of each batch and the number of problems drawn after it, by the rule written once more."""
    order, at, batches = in_order(300), 0, []
    for _ in range(STEPS):
        signal, silent = [], []
        for _ in range(1 + REFILL_LIMIT):
            asked = SIZE - len(signal)
            for prompt in order[at : at + asked]:
                (signal if prompt in WITH_SIGNAL else silent).append(prompt)
            at += asked
        batches.append((signal + silent[: SIZE - len(signal)], at))
    return batches


def go_on(engine, k, first=1, at=0):
    sampler, stream = refilling(engine)
    stop = StopRequest()
    batches = Batches(stream, sampler.sample)
    if k:
        batches = BatchesAhead(stream, sampler.sample, engine, stop, steps=STEPS, max_staleness=k)
    batches.load_state_dict({"problems_drawn": at})
    assert batches.state_dict() == {"problems_drawn": at}
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


@pytest.mark.parametrize("k", [0, 1, pytest.param(3, marks=pytest.mark.harness)])
def test_batches_are_those_of_the_rule(k):
    expected = expected_batches()
    assert any(drawn % SIZE for _, drawn in expected)
    engine = Shuffled(WITH_SIGNAL)
    assert go_on(engine, k) == expected
    assert [prompt for prompts in engine.asked for prompt in prompts] == in_order(expected[-1][1])
    assert go_on(Shuffled(WITH_SIGNAL), k, first=3, at=expected[1][1]) == expected[2:]


@pytest.mark.parametrize("lost", [[2], *(pytest.param([n], marks=pytest.mark.harness) for n in (1, 3))])
def test_a_lost_batch_takes_its_own_problems_again(lost):
    """Whichever round is lost, the batch begins again with its first problems, and the next batch follows it."""
    engine = Shuffled(WITH_SIGNAL, lost)
    assert go_on(engine, 1) == expected_batches()
    assert len(engine.asked) > len(lost) + STEPS


def odd_sums_have_signal(prompt, sample, seed):
    return half_right(prompt, sample, seed) if int(sum_of(prompt)) % 2 else "7777777$"


def test_a_run_trains_on_full_batches(tmp_path):
    rows, engine = RowList(), ScriptedEngine(TOKENIZER, odd_sums_have_signal)
    with opened_parts(settings(tmp_path / "run", rollout={"refill": True}), engine) as (parts, _):
        trained(parts, rows)
    assert {2} < {len(prompts) for prompts in engine.asked}
    assert any(row["rollout/refilled_groups"] for row in rows)
    for row in rows:
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
    # The mean of the batch would carry loss.
    with pytest.raises(ValueError, match=r"^rollout\.refill .* advantage\.estimator = reinforce they carry loss"):
        Config(rollout=RolloutConfig(refill=True), advantage=AdvantageConfig(estimator="reinforce"))
