"""The responses of a step: sampled, scored as they arrive, and turned into the trainer's sequences.

A *group* is the responses to one problem. A group without signal, as with equal rewards, carries no loss and makes the
update noisier. With ``rollout.refill`` such groups of a batch are replaced by groups of further problems.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from rljax.algorithms.advantages import compute_advantages, groups_with_loss, groups_with_signal
from rljax.data.prompts import Problem, PromptStream, prompt_ids
from rljax.data.tokenizer import Tokenizer
from rljax.record.rows import Row
from rljax.rewards.pool import RewardPool
from rljax.rollout.engine import RolloutEngine, check_wanted
from rljax.rollout.types import Response, SamplingParams
from rljax.run.config import Config
from rljax.run.stop import StopRequest
from rljax.tokens import TOPS
from rljax.trainer.packing import TrainSequence

TICK_S = 0.25  # the time between two checks whether to give up


class Scored(NamedTuple):
    """A response to a problem, and its reward."""

    response: Response
    text: str  # the text of the response, without special tokens
    reward: float  # the reward; NaN for a trajectory that failed

    @property
    def place(self) -> tuple[int, int]:
        """The position of the problem, and the position (0 .. n-1) among the responses to it."""
        return self.response.prompt_index, self.response.sample_index


class Outcomes(NamedTuple):
    """The rewards and lengths of sampled groups."""

    rewards: np.ndarray  # the rewards, float32 [b, g]; NaN for a trajectory that failed
    lengths: np.ndarray  # the numbers of sampled tokens, int64 [b, g]
    truncated: np.ndarray  # whether the length limit ended the response, bool [b, g]

    def select(self, groups: np.ndarray) -> Outcomes:
        """Returns the outcomes of the groups with these numbers, in this order."""
        return Outcomes(*(part[groups] for part in self))

    def join(self, other: Outcomes) -> Outcomes:
        """Returns the outcomes of these groups, and then those of the groups of ``other``."""
        return Outcomes(*(np.concatenate(parts) for parts in zip(self, other, strict=True)))


@dataclass
class Rollouts:
    """The responses that a step trains on, and the measurements of their sampling."""

    responses: list[list[Response]]  # the g responses to each of b problems, in their order unless some were replaced
    rewards: np.ndarray  # the rewards, float32 [b, g]; NaN for a trajectory that failed
    dropped: Outcomes | None = None  # the outcomes of groups that were sampled for the step and replaced; None: none
    row: Row = field(default_factory=dict)  # the counts, seconds and fractions of the sampling, for the row of the step

    def all(self) -> list[Response]:
        """Returns all responses, prompt by prompt."""
        return [response for group in self.responses for response in group]

    def outcomes(self) -> Outcomes:
        """Returns the rewards, lengths and truncations of the groups that the step trains on, [b, g] each."""
        lengths = np.asarray([[response.length for response in group] for group in self.responses])
        truncated = np.asarray([[response.truncated for response in group] for group in self.responses])
        return Outcomes(self.rewards, lengths, truncated)

    def all_outcomes(self) -> Outcomes:
        """Returns the outcomes of all groups that were sampled for the step; replaced groups come last."""
        return self.outcomes() if self.dropped is None else self.outcomes().join(self.dropped)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that were sampled for the step, replaced groups included."""
        return int(self.all_outcomes().lengths.sum())


SampleStep = Callable[[Sequence[Problem], int], Rollouts]
"""A function (problems, step) -> the rollouts of the step, as many groups as there are problems.

It raises the errors of ``ResponseSource.begin``."""


def step_seed(seed: int, step: int, round_number: int = 0) -> int:
    """Returns an independent 32-bit seed for each step of a run, and for each further round of its sampling."""
    numbers = [seed, step, round_number] if round_number else [seed, step]
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


class Begun(NamedTuple):
    """Responses that are being sampled."""

    scored: Iterator[Scored]  # the scored responses as they arrive; it can be used once
    metrics: Row  # counts and seconds for the row of the step, complete once ``scored`` has ended
    silent: Sequence[str] = ()  # why trajectories failed before their first token; complete once ``scored`` has ended


class ResponseSource(Protocol):
    """An object that samples responses to problems and has each scored: of one turn, or with an environment."""

    def begin(self, problems: Sequence[Problem], n: int, params: SamplingParams, seed: int) -> Begun:
        """Begins to sample ``n`` responses to each problem.

        Errors come from this call or from the iteration over ``scored``.

        Raises:
          ValueError: The engine cannot take a prompt, or this number of prompts.
          RuntimeError: The engine is broken or gone for good.
          StoppedWaitingError: The run was asked to stop while responses were awaited.
        """

    def pop_metrics(self) -> Row:
        """Returns the counts since the last call; ``reward/errors`` counts responses that could not be scored."""

    def close(self) -> None:
        """Ends the processes that score the responses."""


@dataclass(eq=False)
class SingleTurn:
    """A ``ResponseSource`` of responses of one turn, which the pool ``rewards`` scores. ``close`` closes the pool."""

    engine: RolloutEngine
    tokenizer: Tokenizer
    rewards: RewardPool
    stop: StopRequest = field(default_factory=StopRequest)  # says whether sampling is given up

    def begin(self, problems: Sequence[Problem], n: int, params: SamplingParams, seed: int) -> Begun:
        """Begins to sample ``n`` responses to each problem. Raises the errors of ``ResponseSource.begin``."""
        prompts = [prompt_ids(problem, self.tokenizer) for problem in problems]
        samples = self.engine.generate(prompts, n, params, seed=seed)
        stop = self.tokenizer.template_stop
        responses = samples.responses if stop is None else count_missed_stops(samples.responses, stop, samples.metrics)
        return Begun(self._scored(problems, responses), samples.metrics)

    def pop_metrics(self) -> Row:
        """Returns ``reward/errors`` and ``reward/timeouts`` since the last call."""
        return dict(self.rewards.pop_metrics())

    def close(self) -> None:
        """Closes the pool of rewards."""
        self.rewards.close()

    def _scored(self, problems: Sequence[Problem], responses: Iterable[Response]) -> Iterator[Scored]:
        waiting: deque[tuple[Response, str, Future[float]]] = deque()

        def first_scored() -> Scored:
            response, text, reward = waiting.popleft()
            while not wait([reward], TICK_S).done:
                check_wanted(self.stop)
            self.stop.progress()
            return Scored(response, text, reward.result())

        try:
            with ended(responses):
                for response in responses:
                    check_wanted(self.stop)
                    text, problem = self.tokenizer.decode(response.response), problems[response.prompt_index]
                    waiting.append((response, text, self.rewards.submit(problem, text, response.truncated)))
                    while waiting and waiting[0][2].done():
                        yield first_scored()
                while waiting:
                    yield first_scored()
        finally:
            for _, _, reward in waiting:
                reward.cancel()


@contextlib.contextmanager
def ended(responses: Iterable[Response]) -> Iterator[None]:
    """Closes a stream of responses after a ``with`` block that may give it up. So all processes end the sampling."""
    try:
        yield
    finally:
        getattr(responses, "close", lambda: None)()


def count_missed_stops(responses: Iterable[Response], stop: int, metrics: Row) -> Iterator[Response]:
    """Yields the responses, and then writes ``response_length/missed_stop_fraction`` into ``metrics``.

    It is the fraction of responses that hold the token ``stop`` and did not end at it.
    """
    missed = count = 0
    for response in responses:
        inner = response.response if response.truncated else response.response[:-1]
        missed, count = missed + bool((inner == stop).any()), count + 1
        yield response
    if count:
        metrics["response_length/missed_stop_fraction"] = missed / count


@dataclass(eq=False)
class Sampler:
    """Samples batches of responses to problems from a source. Each step has a seed of its own."""

    source: ResponseSource  # the source of responses; its engine must have a policy before the first sampling
    params: SamplingParams
    n: int  # the number of responses to each problem
    _: KW_ONLY
    seed: int = 0
    counts_mixed: bool = False  # whether a batch reports ``rollout/mixed_fraction``

    def sample(self, problems: Sequence[Problem], step: int, round_number: int = 0) -> Rollouts:
        """Samples the rollouts of ``step``. Step and round number decide the seed.

        Raises the errors of ``ResponseSource.begin``, and RuntimeError if the engine returned too few responses, or all
        trajectories of the first round failed before their first token.
        """
        self.source.pop_metrics()  # the counts of a batch that was given up
        begun = self.source.begin(problems, self.n, self.params, step_seed(self.seed, step, round_number))
        by_place = {one.place: one for one in begun.scored}
        if len(by_place) != len(problems) * self.n:
            raise RuntimeError(f"the engine returned {len(by_place)} responses, expected {len(problems) * self.n}")
        if round_number == 0 and (count := len(begun.silent)) == len(by_place):
            raise RuntimeError(f"all {count} trajectories failed before their first token: {begun.silent[-1]}")
        groups = [[by_place[i, j] for j in range(self.n)] for i in range(len(problems))]
        rollouts = Rollouts(
            [[one.response for one in group] for group in groups],
            np.asarray([[one.reward for one in group] for group in groups], np.float32),
        )
        counts = self.source.pop_metrics()
        rollouts.row = {**counts, "reward/error_fraction": counts["reward/errors"] / len(by_place), **begun.metrics}
        if self.counts_mixed:
            rollouts.row["rollout/mixed_fraction"] = mixed_fraction(rollouts)
        return rollouts

    def scored(self, problems: Sequence[Problem], seed: int) -> Iterator[Scored]:
        """Yields scored responses in the order of arrival. Raises the errors of ``ResponseSource.begin``."""
        return self.source.begin(problems, self.n, self.params, seed).scored


def rollout_row(rollouts: Rollouts, policy_version: int) -> Row:
    """Returns the metrics of a batch. ``policy_version`` is the version of the policy before the update.

    Rewards and lengths cover all sampled responses, replaced groups included. Versions cover only the responses that
    are trained on. Lengths leave out trajectories without a token, unless there are no others.
    """
    rewards, lengths, truncated = rollouts.all_outcomes()
    known = rewards[~np.isnan(rewards)]
    if lengths.any():
        lengths, truncated = lengths[lengths > 0], truncated[lengths > 0]
    sampled = [response for response in rollouts.all() if response.length] or [rollouts.responses[0][0]]
    staleness = np.asarray([policy_version - response.versions[0] for response in sampled])
    return {
        "reward/mean": float(known.mean()) if known.size else math.nan,
        "reward/std": float(known.std()) if known.size else math.nan,
        "reward/groups_with_signal": float(groups_with_signal(rewards).mean()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/truncated_fraction": float(truncated.mean()),
        "rollout/policy_version": int(policy_version - staleness.max()),
        "rollout/staleness": float(staleness.mean()),
    }


def mixed_fraction(rollouts: Rollouts) -> float:
    """Returns the fraction of the responses that more than one policy version sampled."""
    return float(np.mean([len(response.versions) > 1 for response in rollouts.all()]))


def advantages_of(rollouts: Rollouts, config: Config) -> np.ndarray:
    """Returns the advantages of the responses that the step trains on, [b, g], with the penalty of long ones."""
    # The limit counts an environment's tokens, too, and it is the limit of a single row.
    longest = [[max(len(row.response) for row in one.rows) for one in group] for group in rollouts.responses]
    lengths = np.asarray(longest)
    limit = config.rollout.max_response_tokens
    return compute_advantages(rollouts.rewards, config.advantage, lengths=lengths, max_response_tokens=limit)


def training_sequences(rollouts: Rollouts, config: Config, policy_version: int) -> list[TrainSequence]:
    """Returns each row of each response with its advantage, and whether it carries loss.

    All rows of a trajectory have its advantage. A failed trajectory carries no loss. It has no row if it failed before
    its first token. Staleness is counted up to ``policy_version``, that of the policy before the update.

    Raises RuntimeError if ``rollout.top_logprobs`` or ``top_k`` asked for likeliest tokens and a response has none.
    """
    advantages, reported = advantages_of(rollouts, config), config.rollout.reported
    in_loss = groups_with_loss(advantages)[:, None] & ~np.isnan(rollouts.rewards)
    lacking = sum("top_ids" not in response.columns and response.length > 0 for response in rollouts.all())
    if reported and lacking:
        raise RuntimeError(f"the engine reported no likeliest tokens for {lacking} of {advantages.size} responses")
    unused = ["version", *(() if reported else TOPS), *(() if config.rollout.router_replay == "r3" else ["routes"])]
    return [
        TrainSequence(
            row.ids,
            row.prompt_length,
            row.without(*unused).columns,
            float(advantages[i, j]),
            bool(in_loss[i, j]),
            i * len(group) + j,
        ).add({"staleness": policy_version - row["version"]})
        for i, group in enumerate(rollouts.responses)
        for j, response in enumerate(group)
        for row in response.trained_rows
    ]


REFILL_LIMIT = 4  # the most further rounds of a step


@dataclass(eq=False)
class RefillingSampler:
    """Samples batches as ``Sampler`` does, and replaces their groups without signal.

    A further *round* samples exactly as many new problems as groups are missing. So no group with signal is thrown
    away, and the order in which responses arrive does not matter. Rewards and lengths of replaced groups still count in
    the row of the step.
    """

    sampler: Sampler
    stream: PromptStream  # the problems of further rounds are its next ones
    config: Config

    def sample(self, problems: Sequence[Problem], step: int) -> Rollouts:
        """Samples the rollouts of ``step``, as many groups as there are ``problems``.

        The groups with signal come first, in the order of their problems. After ``REFILL_LIMIT`` further rounds the
        earliest groups without signal fill up the batch. Raises the errors of ``ResponseSource.begin``.
        """
        rollouts = self.sampler.sample(problems, step)
        signal = groups_with_loss(advantages_of(rollouts, self.config))
        rows, counts = [rollouts.row], [len(problems)]
        while not signal.all() and len(rows) <= REFILL_LIMIT:
            more = self.sampler.sample(self.stream.take(int((~signal).sum())), step, len(rows))
            rows.append(more.row)
            counts.append(len(more.responses))
            signal = np.concatenate([signal, groups_with_loss(advantages_of(more, self.config))])
            order = np.argsort(~signal, kind="stable")
            rollouts, signal = exchanged(rollouts, more, order), signal[order[: len(problems)]]
        dropped = rollouts.dropped
        replaced: Row = {
            "rollout/refilled_groups": 0 if dropped is None else len(dropped.rewards),
            "rollout/refill_rounds": len(rows) - 1,
            "rollout/refilled_tokens": 0 if dropped is None else int(dropped.lengths.sum()),
        }
        rollouts.row = sum_rows(rows, counts) | replaced
        return rollouts


def exchanged(rollouts: Rollouts, more: Rollouts, order: np.ndarray) -> Rollouts:
    """Returns the first groups, by ``order``, of ``rollouts`` and then ``more``: as many as ``rollouts`` has.

    The others become ``dropped``. Only their outcomes are kept, because their tokens may take much memory.
    """
    size, responses = len(rollouts.responses), rollouts.responses + more.responses
    gone = rollouts.outcomes().join(more.outcomes()).select(order[size:])
    rewards = np.concatenate([rollouts.rewards, more.rewards])[order[:size]]
    dropped = gone if rollouts.dropped is None else rollouts.dropped.join(gone)
    return Rollouts([responses[i] for i in order[:size]], rewards, dropped)


def sum_rows(rows: Sequence[Row], counts: Sequence[int]) -> Row:
    """Returns the row of all rounds: counts and seconds are added up, and fractions are averaged over the groups.

    ``counts`` has the number of groups of each round.
    """
    summed: Row = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(key, 0) for row in rows]
        is_fraction = key.endswith("_fraction")
        summed[key] = float(np.average(values, weights=counts)) if is_fraction else sum(values)
    return summed
