"""The acts of a training run on several processes: restore, step, engine, publish, and save.

Process 0 leads an act and the other processes follow it. The leading side has the interface of the part that the act
replaces (``Update``, ``RolloutEngine``, ``Checkpointer``), so the loop does not know how many processes there are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rljax.distributed.acts import Act, gather_results, to_the_end, values_of
from rljax.distributed.messages import Request, ragged, vectors_of
from rljax.distributed.processes import PACK, SAVE, UPDATE, Processes
from rljax.errors import caller_errors
from rljax.policy.config import PolicyConfig
from rljax.policy.model import Params
from rljax.rollout.build import PolicyFunctions, policy_functions
from rljax.rollout.engine import RolloutEngine, Samples
from rljax.rollout.turns import TurnRequest
from rljax.rollout.types import SERVED, Response, SamplingParams
from rljax.run.build import Inputs, Problems, build, make_run_engine, starting_point
from rljax.run.checkpoint import Checkpointer
from rljax.run.config import Config
from rljax.run.directory import send_output_to_log
from rljax.run.step import Progress, RunParts
from rljax.run.stop import StopRequest
from rljax.run.training import make_trainer, starting_state
from rljax.tokens import TOPS, from_arrays, to_arrays
from rljax.trainer.packing import PackedBatch, TrainSequence
from rljax.trainer.state import TrainState
from rljax.trainer.update import TrainerValues, Update, Updated, UpdateOptions
from rljax.weights.access import find_key_file
from rljax.weights.format import Checksum
from rljax.weights.outlets import make_part_writer
from rljax.weights.writer import Kind, PartsSummary, PartWriter, WrittenFiles, merge_summaries, merge_written


@dataclass
class FollowerState:
    """The training state of a process other than 0."""

    state: TrainState  # the shards of the newest state that this process holds
    weights: Callable[[Params], Params] = lambda params: params  # a function from ``state.params`` to a whole policy

    def params(self) -> Params:
        """Returns this process's shards of the newest policy."""
        return self.weights(self.state.params)


class Restore(Act[None]):
    """The start of a run: all processes open the checkpoints, build the trainer and read the state to start from."""

    name = "restore"

    def __init__(self, processes: Processes, at_end: contextlib.ExitStack) -> None:
        """Opens nothing yet; ``at_end`` will close what the act opens."""
        super().__init__(processes)
        self._at_end = at_end

    def start(
        self, inputs: Inputs, engine: RolloutEngine, problems: Problems, stop: StopRequest
    ) -> tuple[RunParts, TrainState, Progress]:
        """Builds the parts of the run, and returns them with the state and the counters at which it starts.

        Process 0 calls it. Raises ConfigError if a part cannot be built, and the errors of ``starting_state``.
        """
        with self.lead(), caller_errors():
            checkpointer = Save(self.processes, inputs.config)
            self._at_end.callback(checkpointer.close)
            parts = build(*inputs, engine, checkpointer, problems, stop)
            self._at_end.callback(parts.source.close)
            if self.processes.count > 1:
                parts.update = Step(self.processes, parts.update, with_tops=inputs.config.trained_tops > 0)
            return parts, *starting_point(parts, inputs.mesh)

    def join(self, run_dir: Path, read_inputs: Callable[[], Inputs]) -> tuple[list[Act[FollowerState]], FollowerState]:
        """Waits until process 0 starts, and starts with it; returns the acts to follow, and the state for them.

        Every process but 0 calls it. From then on its output goes to its log file in the run directory.
        """
        self.processes.listen()
        send_output_to_log(run_dir, self.processes.index)
        with self.processes.following():
            config, policy, _, mesh = read_inputs()
            with caller_errors():
                save, trainer = Save(self.processes, config), make_trainer(config, policy, mesh)
            state, _ = starting_state(config, policy, mesh, save)
            if config.rollout.engine in SERVED:
                engine: PublishToServers | SharedEngine = make_publish(config, policy, self.processes)
            else:
                engine = SharedEngine(self.processes, make_run_engine(config, policy, mesh, StopRequest()))
            self._at_end.callback(engine.close)
        acts: list[Act[FollowerState]] = [engine, Step(self.processes, trainer.update), save]
        return acts, FollowerState(state, trainer.weights)


class Step(Act[FollowerState]):
    """The update of a state whose shards all processes hold. Process 0 uses it as an ``Update``."""

    name = "step"

    def __init__(self, processes: Processes, update: Update, *, with_tops: bool = True) -> None:
        """Wraps the update of this process, which works on the mesh of all processes.

        ``with_tops``: Whether process 0 sends the likeliest tokens of the sequences.
        """
        super().__init__(processes)
        self._update, self._with_tops = update, with_tops
        self._sequences: Sequence[TrainSequence] = ()
        self._batch: PackedBatch | None = None
        self._updated: Updated | None = None

    def pack(self, sequences: Sequence[TrainSequence]) -> PackedBatch:
        """Sends the sequences of the step to all processes; each of them packs the whole batch for itself."""
        arrays = to_arrays(sequences if self._with_tops else [s.without(*TOPS) for s in sequences])
        with self.lead("pack", arrays=arrays), self.processes.timed(PACK):
            return self._update.pack(sequences)

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Makes the updates of the batch that was packed last, and adds the slowest process to the row."""
        with self.lead("update", options._asdict()):
            updated, slowest = self._make_update(state, batch, sequences, options)

        def trainer() -> TrainerValues:
            with self.lead("values"):
                return updated.trainer()

        return updated._replace(trainer=trainer, row=updated.row | slowest)

    def follow(self, request: Request, local: FollowerState) -> None:
        """Packs the sequences of process 0, makes the same update, or takes part in fetching the token values."""
        if request.part == "pack":
            with self.processes.timed(PACK):
                self._sequences = from_arrays(TrainSequence, request.arrays)
                self._batch = self._update.pack(self._sequences)
        elif request.part == "update":
            assert self._batch is not None
            options = UpdateOptions(**request.fields)
            self._updated, _ = self._make_update(local.state, self._batch, self._sequences, options)
            local.state = self._updated.state
        else:
            assert self._updated is not None
            self._updated.trainer()

    def _make_update(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> tuple[Updated, dict[str, float]]:
        with self.processes.timed(UPDATE):
            updated = self._update(state, batch, sequences, options)
        return updated, self.processes.compare()


class SharedEngine(Act[FollowerState], RolloutEngine):
    """RolloutEngine over an embedded engine on the devices of all processes. Process 0 uses it."""

    name = "engine"

    def __init__(self, processes: Processes, engine: RolloutEngine) -> None:
        """Wraps the engine of this process, which samples on the mesh of all processes."""
        super().__init__(processes)
        self._engine = engine

    def publish(self, params: Any, policy_version: int) -> dict[str, float]:
        """Publishes the shards of every process to the engine of that process; returns the metrics of process 0."""
        with self.lead("publish", {"version": policy_version}):
            return self._engine.publish(params, policy_version)

    def generate(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples the responses. If the caller stops early, the remaining ones are sampled all the same."""
        fields = {"n": n, "sampling": vars(sampling), "seed": seed}
        sample = functools.partial(self._engine.generate, prompts, n, sampling, seed=seed)
        return self._sampled("generate", fields, ragged("prompts", prompts), sample)

    def answer_round(self, requests: Sequence[TurnRequest], sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples the turns. If the caller stops early, the remaining ones are sampled all the same."""
        numbers = [[request.key, request.turn, request.max_tokens] for request in requests]
        fields = {"requests": numbers, "sampling": vars(sampling), "seed": seed}
        arrays = ragged("tokens", [request.tokens for request in requests])
        sample = functools.partial(self._engine.answer_round, requests, sampling, seed=seed)
        return self._sampled("round", fields, arrays, sample)

    def _sampled(
        self, part: str, fields: dict[str, Any], arrays: dict[str, np.ndarray], sample: Callable[[], Samples]
    ) -> Samples:
        """Returns the samples of ``sample``, while the other processes do ``part`` of this act."""
        metrics: dict[str, float] = {}

        def responses() -> Iterator[Response]:
            with self.lead(part, fields, arrays):
                samples = sample()
                try:
                    yield from to_the_end(samples.responses)
                finally:
                    metrics.update(samples.metrics)

        return Samples(responses(), metrics)

    def close(self) -> None:
        """Releases the resources of the engine of process 0."""
        self._engine.close()

    def follow(self, request: Request, local: FollowerState) -> None:
        """Publishes the shards of this process to its engine, or samples the same responses and drops them."""
        fields = request.fields
        if request.part == "publish":
            self._engine.publish(local.params(), fields["version"])
            return
        stops = tuple(fields["sampling"]["stop_token_ids"])
        sampling = SamplingParams(**(fields["sampling"] | {"stop_token_ids": stops}))
        if request.part == "round":
            tokens = vectors_of("tokens", request.arrays)
            numbers = zip(fields["requests"], tokens, strict=True)
            requests = [TurnRequest(key, turn, row, most) for (key, turn, most), row in numbers]
            samples = self._engine.answer_round(requests, sampling, seed=fields["seed"])
        else:
            prompts = vectors_of("prompts", request.arrays)
            samples = self._engine.generate(prompts, fields["n"], sampling, seed=fields["seed"])
        for _ in samples:
            pass


class PublishToServers(Act[FollowerState]):
    """The publish of a policy to HTTP servers. All processes hold shards of it, and process 0 talks to the servers.

    Process 0 uses ``functions`` in its engine. It waits for servers only between the parts of this act. So a server may
    fail while the processes stay together. Where each process writes its own files, this act is also their ``Writer``.
    """

    name = "publish"

    def __init__(self, processes: Processes, functions: PolicyFunctions, parts: PartWriter | None) -> None:
        """Stores the functions of this process's shards, and its writer. None: process 0 gathers and writes all."""
        super().__init__(processes)
        self._functions = functions
        self._files: Any = parts

    def functions(self) -> PolicyFunctions:
        """Returns the functions for the engine of process 0; each of them computes in all processes."""
        own_parts = self._functions.parts
        if self._files is None:
            return PolicyFunctions(self.tensors, self.checksums, self.score, own_parts)
        return PolicyFunctions(lambda params: params, self.checksums, self.score, own_parts, writer=self)

    def tensors(self, params: Any) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the name and the whole array of each tensor, gathered from all processes."""
        with self.lead("tensors"):
            yield from to_the_end(iter(self._functions.tensors(params)))

    def checksums(self, params: Any) -> Mapping[str, Checksum]:
        """Returns the checksum of each tensor by name."""
        with self.lead("checksums"):
            return self._functions.checksums(params)

    def score(self, params: Any, sequences: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Returns the log-probabilities of the tokens of each sequence (nats)."""
        with self.lead("score", arrays=ragged("sequences", sequences)):
            return self._functions.score(params, sequences)

    def collect(self, tensors: Any, directory: Path) -> PartsSummary:
        """Copies the parts of the next version in each process to its host's memory. Returns a summary of all."""
        with self.lead("collect"):
            results = self._gather(self._files.collect, tensors)
        return merge_summaries(values_of(results, PartsSummary))

    def write(self, kind: Kind, directory: Path) -> WrittenFiles:
        """Writes the collected parts or their changes, each process its own. Raises OSError if one process cannot."""
        with self.lead("write", {"kind": kind, "directory": str(directory)}):
            results = self._gather(self._files.write, kind, directory)
        written = merge_written(values_of(results, WrittenFiles))
        self._files.wait(directory, written)
        return written

    def forget(self, directory: Path) -> None:
        """Forgets the incomplete version in ``directory``. Does nothing after an act has failed."""
        if self.processes.are_together:
            with self.lead("forget", {"directory": str(directory)}):
                self._files.forget(directory)

    def keep_only(self, names: Collection[str]) -> None:
        """Removes the files of all versions except ``names``. Does nothing after an act has failed."""
        if self.processes.are_together:
            with self.lead("keep", {"names": sorted(names)}):
                self._files.keep_only(names)

    def follow(self, request: Request, local: FollowerState) -> None:
        """Does the same part on the shards and the files of this process."""
        fields = request.fields
        match request.part:
            case "tensors":
                for _ in self._functions.tensors(local.params()):
                    pass
            case "checksums":
                self._functions.checksums(local.params())
            case "score":
                self._functions.score(local.params(), vectors_of("sequences", request.arrays))
            case "collect":
                self._gather(self._files.collect, local.params())
            case "write":
                self._gather(self._files.write, fields["kind"], Path(fields["directory"]))
            case "forget":
                self._files.forget(Path(fields["directory"]))
            case "keep":
                self._files.keep_only(fields["names"])

    def close(self) -> None:
        """Ends the serving of the files of this process."""
        if self._files is not None:
            self._files.close()

    def _gather(self, work: Callable[..., Any], *arguments: Any) -> list[dict[str, Any]]:
        return gather_results(self.processes, functools.partial(work, *arguments))


class Save(Act[FollowerState], Checkpointer):
    """The saving of checkpoints. Process 0 uses it as a ``Checkpointer`` to which every process writes its shards."""

    name = "save"

    def __init__(self, processes: Processes, config: Config) -> None:
        """Opens the checkpoints in the run directory. All processes do so at the same time."""
        Act.__init__(self, processes)
        Checkpointer.__init__(self, Path(config.run.dir) / "checkpoints", keep=config.checkpoint.keep)

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Starts saving the newest step, in every process."""
        with self.lead("save", {"step": step, "host": host}), self.processes.timed(SAVE):
            super().save(step, state, host)

    def save_best(self, step: int, accuracy: float, state: Any, host: dict[str, Any]) -> bool:
        """Saves the best step so far, in every process; returns whether it did."""
        with self.lead("save_best", {"step": step, "accuracy": accuracy, "host": host}):
            return super().save_best(step, accuracy, state, host)

    def close(self) -> None:
        """Waits for the files to be complete. Does nothing after an act has failed, or if the run was abandoned."""
        if self.processes.are_together and not self.is_abandoned:
            with self.lead("close"):
                super().close()

    def follow(self, request: Request, local: FollowerState) -> None:
        """Writes the shards of this process, or waits for its files."""
        if request.part == "save":
            with self.processes.timed(SAVE):
                super().save(state=local.state, **request.fields)
        elif request.part == "save_best":
            super().save_best(state=local.state, **request.fields)
        else:
            super().close()


# ---- the engine of several processes ---------------------------------------------------------------------------------


def make_shared_engine(
    inputs: Inputs, stop: StopRequest, processes: Processes, prompts: Sequence[np.ndarray] = ()
) -> RolloutEngine:
    """Builds the engine of process 0 on all devices. Raises ConfigError or ValueError as ``make_engine`` does."""
    config, policy, _, mesh = inputs
    if processes.count == 1:
        return make_run_engine(config, policy, mesh, stop, prompts=prompts)
    if config.rollout.engine in SERVED:
        functions = make_publish(config, policy, processes).functions()
        return make_run_engine(config, policy, mesh, stop, functions, prompts)
    if config.rollout.max_staleness:
        raise ValueError("rollout.max_staleness: the embedded engine of several processes samples in turn; give 0")
    return SharedEngine(processes, make_run_engine(config, policy, mesh, stop))


def make_publish(config: Config, policy: PolicyConfig, processes: Processes) -> PublishToServers:
    """Makes the publish of several processes. Raises ConfigError if its files cannot be kept, or cannot be served."""
    functions, publish = policy_functions(policy, config.rollout.dtype), config.publish
    if publish.store == "shared":
        return PublishToServers(processes, functions, None)
    parts = make_part_writer(
        functions.parts,
        publish,
        config.rollout.transfer_dir,
        api_key_file=find_key_file(config.rollout.api_key_file),
        index=processes.index,
        coordinator=processes.coordinator,
    )
    return PublishToServers(processes, functions, parts)
