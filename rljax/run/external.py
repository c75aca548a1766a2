"""Batches of trajectories that another program made (``rollout.trajectories``).

They come from a directory of files. Trajectories that arrive over HTTP are first written to such a directory,
``trajectories/`` in the run directory. A checkpoint says which rows were used, so that a resumed run loses none and
uses none twice. ``policy.json`` of the run directory tells the newest policy version to the other program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rljax.data.prompts import Problem, PromptStream
from rljax.distributed.files import write_whole
from rljax.errors import StoppedWaitingError, caller_errors, parse_json
from rljax.policy.config import PolicyConfig
from rljax.policy.model import Params
from rljax.rollout.external.queue import TrajectoryQueue, is_address
from rljax.rollout.external.rows import DOUBTS, MIXED, MIXED_REMEDY, RowLimits, Trajectory
from rljax.rollout.types import SamplingParams
from rljax.run.config import Config
from rljax.run.directory import saved_steps
from rljax.run.pipeline import Batches
from rljax.run.sampling import Rollouts, SampleStep
from rljax.run.stop import StopRequest, Timers

if TYPE_CHECKING:
    from rljax.rollout.external.receiver import Receiver

POLICY_FILE = "policy.json"
_TICK_S = 0.25  # between two looks into the directory
_FIRST_LINE_S, _LINES_S = 2.0, 60.0  # the wait before the first line about waiting, and the longest between two
_MOST_BATCHES = 16  # the largest number of batches that wait at the HTTP server


@dataclass(eq=False)
class ExternalBatches(Batches):
    """The batches of a run that trains on another program's trajectories, and the HTTP server that receives them."""

    sample_step: SampleStep = field(init=False)  # the method ``sample``
    queue: TrajectoryQueue
    stop: StopRequest  # the request to stop, which ends a wait
    _: KW_ONLY
    run_dir: Path  # the run directory, for ``policy.json``
    source: str  # the value of ``rollout.trajectories``
    receiver: Receiver | None  # the HTTP server that fills the queue; None: the queue reads a directory

    def __post_init__(self) -> None:
        self.sample_step, self._has_started, self._may_read = self.sample, False, True
        self._said: set[str] = set()  # the metrics of the doubts that were said

    def start(self, step: int) -> None:
        """Reads the unused rows of files that an earlier process began, and starts the server. Raises ConfigError."""
        super().start(step)
        with caller_errors(RuntimeError):
            highest = self._recorded_highest()
            if highest is None:
                highest = None if step else 0
            self.queue.start(step, None if highest is None else max(highest, step))
            self._tell(step)
            if self.receiver is not None:
                self.receiver.start()
                self._has_started = True
                print(f"trajectories are received at {self.receiver.url}/trajectories", file=sys.stderr, flush=True)

    def take(self, timers: Timers) -> Rollouts:
        """Returns the batch of the next step; received files that no checkpoint needs any more are deleted."""
        sampled = super().take(timers)
        if self.receiver is not None and (kept := saved_steps(self.run_dir)):
            self.receiver.delete_finished(kept[0])
        return sampled

    def sample(self, problems: Sequence[Problem], step: int) -> Rollouts:
        """Waits for as many complete groups as there are ``problems``. Only the number of ``problems`` matters.

        Raises StoppedWaitingError as soon as the run is asked to stop, and ConfigError if a row cannot be used.
        """
        began, count = time.perf_counter(), len(problems)
        next_line, interval = began + _FIRST_LINE_S, _FIRST_LINE_S
        while (groups := self.queue.take(count, step)) is None:
            if self.stop.is_requested():
                raise StoppedWaitingError("asked to stop while the run waited for trajectories of another program")
            with caller_errors():
                if self._may_read and self.queue.read_file():
                    self.stop.progress()
                    continue
            self._may_read = self.receiver is None  # The receiver adds its own files; those of before are read now.
            if time.perf_counter() >= next_line:
                print(f"step {step}: {self._waiting_line(count)}", file=sys.stderr)
                interval = min(2 * interval, _LINES_S)
                next_line = time.perf_counter() + interval
            if self.queue.wait(_TICK_S):
                self.stop.progress()
        waited_s = time.perf_counter() - began
        dropped_rows, self.queue.dropped_rows = self.queue.dropped_rows, 0
        responses = [
            [dataclasses.replace(one.response, prompt_index=i, sample_index=j) for j, one in enumerate(group)]
            for i, group in enumerate(groups)
        ]
        rewards = np.asarray([[one.reward for one in group] for group in groups], np.float32)
        row = {
            "rollout/dropped_stale_rows": dropped_rows,
            "rollout/failed_trajectories": int(np.isnan(rewards).sum()),
            "rollout/waiting_groups": sum(self.queue.counts()),
            "time/wait_s": waited_s,
            **self._count_doubts(groups, step),
        }
        return Rollouts(responses, rewards, row=row)

    @contextlib.contextmanager
    def paused(self, params: Params, policy_version: int, timers: Timers, *, drains: bool) -> Iterator[None]:
        """Tells the other program the version after the ``with`` block. Trajectories may name it from its start on."""
        self.queue.expect(policy_version)
        self._tell(policy_version - 1)
        yield
        self.queue.publish(policy_version)
        self._tell(policy_version)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the stream, and the record of the rows that were used."""
        return super().state_dict() | {"trajectories": self.queue.state_dict() | {"source": self.source}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state_dict``. If ``state`` has another source or none (a fork), no row counts as used."""
        super().load_state_dict(state)
        used = state.get("trajectories")
        if used is not None and used["source"] == self.source:
            self.queue.load_state_dict(used)

    def close(self) -> None:
        """Ends the HTTP server, if it was started."""
        if self.receiver is not None and self._has_started:
            self.receiver.close()

    def _tell(self, version: int) -> None:
        told = {"policy_version": version, "highest_version": self.queue.highest}
        write_whole(self.run_dir / POLICY_FILE, json.dumps(told) + "\n")

    def _recorded_highest(self) -> int | None:
        """Returns the highest version that an earlier process may have published; None if it is not known."""
        path = self.run_dir / POLICY_FILE
        told = parse_json(path.read_bytes()) if path.exists() else {}
        highest = told.get("highest_version") if isinstance(told, dict) else None
        return highest if isinstance(highest, int) else None

    def _count_doubts(self, groups: Sequence[Sequence[Trajectory]], step: int) -> dict[str, int]:
        """Counts odd trajectories and groups, by name of metric. A line on stderr tells the first of each kind."""
        found: dict[str, list[str]] = {name: [] for name in DOUBTS}
        for group in groups:
            if any(not np.array_equal(one.response.prompt, group[0].response.prompt) for one in group):
                said = f"the trajectories of group {group[0].group!r:.60} have different prompts"
                found[MIXED].append(f"{said}; {MIXED_REMEDY}")
            for one in group:
                for name, line in one.doubts.items():
                    found[name].append(line)
        for name, lines in found.items():
            if lines and name not in self._said:
                self._said.add(name)
                print(f"warning: step {step}: {lines[0]} ({name}: {len(lines)})", file=sys.stderr)
        return {name: len(lines) for name, lines in found.items()}

    def _waiting_line(self, count: int) -> str:
        (ready, newer, incomplete), dropped = self.queue.counts(), self.queue.dropped_rows
        line = f"waiting for trajectories: {ready} of {count} groups"
        line += f", {incomplete} incomplete" if incomplete else ""
        line += f", {newer} of a policy newer than version {self.queue.version}" if newer else ""
        return line + (f"; {dropped} rows were too old (rollout.max_staleness)" if dropped else "")


def make_external_batches(
    config: Config, policy: PolicyConfig, stream: PromptStream, sampling: SamplingParams, stop: StopRequest
) -> ExternalBatches:
    """Builds the batches of ``rollout.trajectories``.

    Raises OSError or ValueError if the directory or the address cannot be used.
    """
    rollout, run_dir = config.rollout, Path(config.run.dir)
    source = rollout.trajectories
    assert source is not None
    sizes = policy.num_layers, policy.experts_per_token, policy.num_experts
    routes = sizes if rollout.router_replay == "r3" else None
    limits = RowLimits(policy.vocab_size, config.data.max_prompt_tokens, sampling, rollout.episode.max_rows, routes)
    is_received = is_address(source)
    directory = run_dir / "trajectories" if is_received else Path(source)
    if is_received:
        directory.mkdir(parents=True, exist_ok=True)
    elif not directory.is_dir():
        raise ValueError(f"rollout.trajectories: {source} is not a directory; make it before the run starts")
    queue = TrajectoryQueue(directory, limits, group_size=rollout.group_size, max_staleness=rollout.max_staleness)
    receiver = None
    if is_received:
        from rljax.rollout.external.receiver import Receiver  # uvicorn, for few runs

        size = config.data.batch_size
        receiver = Receiver(
            source,
            queue,
            max_groups=size * min(1 + rollout.max_staleness, _MOST_BATCHES),
            facts={"group_size": rollout.group_size, "batch_size": size, "max_staleness": rollout.max_staleness},
            api_key_file=rollout.api_key_file,
        )
    return ExternalBatches(stream, queue, stop, run_dir=run_dir, source=source, receiver=receiver)
