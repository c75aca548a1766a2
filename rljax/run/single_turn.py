"""Responses of a single turn, each scored by a reward function as soon as it arrives."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait

from rljax.data.files import Problem
from rljax.data.prompts import prompt_ids
from rljax.data.tokenizer import Tokenizer
from rljax.record.rows import Row
from rljax.rewards.pool import RewardPool
from rljax.rollout.engine import RolloutEngine, check_wanted
from rljax.rollout.types import Response, SamplingParams
from rljax.run.sampling import Begun, Scored
from rljax.run.stop import StopRequest

TICK_S = 0.25  # the time between two checks whether to give up


class SingleTurn:
    """A ``Source`` of responses of one turn, which the pool ``rewards`` scores."""

    def __init__(
        self, engine: RolloutEngine, tokenizer: Tokenizer, rewards: RewardPool, stop: StopRequest | None = None
    ) -> None:
        """Samples nothing yet. Without ``stop``, sampling is never given up. ``close`` closes the pool ``rewards``."""
        self._engine, self._tokenizer, self._rewards, self._stop = engine, tokenizer, rewards, stop or StopRequest()

    def begin(self, problems: Sequence[Problem], n: int, params: SamplingParams, seed: int) -> Begun:
        """Begins to sample ``n`` responses to each problem. Raises the errors of ``Source.begin``."""
        prompts = [prompt_ids(problem, self._tokenizer) for problem in problems]
        samples = self._engine.generate(prompts, n, params, seed=seed)
        stop = self._tokenizer.template_stop
        responses = samples.responses if stop is None else count_missed_stops(samples.responses, stop, samples.metrics)
        return Begun(self._scored(problems, responses), samples.metrics)

    def pop_metrics(self) -> Row:
        """Returns ``reward/errors`` and ``reward/timeouts`` since the last call."""
        return dict(self._rewards.pop_metrics())

    def close(self) -> None:
        """Closes the pool of rewards."""
        self._rewards.close()

    def _scored(self, problems: Sequence[Problem], responses: Iterable[Response]) -> Iterator[Scored]:
        waiting: deque[tuple[Response, str, Future[float]]] = deque()

        def first_scored() -> Scored:
            response, text, reward = waiting.popleft()
            while not wait([reward], TICK_S).done:
                check_wanted(self._stop)
            self._stop.progress()
            return Scored(response, text, reward.result())

        for response in responses:
            check_wanted(self._stop)
            text, problem = self._tokenizer.decode(response.response), problems[response.prompt_index]
            waiting.append((response, text, self._rewards.submit(problem, text, response.truncated)))
            while waiting and waiting[0][2].done():
                yield first_scored()
        while waiting:
            yield first_scored()


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
