"""Trajectories of several turns: the trainer owns the loop between the policy and its environment.

The loop works on token ids. It keeps the ids that were sampled. It encodes each text of the environment by itself, and
appends the ids. Earlier tokens are never encoded again, so each turn's prompt extends the tokens before it. The engine
answers one trajectory while the environment of another one works, and no trajectory has a thread of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from rljax.data.files import COLUMNS, Problem, single_answer
from rljax.data.prompts import prompt_ids
from rljax.data.tokenizer import Tokenizer
from rljax.record.rows import Row
from rljax.rollout.engine import RolloutEngine, TurnQueue, TurnRequest, check_wanted
from rljax.rollout.episodes.config import EpisodeConfig
from rljax.rollout.episodes.environment import Content
from rljax.rollout.episodes.hosts import EnvironmentHosts
from rljax.rollout.episodes.outcomes import Outcome
from rljax.rollout.types import Response, SamplingParams
from rljax.run.sampling import TICK_S, Begun, Scored, ended
from rljax.run.stop import StopRequest
from rljax.tokens import TokenRecord, blank, join

log = logging.getLogger(__name__)
_REFUSED = "refused"  # the kind of a failure that is found here: a prompt or a reply that cannot be used


@dataclasses.dataclass(eq=False)
class Episodes:
    """A ``ResponseSource`` of trajectories of several turns with an environment."""

    engine: RolloutEngine
    tokenizer: Tokenizer  # its chat template renders messages of environments, with ``template_arguments``
    hosts: EnvironmentHosts  # the processes of the environments, which ``close`` ends
    config: EpisodeConfig
    _: dataclasses.KW_ONLY
    max_prompt_tokens: int  # the longest prompt that an environment may give; a trajectory with a longer one fails
    template_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stop: StopRequest = dataclasses.field(default_factory=StopRequest)  # says whether sampling is given up

    def __post_init__(self) -> None:
        self.numbers = itertools.count(1)  # the names of trajectories for the hosts
        self._failures: list[str] = []
        self._lock = threading.Lock()

    def begin(self, problems: Sequence[Problem], n: int, params: SamplingParams, seed: int) -> Begun:
        """Begins ``n`` trajectories of each problem. Raises the errors of ``ResponseSource.begin``."""
        batch = _Trajectories(self, problems, n, params, seed)
        return Begun(batch.scored(), batch.metrics, batch.silent)

    def failed(self, kind: str, message: str) -> None:
        """Counts a failed trajectory. Logs ``message`` if it is the first of kind "refused" since ``pop_metrics``.

        The hosts log all other kinds, which are failures of environments.
        """
        with self._lock:
            is_told = kind == _REFUSED and kind not in self._failures
            self._failures.append(kind)
        if is_told:
            log.warning("a trajectory failed and carries no loss: %s", message)

    def pop_metrics(self) -> Row:
        """Returns the counts since the last call.

        ``reward/errors`` counts all failed trajectories, and ``reward/timeouts`` only the ones that took too long.
        """
        with self._lock:
            failures, self._failures = self._failures, []
        counts = {"reward/errors": len(failures), "reward/timeouts": failures.count("timeout")}
        return counts | self.hosts.pop_metrics()

    def close(self) -> None:
        """Ends the environments' processes."""
        self.hosts.close()


class TokenRecorder:
    """One trajectory while its turns are sampled. It does no I/O, and keeps the engine's numbers bit for bit.

    ``prompt`` has the tokens before the first turn, and ``turn`` is the number of the last turn.
    """

    def __init__(self, prompt: np.ndarray) -> None:
        """Begins a trajectory that has no token behind ``prompt``, int32 [s], yet."""
        self.prompt, self.turn = prompt, 0
        self._pieces = [TokenRecord(prompt, len(prompt))]
        self._routes: list[np.ndarray] = []  # the routes of all tokens before the last one of the last turn

    @property
    def count(self) -> int:
        """The number of tokens behind the prompt."""
        return sum(len(piece.response) for piece in self._pieces)

    def tokens(self) -> np.ndarray:
        """Returns all tokens so far, prompt included, int32 [s + t]."""
        return np.concatenate([piece.ids for piece in self._pieces])

    def add_turn(self, response: Response) -> None:
        """Adds the tokens of a turn, which the engine sampled after the tokens of ``tokens()``."""
        self.turn += 1
        if "routes" in response.columns:  # A turn also reports the routes of the tokens before it.
            self._routes.append(response.columns["routes"][sum(map(len, self._routes)) : -1])
        turn = response.without("routes").add({"turn": np.full(len(response.response), self.turn)})
        self._pieces.append(turn.cut(turn.prompt_length))

    def add_text(self, token_ids: np.ndarray) -> None:
        """Adds the tokens of a text that the environment wrote. They have the version of the token before them."""
        last, text = self._pieces[-1].columns.get("version"), TokenRecord(token_ids, 0)
        known = {} if last is None else {"version": np.full(len(token_ids), last[-1])}
        self._pieces.append(text.add(known))

    def response(self, prompt_index: int, sample_index: int, *, truncated: bool) -> Response:
        """Returns the trajectory so far as one row, for sample ``sample_index`` of problem ``prompt_index``.

        ``truncated``: Whether a limit ended the trajectory.
        """
        row = join(self._pieces, len(self.prompt))
        if self._routes:
            unknown = blank("routes", len(row.ids) - sum(map(len, self._routes)), self._routes[0])
            row = row.add({"routes": np.concatenate([*self._routes, unknown])})
        return Response(row.ids, row.prompt_length, row.columns, prompt_index, sample_index, truncated)


@dataclasses.dataclass
class _Episode:
    key: int  # its number in the batch
    name: int  # its number for the hosts
    problem: Problem
    recorder: TokenRecorder
    texts: list[str] = dataclasses.field(default_factory=list)
    last: Response | None = None  # the newest turn


class _Trajectories:
    """The trajectories of one request. Methods that take outcomes run on threads of the hosts."""

    def __init__(
        self, episodes: Episodes, problems: Sequence[Problem], n: int, params: SamplingParams, seed: int
    ) -> None:
        """Begins nothing yet. ``Episodes.begin`` describes the arguments."""
        self._all, self._n, self._seed = episodes, n, seed
        self._room = params.max_response_tokens
        of_turn = min(episodes.config.max_turn_tokens or self._room, self._room)
        self._params = dataclasses.replace(params, max_response_tokens=of_turn)
        prompts = [prompt_ids(problem, episodes.tokenizer) for problem in problems]
        self.metrics: Row = {}
        self.silent: list[str] = []
        self._episodes = [
            _Episode(i * n + j, next(episodes.numbers), problem, TokenRecorder(prompts[i]))
            for i, problem in enumerate(problems)
            for j in range(n)
        ]
        self._queue = TurnQueue(len(self._episodes), episodes.stop, n)
        self._done: queue.SimpleQueue[Scored | BaseException] = queue.SimpleQueue()
        self._limited = 0

    def scored(self) -> Iterator[Scored]:
        """Yields the trajectories as their rewards arrive."""
        stop, left = self._all.stop, len(self._episodes)
        try:
            for episode in self._episodes:
                row = episode.problem.get(COLUMNS, {}) | episode.problem
                row["answer"] = single_answer(episode.problem)
                self._ask(episode, self._all.hosts.reset(episode.name, row), self._on_reset)
            samples = self._all.engine.answer(self._queue, self._params, seed=self._seed)
            with ended(samples.responses):
                for response in samples:
                    check_wanted(stop)
                    stop.progress()
                    self._take_turn(self._episodes[response.prompt_index], response)
                    for one in self._arrived():
                        yield one
                        left -= 1
            while left:
                check_wanted(stop)
                for one in self._arrived(TICK_S):
                    stop.progress()
                    yield one
                    left -= 1
            self.metrics |= samples.metrics
            self.metrics["turns/limited"] = self._limited
        finally:
            for episode in self._episodes:
                self._all.hosts.end(episode.name)

    def _arrived(self, wait_s: float = 0.0) -> Iterator[Scored]:
        """Yields the trajectories that are scored by now, or the first one within ``wait_s`` seconds."""
        while True:
            try:
                one = self._done.get(timeout=wait_s) if wait_s else self._done.get_nowait()
            except queue.Empty:
                return
            if isinstance(one, BaseException):
                raise one
            wait_s = 0.0
            yield one

    def _take_turn(self, episode: _Episode, response: Response) -> None:
        episode.recorder.add_turn(response)
        episode.last = response
        text = self._all.tokenizer.decode(response.response)
        episode.texts.append(text)
        self._ask(episode, self._all.hosts.step(episode.name, text, response.truncated), self._on_step)

    def _ask(self, episode: _Episode, asked: Future[Outcome], act: Callable[[_Episode, Any], None]) -> None:
        """Calls ``act`` with the value of the outcome when it arrives. A failed outcome ends the trajectory."""

        def settle(future: Future[Outcome]) -> None:
            try:
                outcome = future.result()
                if outcome.failure is not None:
                    self._fail(episode, outcome.failure, outcome.message)
                else:
                    act(episode, outcome.value)
            except BaseException as error:
                self._queue.fail(error)
                self._done.put(error)

        asked.add_done_callback(settle)

    def _on_reset(self, episode: _Episode, prompt: Content) -> None:
        """Asks for the first turn, after the prompt of the environment or else of the problem."""
        if prompt is not None:
            tokenizer, arguments = self._all.tokenizer, self._all.template_arguments
            try:
                if isinstance(prompt, str):
                    tokens = tokenizer.encode_prompt(prompt)
                else:
                    tokens = tokenizer.encode(tokenizer.render_chat(prompt, **arguments))
            except ValueError as error:
                self._fail(episode, _REFUSED, str(error))
                return
            longest = self._all.max_prompt_tokens
            if not 1 <= len(tokens) <= longest:
                got = f"the environment gave a prompt of {len(tokens)} tokens"
                self._fail(episode, _REFUSED, f"{got}, expected 1 to data.max_prompt_tokens = {longest}")
                return
            episode.recorder = TokenRecorder(tokens)
        self._put(episode)

    def _on_step(self, episode: _Episode, reply: Any) -> None:
        """Goes on with the environment's reply, or ends the trajectory."""
        recorder, last = episode.recorder, episode.last
        assert last is not None
        if reply.done:
            self._end(episode, truncated=last.truncated)
            return
        try:
            text = self._text_of(reply.content, last)
        except ValueError as error:
            self._fail(episode, _REFUSED, str(error))
            return
        tokens = self._all.tokenizer.encode(text)
        if recorder.turn >= self._all.config.max_turns or recorder.count + len(tokens) >= self._room:
            self._end(episode, truncated=True)
            return
        recorder.add_text(tokens)
        self._put(episode)

    def _text_of(self, content: Content, last: Response) -> str:
        """Returns the text that follows the turn ``last``. Raises ValueError if the chat template refuses it."""
        if content is None or isinstance(content, str):
            return content or ""
        tokenizer = self._all.tokenizer
        ended = int(last.response[-1]) == tokenizer.template_stop
        return tokenizer.render_reply(content, ended=ended, **self._all.template_arguments)

    def _put(self, episode: _Episode) -> None:
        """Asks the engine for the next turn."""
        recorder = episode.recorder
        most = min(self._params.max_response_tokens, self._room - recorder.count)
        self._queue.put(TurnRequest(episode.key, recorder.turn + 1, recorder.tokens(), most))

    def _end(self, episode: _Episode, *, truncated: bool) -> None:
        """Asks for the reward of a trajectory that has ended."""
        self._queue.end(episode.key)
        self._limited += truncated
        finish = functools.partial(self._finish, truncated=truncated)
        self._ask(episode, self._all.hosts.reward(episode.name), finish)

    def _fail(self, episode: _Episode, kind: str, message: str) -> None:
        """Ends a trajectory that cannot be scored."""
        self._queue.end(episode.key)
        if episode.last is None:
            self.silent.append(message)
        self._all.failed(kind, message)
        self._finish(episode, math.nan, truncated=episode.last is not None and episode.last.truncated)

    def _finish(self, episode: _Episode, reward: float, *, truncated: bool) -> None:
        place = divmod(episode.key, self._n)
        response = episode.recorder.response(*place, truncated=truncated)
        self._done.put(Scored(response, "".join(episode.texts), reward))
