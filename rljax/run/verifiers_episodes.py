"""Trajectories with environments of the library ``verifiers``, which runs the chat and asks for each turn."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rljax.data.encoding import TEMPLATED, prompt_ids
from rljax.data.prompts import Problem, template_arguments
from rljax.data.tokenizer import Tokenizer
from rljax.record.rows import Row
from rljax.rewards.resolve import is_reward
from rljax.rollout.engine import RolloutEngine, check_wanted
from rljax.rollout.episodes.config import EpisodeConfig
from rljax.rollout.episodes.recorder import Recorder
from rljax.rollout.episodes.verifiers.host import Ended, VerifiersHost, read_tasks
from rljax.rollout.episodes.verifiers.join import Answered, UnmatchedBranchError, rows_of
from rljax.rollout.turns import TurnQueue
from rljax.rollout.types import Response, SamplingParams
from rljax.run.config import Config
from rljax.run.config_file import read_document
from rljax.run.sampling import Begun, Scored
from rljax.run.stop import StopRequest

log = logging.getLogger(__name__)

PREFIX = "verifiers:"
"""The beginning of ``rollout.environment`` for an environment of verifiers."""

TASK = "verifiers_task"
"""The key of a problem that holds the position of its task in the taskset."""

_COUNTED = {
    "timeout": "turns/env_timeouts",
    "environment": "turns/env_errors",
    "process": "turns/env_deaths",
    "provider": "turns/provider_errors",
    "unscored": "turns/unscored",
    "rows": "turns/too_many_rows",
    "unmatched": "turns/unmatched",
}
_TOOLS = {"calls": "turns/tool_calls", "errors": "turns/tool_errors", "timeouts": "turns/tool_timeouts"}
_ENDLESS = 10_000  # the number of tasks that are taken from a taskset without end
_SILENCE_S = 30.0  # the time in addition to ``call_timeout_s``, because a busy process gives its sign of life late


def described(name: str) -> dict[str, Any]:
    """Returns the settings of an environment from its name: a YAML or TOML file of settings, or a taskset.

    Raises ValueError or ConfigError if the file cannot be read.
    """
    file = Path(name)
    if file.suffix == ".toml":
        try:
            read = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"rollout.environment: {name} cannot be read: {error}") from error
    elif file.suffix in (".yaml", ".yml"):
        read = read_document(file, {})
    else:
        return {"taskset": {"id": name}}
    if not isinstance(read, dict) or not isinstance(read.get("taskset"), dict):
        raise ValueError(f"rollout.environment: {name} must be a mapping with taskset: {{id: NAME}}, got {read!r}")
    return read


def program_settings(config: Config, stops: Sequence[int] = ()) -> dict[str, Any]:
    """Returns the first message to the process of verifiers: the settings of the environment and its renderer.

    The configuration has the local directory of the model. ``stops`` are the token ids that end a turn.

    Raises:
      ValueError: The file of the environment cannot be read.
    """
    data, episode = config.data, config.rollout.episode
    given = described((config.rollout.environment or "").removeprefix(PREFIX))
    renderer = {
        "directory": str(Path(config.model.path).absolute()),
        "stops": list(stops),
        "chat_template": data.chat_template is not False,
        "arguments": template_arguments(data.enable_thinking, data.chat_template_kwargs),
        **given.pop("renderer", {}),
    }
    return {
        "environment": given,
        "renderer": renderer,
        "paths": [str(Path.cwd())],
        "agent": {"max_turns": episode.max_turns},
        "tool_timeout_s": episode.tool_timeout_s,
        "call_timeout_s": episode.call_timeout_s,
    }


def verifiers_problems(config: Config) -> list[Problem]:
    """Returns a problem for each task of the taskset, or for the first 10,000 tasks of a taskset without end.

    Raises ValueError if the environment cannot be loaded, or has no task.
    """
    tasks = read_tasks(program_settings(config), _ENDLESS)
    if not tasks:
        raise ValueError(f"rollout.environment = {config.rollout.environment} has no task")
    # A task whose environment opens the chat has no text before that.
    return [
        {"prompt": task["text"] or f"task {i}", "answer": task["identity"], TASK: i, TEMPLATED: task["templated"]}
        for i, task in enumerate(tasks)
    ]


class VerifiersEpisodes:
    """A ``Source`` that samples trajectories in an environment of the library ``verifiers``."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Tokenizer,
        settings: Mapping[str, Any],
        config: EpisodeConfig,
        *,
        max_prompt_tokens: int,
        stop: StopRequest | None = None,
    ) -> None:
        """Starts the process of verifiers with the message of ``program_settings``.

        ``max_prompt_tokens`` is the longest first prompt. ``stop`` says whether sampling is given up; None: it never
        is.

        Raises:
          ValueError: The environment cannot be loaded.
        """
        self._engine, self._tokenizer, self._config = engine, tokenizer, config
        self._host = VerifiersHost(settings, config.call_timeout_s + _SILENCE_S)
        self._max_prompt_tokens, self._stop = max_prompt_tokens, stop or StopRequest()
        self._counts: Counter[str] = Counter()

    def begin(self, problems: Sequence[Problem], n: int, params: SamplingParams, seed: int) -> Begun:
        """Begins ``n`` trajectories of each problem. Raises the errors of ``Source.begin``."""
        prompts = [prompt_ids(problem, self._tokenizer) for problem in problems]
        metrics: Row = {}
        return Begun(self._scored(problems, prompts, n, params, seed, metrics), metrics)

    def pop_metrics(self) -> Row:
        """Returns the counts since the last call, of each kind of failure and of tools.

        ``reward/errors`` counts all failed trajectories, and ``reward/timeouts`` only the ones that took too long.
        """
        counts, self._counts = self._counts, Counter()
        row: Row = {
            "reward/errors": sum(counts[name] for name in _COUNTED.values()),
            "reward/timeouts": counts["turns/env_timeouts"],
        }
        return row | {name: counts[name] for name in [*_COUNTED.values(), *_TOOLS.values(), "turns/forked"]}

    def close(self) -> None:
        """Ends the process."""
        self._host.stop()

    def _scored(
        self,
        problems: Sequence[Problem],
        prompts: Sequence[np.ndarray],
        n: int,
        params: SamplingParams,
        seed: int,
        metrics: Row,
    ) -> Iterator[Scored]:
        """Yields all trajectories once the last one has ended."""
        room = params.max_response_tokens
        limit = self._config.turn_tokens(room)
        limits = {
            "prompt_tokens": self._max_prompt_tokens,
            "response_tokens": room,
            "turn_tokens": limit,
            "temperature": params.temperature,
        }
        tasks = {i * n + j: int(problem[TASK]) for i, problem in enumerate(problems) for j in range(n)}
        queue = TurnQueue(tasks, self._stop)
        self._host.begin(tasks, limits, queue)
        samples = self._engine.answer(queue, dataclasses.replace(params, max_response_tokens=limit), seed=seed)
        for response in samples:
            check_wanted(self._stop)
            self._stop.progress()
            self._host.answer(response)
        metrics |= samples.metrics
        outcomes = {key: self._outcome(self._host.ended[key], self._host.answered[key]) for key in sorted(tasks)}
        if not any(one.rows for one in outcomes.values()):
            said = next(iter(self._host.ended.values())).error
            raise RuntimeError(f"all {len(tasks)} trajectories of verifiers failed before their first token: {said}")
        metrics["turns/limited"] = sum(one.is_limited for one in outcomes.values())
        for key, one in outcomes.items():
            i, j = divmod(key, n)
            response = one.response(prompts[i], i, j)
            yield Scored(response, self._text(response), one.reward)

    def _text(self, response: Response) -> str:
        rows = ((row.response, row.turns) for row in response.rows)
        return "".join(self._tokenizer.decode(ids[turns > 0]) for ids, turns in rows)

    def _outcome(self, ended: Ended, answered: Sequence[Answered]) -> _Outcome:
        """Returns the part of a trajectory that is trained on. If the trajectory failed, counts the reason."""
        failure, error, rows = ended.failure, ended.error, list[Recorder]()
        try:
            rows = rows_of(answered, ended.branches)
        except UnmatchedBranchError as unmatched:
            failure, error = "unmatched", str(unmatched)
        self._counts["turns/forked"] += len(rows) > 1
        if failure is None and len(rows) > self._config.max_rows:
            failure = "rows"
            error = f"it has {len(rows)} rows of tokens, more than rollout.episode.max_rows = {self._config.max_rows}"
        if failure is None and ended.reward is not None and not is_reward(ended.reward):
            failure, error = "unscored", f"the reward is {ended.reward}, not a finite float32"
        if failure is None and not rows:
            failure, error = "environment", "it ended without a turn"
        for name, key in _TOOLS.items():
            self._counts[key] += ended.tools.get(name, 0)
        if failure is not None:
            if not any(self._counts[name] for name in _COUNTED.values()):
                log.warning("a trajectory of verifiers failed and carries no loss (%s): %s", failure, error)
            self._counts[_COUNTED[failure]] += 1
        is_cut = bool(answered) and answered[-1].response.truncated
        reward = math.nan if failure is not None or ended.reward is None else ended.reward
        return _Outcome(rows[: self._config.max_rows], reward, ended.is_full or is_cut, ended.is_full)


class _Outcome(NamedTuple):
    rows: list[Recorder]  # the rows of tokens
    reward: float  # the reward; NaN if the trajectory failed
    is_truncated: bool  # whether a limit ended the trajectory or its last turn
    is_limited: bool  # whether a turn was refused because no token was left

    def response(self, prompt: np.ndarray, prompt_index: int, sample_index: int) -> Response:
        """Returns the rows as one response to a problem with the ``prompt``."""
        made = [
            row.response(prompt_index, sample_index, truncated=self.is_truncated)
            for row in self.rows or [Recorder(prompt)]
        ]
        return dataclasses.replace(made[0], further=tuple(itertools.islice(made, 1, None)))
