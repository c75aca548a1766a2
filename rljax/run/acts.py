"""The objects of a training run that work in all its processes at the same time.

They have the interfaces of ``Update``, ``RolloutEngine``, ``Checkpointer`` and ``Writer``. So the loop of process 0
does not know how many processes there are. An *act* is a method with the decorator ``together``: every process runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rljax.distributed.acts import Shared, gather_results, together, values_of
from rljax.distributed.messages import Announcement
from rljax.distributed.processes import PACK, SAVE, UPDATE, Processes
from rljax.errors import caller_errors
from rljax.policy.model import Params
from rljax.rollout.build import PolicyFunctions, policy_functions
from rljax.rollout.engine import RolloutEngine, Samples, TurnRequest
from rljax.rollout.kinds import can
from rljax.rollout.types import Response, SamplingParams
from rljax.run.build import Inputs, Problems, build, make_run_engine, starting_point
from rljax.run.checkpoint import Checkpointer
from rljax.run.config import Config
from rljax.run.directory import send_output_to
from rljax.run.step import Progress, RunParts
from rljax.run.stop import StopRequest
from rljax.run.training import make_trainer, starting_state
from rljax.tokens import TOPS
from rljax.trainer.packing import PackedBatch, TrainSequence
from rljax.trainer.state import TrainState
from rljax.trainer.update import TrainerValues, Update, Updated, UpdateOptions
from rljax.weights.access import find_key_file
from rljax.weights.format import Checksum
from rljax.weights.writer import (
    Kind,
    PartsSummary,
    PartWriter,
    WrittenFiles,
    make_part_writer,
    merge_summaries,
    merge_written,
)


@dataclass
class OwnState:
    """The arguments ``state`` and ``params`` of acts. Each process holds its own, so process 0 need not send them."""

    state: TrainState  # the shards of the newest state that this process holds
    weights: Callable[[Params], Params]  # a function from ``state.params`` to the whole policy, adapters merged in

    @property
    def params(self) -> Params:
        """This process's shards of the newest policy."""
        return self.weights(self.state.params)

    def take(self, made: Any) -> None:
        """Keeps the new state if ``made``, the result of an act, comes from an update."""
        if isinstance(made, Updated):
            self.state = made.state


def restore(
    processes: Processes, inputs: Inputs, engine: RolloutEngine, problems: Problems, stop: StopRequest, stack: ExitStack
) -> tuple[RunParts, TrainState, Progress]:
    """Builds the parts of the run, and returns them with the state and the counters at which it starts.

    Process 0 calls it, while the other processes are in ``join``. The caller's ``stack`` gets the calls that close the
    parts. Raises ConfigError if a part cannot be built, and the errors of ``starting_state``.
    """
    with processes.together(Announcement("restore")), caller_errors():
        checkpointer = SharedCheckpointer(processes, inputs.config)
        stack.callback(checkpointer.close)
        parts = build(inputs, engine, checkpointer, problems, stop)
        stack.callback(parts.source.close)
        if processes.count > 1:
            parts.update = SharedUpdate(processes, parts.update, with_tops=inputs.config.trained_tops > 0)
        return parts, *starting_point(parts, inputs.mesh)


def join(
    processes: Processes, run_dir: Path, read_inputs: Callable[[], Inputs], stack: ExitStack
) -> tuple[list[Shared], OwnState]:
    """Waits until process 0 is in ``restore``, then builds the run with it. Returns ``follow``'s last two arguments.

    Every process but process 0 calls it. After the wait, its output goes to its log file in the run directory.
    """
    processes.listen()
    send_output_to(run_dir / "logs" / f"process_{processes.index}.log")
    with processes.following():
        config, policy, _, mesh = inputs = read_inputs()
        with caller_errors():
            checkpointer = SharedCheckpointer(processes, config)
            update, weights, _ = make_trainer(config, policy, mesh)
        state, _ = starting_state(config, policy, mesh, checkpointer)
        engine = make_side(inputs, processes, StopRequest())
        stack.callback(engine.close)
    shared: list[Shared] = [engine, SharedUpdate(processes, update), checkpointer]
    return shared, OwnState(state, weights)


class SharedUpdate(Shared):
    """An ``Update`` that all processes run. Each process holds its own shards of the training state."""

    name = "step"

    def __init__(self, processes: Processes, update: Update, *, with_tops: bool = True) -> None:
        """Wraps the update of this process, which works on the mesh of all processes.

        ``with_tops``: Whether process 0 sends the sampler's likeliest tokens with the sequences.
        """
        super().__init__(processes)
        self._local, self._with_tops = update, with_tops

    def pack(self, sequences: Sequence[TrainSequence]) -> PackedBatch:
        """Sends the sequences of the step to all processes. Each of them packs the whole batch for itself."""
        self._pack(sequences if self._with_tops else [each.without(*TOPS) for each in sequences])
        return self._batch

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Makes the updates on the batch that ``pack`` made last. The row has the keys of ``Processes.compare``."""
        return self._update(state, options)._replace(trainer=self._values)

    @together
    def _pack(self, sequences: Sequence[TrainSequence]) -> None:
        with self.processes.timed(PACK):
            self._sequences, self._batch = sequences, self._local.pack(sequences)

    @together
    def _update(self, state: Any, options: UpdateOptions) -> Updated:
        with self.processes.timed(UPDATE):
            updated = self._local(state, self._batch, self._sequences, options)
        self._trainer = updated.trainer
        return updated._replace(row=updated.row | self.processes.compare())

    @together
    def _values(self) -> TrainerValues:
        return self._trainer()


class SharedEngine(Shared, RolloutEngine):
    """An engine on the devices of all processes. Process 0 uses it, and each process holds an embedded engine."""

    name = "engine"

    def __init__(self, processes: Processes, engine: RolloutEngine) -> None:
        """Wraps the engine of this process, which samples on the mesh of all processes."""
        super().__init__(processes)
        self._engine, self._metrics = engine, dict[str, float]()

    @together
    def publish(self, params: Any, policy_version: int) -> dict[str, float]:
        """Publishes to each process's engine the shards that the process holds. Returns the metrics of process 0."""
        return self._engine.publish(params, policy_version)

    def generate(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples the responses. If the caller stops early, the remaining ones are sampled all the same."""
        self._metrics = {}
        return Samples(self._generate(prompts, n, sampling, seed), self._metrics)

    def answer_round(self, requests: Sequence[TurnRequest], sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples the turns. If the caller stops early, the remaining ones are sampled all the same."""
        self._metrics = {}
        return Samples(self._round(requests, sampling, seed), self._metrics)

    def close(self) -> None:
        """Releases the resources of the engine of this process."""
        self._engine.close()

    @together
    def _generate(
        self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, seed: int
    ) -> Iterator[Response]:
        yield from self._measured(self._engine.generate(prompts, n, sampling, seed=seed))

    @together
    def _round(self, requests: Sequence[TurnRequest], sampling: SamplingParams, seed: int) -> Iterator[Response]:
        yield from self._measured(self._engine.answer_round(requests, sampling, seed=seed))

    def _measured(self, samples: Samples) -> Iterator[Response]:
        yield from samples
        self._metrics.update(samples.metrics)


class SharedPublish(Shared):
    """The publish of a policy to HTTP servers. All processes hold shards of the policy; process 0 talks to the servers.

    The engine of process 0 uses the result of ``functions``. That engine waits for servers only between acts, so no act
    waits for a server that has failed. If each process writes files of its own, this object is the engine's ``Writer``.
    """

    name = "publish"

    def __init__(self, processes: Processes, functions: PolicyFunctions, parts: PartWriter | None) -> None:
        """Stores this process's functions, and its writer ``parts``. None: process 0 gathers and writes all tensors."""
        super().__init__(processes)
        self._functions = functions
        self._files: Any = parts

    def functions(self) -> PolicyFunctions:
        """Returns the functions for the engine of process 0. Checksums and scores are computed in all processes."""
        own_parts = self._functions.parts
        if self._files is None:
            return PolicyFunctions(self.tensors, self.checksums, self.score, own_parts)
        return PolicyFunctions(lambda params: params, self.checksums, self.score, own_parts, writer=self)

    @together
    def tensors(self, params: Any) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the Hugging Face name and the whole array of each tensor, gathered from all processes."""
        yield from self._functions.tensors(params)

    @together
    def checksums(self, params: Any) -> Mapping[str, Checksum]:
        """Returns the checksum of each tensor by name."""
        return self._functions.checksums(params)

    @together
    def score(self, params: Any, sequences: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Returns the log-probabilities of the tokens of each sequence (nats)."""
        return self._functions.score(params, sequences)

    def collect(self, tensors: Any, directory: Path) -> PartsSummary:
        """Copies each process's parts of the next version to its host's memory. Returns the sums over all processes."""
        return merge_summaries(values_of(self._collect(tensors, directory), PartsSummary))

    @together
    def _collect(self, params: Any, directory: Path) -> list[dict[str, Any]]:
        return gather_results(self.processes, lambda: self._files.collect(params, directory))

    def write(self, kind: Kind, directory: Path) -> WrittenFiles:
        """Writes the collected parts (dense) or changes (delta), in every process. Raises OSError if one fails."""
        written = merge_written(values_of(self._write(kind, directory), WrittenFiles))
        self._files.wait(directory, written)
        return written

    @together
    def _write(self, kind: Kind, directory: Path) -> list[dict[str, Any]]:
        return gather_results(self.processes, lambda: self._files.write(kind, directory))

    def keep_only(self, names: Collection[str]) -> None:
        """Gives up all published versions except ``names``, in every process. Does nothing after an act has failed."""
        if self.processes.are_together:
            self._keep(sorted(names))

    @together
    def _keep(self, names: Sequence[str]) -> None:
        self._files.keep_only(names)

    def close(self) -> None:
        """Closes the writer of this process, if it has one."""
        if self._files is not None:
            self._files.close()


class SharedCheckpointer(Shared, Checkpointer):
    """A ``Checkpointer`` that process 0 uses. At each save every process writes its own shards."""

    name = "save"

    def __init__(self, processes: Processes, config: Config) -> None:
        """Opens the checkpoints in the run directory. All processes do so at the same time."""
        Shared.__init__(self, processes)
        Checkpointer.__init__(self, Path(config.run.dir) / "checkpoints", keep=config.checkpoint.keep)

    @together
    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Starts to save the checkpoint of ``step``, in every process."""
        with self.processes.timed(SAVE):
            super().save(step, state, host)

    @together
    def save_best(self, step: int, accuracy: float, state: Any, host: dict[str, Any], of: str = "") -> bool:
        """Saves the step in every process if its ``accuracy`` is the best so far; returns whether it did."""
        return super().save_best(step, accuracy, state, host, of)

    def close(self) -> None:
        """Waits for the files to be complete. Does nothing after an act has failed, or after ``abandon``."""
        if self.processes.are_together and not self.is_abandoned:
            self._close()

    @together
    def _close(self) -> None:
        super().close()


def make_shared_engine(
    inputs: Inputs, stop: StopRequest, processes: Processes, prompts: Sequence[np.ndarray] = ()
) -> RolloutEngine:
    """Builds the engine that process 0 uses. Raises the errors of ``make_engine``, and ConfigError as ``make_side``."""
    if processes.count == 1:
        return make_run_engine(inputs, stop, prompts=prompts)
    side = make_side(inputs, processes, stop)
    if isinstance(side, SharedPublish):
        return make_run_engine(inputs, stop, side.functions(), prompts)
    if inputs.config.rollout.max_staleness and inputs.config.rollout.trajectories is None:
        raise ValueError("rollout.max_staleness: the embedded engine of several processes samples in turn; give 0")
    return side


def make_side(inputs: Inputs, processes: Processes, stop: StopRequest) -> SharedPublish | SharedEngine:
    """Makes this process's side of the engine: of the publish to HTTP servers, or of the embedded engine.

    Raises ConfigError if the files of a publish cannot be kept, or cannot be served.
    """
    rollout, publish = inputs.config.rollout, inputs.config.publish
    if not can(rollout.engine, "serves"):
        return SharedEngine(processes, make_run_engine(inputs, stop))
    functions = policy_functions(inputs.policy, rollout.dtype)
    if publish.store == "shared":
        return SharedPublish(processes, functions, None)
    parts = make_part_writer(
        functions.parts,
        publish,
        rollout.transfer_dir,
        api_key_file=find_key_file(rollout.api_key_file),
        index=processes.index,
        coordinator=processes.coordinator,
    )
    return SharedPublish(processes, functions, parts)
