"""Plays trajectories: the environment asks for turns, a server samples them, and the answers become rows."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from verifiers_rollouts import environment, shim
from verifiers_rollouts.client import Client, RefusedError
from verifiers_rollouts.join import Answered, Branch, UnmatchedBranchError, row_of, rows_of
from verifiers_rollouts.settings import EndError

SETUP_S = 300.0  # the longest time before the first turn, in which processes of tools are started (seconds)
LARGEST = 3e38  # the largest size of a reward


class Played(NamedTuple):
    """The end of a trajectory."""

    # The rows, whose reward is None if the trajectory failed. There are none if it failed before its first turn.
    rows: list[dict[str, Any]]
    failure: str  # the reason why it failed, or ""
    tools: Mapping[str, int]  # the numbers of calls of tools, and of errors and timeouts among them


class Player:
    """Plays trajectories. The turns are sampled by the servers of the run."""

    def __init__(self, run: Mapping[str, Any], settings: Mapping[str, Any], client: Client) -> None:
        """Loads the environment. ``verifiers`` and the environment may raise any error.

        Args:
          run: The run's configuration.
          settings: The settings of ``settings_of``.
        """
        data, rollout, episode = run["data"], run["rollout"], run["rollout"]["episode"]
        room = rollout["max_response_tokens"]
        turn = min(episode["max_turn_tokens"] or room, room)
        self.environment, self._client = environment.load(settings), client
        self._settings, self._urls, self._max_rows = settings, rollout["urls"], episode["max_rows"]
        self._room = shim.Room(data["max_prompt_tokens"], room, turn, rollout["temperature"])
        self._reported = rollout["top_k"] or rollout["top_logprobs"]
        self._with_routes = rollout["router_replay"] == "r3"
        self._sampling = {name: rollout[name] for name in ("temperature", "top_p", "top_k", "min_p")} | {
            "logprobs": self._reported + 1 if self._reported else 0,
            "stop_token_ids": settings["renderer"]["stops"],
            "ignore_eos": True,
        }
        self._answered: dict[int, list[Answered]] = {}
        self._running: dict[shim.Asking, asyncio.Task[Any]] = {}
        self._keys = itertools.count()
        self._shim = shim.Shim(self._sample)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serves the turns and the tools of the environment while the block runs."""
        url = await self._shim.start()
        self._context = environment.model_context(self._settings, url, self._room.temperature)
        watch = asyncio.create_task(self._watch())
        try:
            async with self.environment.serving():
                yield
        finally:
            watch.cancel()
            await self._shim.close()

    async def play(self, task: Any) -> Played:
        """Plays a trajectory on a task of the environment."""
        asking = shim.Asking(next(self._keys), self._room)
        answered = self._answered[asking.key] = []
        playing = self._running[asking] = asyncio.create_task(self._play(asking, task))
        try:
            told = await playing
        finally:
            del self._running[asking], self._answered[asking.key]
        failure = f"{told['failure']}: {told['error']}" if told["failure"] else ""
        rows: list[dict[str, Any]] = []
        try:
            branches = [Branch(np.asarray(ids, np.int32), np.asarray(own, bool)) for ids, own in told["rows"]]
            rows = rows_of(answered, branches)
        except UnmatchedBranchError as error:
            failure = f"unmatched: {error}"
        if len(rows) > self._max_rows:
            failure = failure or f"rows: it has {len(rows)}, more than rollout.episode.max_rows = {self._max_rows}"
            rows = rows[: self._max_rows]
        if not failure and not rows:
            failure = "environment: it ended without a turn"
        if not failure and abs(told["reward"]) > LARGEST:
            failure = f"unscored: the reward is {told['reward']}"
        if answered and not rows:
            rows = [row_of(answered, [0], np.concatenate([answered[0].tokens, answered[0].token_ids]), 0)]
        truncated = asking.is_full or bool(answered and answered[-1].truncated)
        of_all = {"reward": None if failure else told["reward"], "truncated": truncated}
        return Played([row | of_all for row in rows], failure, told["tools"])

    async def _play(self, asking: shim.Asking, task: Any) -> dict[str, Any]:
        traces: list[Any] = []

        def begin(trace: Any) -> None:
            traces.append(trace)
            self._shim.sessions[trace.id] = asking, trace.agent.trainable

        try:
            return await environment.play(self.environment, task, self._context, begin)
        except environment.UnfitError as error:
            raise EndError(str(error)) from error
        except asyncio.CancelledError:
            if not asking.is_late:
                raise
            limit = self._settings["call_timeout_s"]
            return environment.ended("timeout", f"the environment took more than {limit:g} s", traces)
        except Exception as error:  # an environment may raise anything
            return environment.ended("environment", f"{type(error).__name__}: {error}", traces)
        finally:
            for trace in traces:
                self._shim.sessions.pop(trace.id, None)

    async def _watch(self) -> None:
        """Ends trajectories whose environment takes too long between two turns."""
        while True:
            await asyncio.sleep(1.0)
            for asking, task in self._running.items():
                limit = self._settings["call_timeout_s"] if asking.turns else SETUP_S
                if asking.since is not None and time.monotonic() - asking.since > limit:
                    asking.is_late = True
                    task.cancel()

    async def _sample(self, asking: shim.Asking, tokens: list[int], max_tokens: int, is_kept: bool) -> dict[str, Any]:
        """Returns a server's answer to a turn; keeps it if ``is_kept``. The environment's time leaves out the wait."""
        asking.since = None
        url = f"{self._urls[asking.key % len(self._urls)]}/inference/v1/generate"
        try:
            body = {"token_ids": tokens, "sampling_params": self._sampling | {"max_tokens": max_tokens}}
            (choice,) = (await self._client.ask(url, body))["choices"]
            answer = self._read(tokens, choice)
        except (RefusedError, EndError) as error:
            raise shim.RefusedTurnError(str(error)) from error
        except (KeyError, TypeError, ValueError) as error:
            raise shim.RefusedTurnError(f"{url} answers in another form: {type(error).__name__}, {error}") from error
        finally:
            asking.since = time.monotonic()
        if is_kept and asking.key in self._answered:  # The trajectory may have ended meanwhile.
            self._answered[asking.key].append(answer)
        logprobs = answer.columns["logprobs"]
        return {"token_ids": choice["token_ids"], "logprobs": logprobs, "truncated": answer.truncated}

    def _read(self, tokens: list[int], choice: Mapping[str, Any]) -> Answered:
        scored = choice["logprobs"]["content"]
        columns: dict[str, Any] = {
            "logprobs": [each["logprob"] for each in scored],
            "version": list(versions_of(choice)),
        }
        if self._reported:
            for column, name in (("top_ids", "token_id"), ("top_logprobs", "logprob")):
                columns[column] = [[one[name] for one in each["top_logprobs"]] for each in scored]
        routes: list[Any] = []
        if self._with_routes:
            found = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
            routes = found.reshape(len(found), -1).tolist()
        ids = np.asarray(choice["token_ids"], np.int32)
        return Answered(np.asarray(tokens, np.int32), ids, columns, choice["finish_reason"] == "length", routes)


def versions_of(choice: Mapping[str, Any]) -> Iterator[int]:
    """Yields the policy version of each token of a choice. A run names its versions RUN.NUMBER."""
    for span in choice["weight_versions"]:
        number = 0 if span["version"] == "default" else int(span["version"].rpartition(".")[2])
        yield from itertools.repeat(number, span["end"] - span["start"])
