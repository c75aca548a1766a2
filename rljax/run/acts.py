"""The acts of a training run on several processes: restore, step, publish, generate, and save.

The leading side of each act has the interface of the part that it stands for (``Update``, ``RolloutEngine``,
``Checkpointer``), so the loop does not know how many processes there are. The run ends with ``Processes.end``.
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
from rljax.policy.model import Params
from rljax.rollout.build import PolicyFunctions
from rljax.rollout.engine import RolloutEngine, Samples
from rljax.rollout.types import Response, SamplingParams
from rljax.run.checkpoint import Checkpointer
from rljax.trainer.packing import PackedBatch, TrainSequence
from rljax.trainer.state import TrainState
from rljax.trainer.update import Update, Updated, UpdateOptions
from rljax.weights.format import Checksum
from rljax.weights.writer import Kind, PartsSummary, PartWriter, WrittenFiles, merge_summaries, merge_written


@dataclass
class FollowerState:
    """The training state of a process other than 0.

    Attributes:
      state: The shards of the newest state that this process holds.
      weights: A function that makes the policy of the state's parameters, which engines sample from.
    """

    state: TrainState
    weights: Callable[[Params], Params] = lambda params: params

    def params(self) -> Params:
        """Returns this process's shards of the newest policy."""
        return self.weights(self.state.params)


class Restore(Act[None]):
    """The start of a run: all processes open the checkpoints, build the trainer and read the state to start from.

    Both sides do so in a block: process 0 in the block of ``lead``, every other process in the block of ``wait``.
    """

    name = "restore"

    @contextlib.contextmanager
    def wait(self, begin: Callable[[], object]) -> Iterator[None]:
        """Waits until process 0 owns the run directory; this process does its side in the block.

        Args:
          begin: A function that is called when process 0 has announced the start.
        """
        self.processes.listen()
        begin()
        with self.processes.following():
            yield


class Step(Act[FollowerState]):
    """The update of a state whose shards all processes hold. Process 0 uses it as an ``Update``."""

    name = "step"

    def __init__(self, processes: Processes, update: Update) -> None:
        """Wraps the update of this process, which works on the mesh of all processes."""
        super().__init__(processes)
        self._update = update
        self._sequences: Sequence[TrainSequence] = ()
        self._batch: PackedBatch | None = None
        self._updated: Updated | None = None

    def pack(self, sequences: Sequence[TrainSequence]) -> PackedBatch:
        """Sends the sequences of the step to all processes; each of them packs the whole batch for itself."""
        with self.lead("pack", arrays=sequence_arrays(sequences)), self.processes.timed(PACK):
            return self._update.pack(sequences)

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Makes the updates of the batch that was packed last, and adds the slowest process to the row."""
        with self.lead("update", options._asdict()):
            updated, slowest = self._make_update(state, batch, sequences, options)

        def trainer_logprobs() -> list[np.ndarray]:
            with self.lead("logprobs"):
                return updated.trainer_logprobs()

        return updated._replace(trainer_logprobs=trainer_logprobs, row=updated.row | slowest)

    def follow(self, request: Request, local: FollowerState) -> None:
        """Packs the sequences of process 0, makes the same update, or hands over its log-probabilities."""
        if request.part == "pack":
            with self.processes.timed(PACK):
                self._sequences = sequences_of(request.arrays)
                self._batch = self._update.pack(self._sequences)
        elif request.part == "update":
            assert self._batch is not None
            options = UpdateOptions(**request.fields)
            self._updated, _ = self._make_update(local.state, self._batch, self._sequences, options)
            local.state = self._updated.state
        else:
            assert self._updated is not None
            self._updated.trainer_logprobs()

    def _make_update(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> tuple[Updated, dict[str, float]]:
        with self.processes.timed(UPDATE):
            updated = self._update(state, batch, sequences, options)
        return updated, self.processes.compare()


class PublishToEngine(Act[FollowerState]):
    """The publish to an embedded engine."""

    name = "publish"

    def __init__(self, processes: Processes, engine: RolloutEngine) -> None:
        """Wraps the engine of this process, which samples on the mesh of all processes."""
        super().__init__(processes)
        self._engine = engine

    def publish(self, params: Any, policy_version: int) -> dict[str, float]:
        """Publishes the shards of every process to the engine of that process; returns the metrics of process 0."""
        with self.lead(fields={"version": policy_version}):
            return self._engine.publish(params, policy_version)

    def follow(self, request: Request, local: FollowerState) -> None:
        """Publishes the shards of this process to its engine."""
        self._engine.publish(local.params(), request.fields["version"])


class Generate(Act[FollowerState]):
    """The sampling of an embedded engine, for training and for evaluation."""

    name = "generate"

    def __init__(self, processes: Processes, engine: RolloutEngine) -> None:
        """Wraps the engine of this process, which samples on the mesh of all processes."""
        super().__init__(processes)
        self._engine = engine

    def generate(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples the responses. If the caller stops early, the remaining ones are sampled all the same."""
        metrics: dict[str, float] = {}

        def responses() -> Iterator[Response]:
            fields = {"n": n, "sampling": vars(sampling), "seed": seed}
            with self.lead(fields=fields, arrays=ragged("prompts", prompts)):
                samples = self._engine.generate(prompts, n, sampling, seed=seed)
                try:
                    yield from to_the_end(samples.responses)
                finally:
                    metrics.update(samples.metrics)

        return Samples(responses(), metrics)

    def follow(self, request: Request, local: FollowerState) -> None:
        """Samples the same responses and drops them."""
        fields = request.fields
        stops = tuple(fields["sampling"]["stop_token_ids"])
        sampling = SamplingParams(**(fields["sampling"] | {"stop_token_ids": stops}))
        prompts = vectors_of("prompts", request.arrays)
        for _ in self._engine.generate(prompts, fields["n"], sampling, seed=fields["seed"]):
            pass


class SharedEngine:
    """A RolloutEngine of process 0 that samples on the devices of all processes.

    Attributes:
      acts: The acts of the engine, which the other processes follow.
    """

    def __init__(self, processes: Processes, engine: RolloutEngine) -> None:
        """Wraps the engine of this process, which samples on the mesh of all processes."""
        self._engine = engine
        self._publish, self._generate = PublishToEngine(processes, engine), Generate(processes, engine)
        self.acts: list[Act[FollowerState]] = [self._publish, self._generate]

    def prepare(self, params: Any, policy_version: int) -> None:
        """Does nothing: the embedded engine has nothing to prepare."""

    def publish(self, params: Any, policy_version: int) -> dict[str, float]:
        """Makes ``params`` the policy of all later samples, in every process; returns the metrics of process 0."""
        return self._publish.publish(params, policy_version)

    def generate(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int) -> Samples:
        """Samples the responses, which all processes do together."""
        return self._generate.generate(prompts, n, sampling, seed=seed)

    def close(self) -> None:
        """Releases the resources of the engine of process 0."""
        self._engine.close()


class PublishToServers(Act[FollowerState]):
    """The publish of a policy whose shards all processes hold to HTTP servers, which process 0 talks to.

    Process 0 uses ``functions`` in its engine. Between the parts of this act it waits for servers, which may fail while
    all processes stay together. Where each process writes files of its own, this act is also the ``Writer`` of files.
    """

    name = "publish"

    def __init__(self, processes: Processes, functions: PolicyFunctions, parts: PartWriter | None) -> None:
        """Prepares the act.

        Args:
          processes: The processes of the run.
          functions: The functions that compute from the shards of this process.
          parts: The writer of this process's files; None where process 0 gathers and writes whole tensors.
        """
        super().__init__(processes)
        self._functions, self._parts = functions, parts

    def functions(self) -> PolicyFunctions:
        """Returns the functions for the engine of process 0; each of them computes in all processes."""
        own_parts = self._functions.parts
        if self._parts is None:
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
        """Returns the log-probability of each token of each sequence."""
        with self.lead("score", arrays=ragged("sequences", sequences)):
            return self._functions.score(params, sequences)

    def collect(self, tensors: Any, directory: Path) -> PartsSummary:
        """Copies the parts of the next version to the memory of the process that holds them."""
        with self.lead("collect"):
            results = self._collect(tensors)
        return merge_summaries(values_of(results, PartsSummary))

    def write(self, kind: Kind, directory: Path) -> WrittenFiles:
        """Writes the collected parts or their changes, each process its own. Raises OSError if one process cannot."""
        with self.lead("write", {"kind": kind, "directory": str(directory)}):
            results = self._write(kind, directory)
        written = merge_written(values_of(results, WrittenFiles))
        self._files.wait(directory, written)
        return written

    def forget(self, directory: Path) -> None:
        """Forgets the version in ``directory``, which is not complete, unless the processes are not together."""
        if self.processes.are_together:
            with self.lead("forget", {"directory": str(directory)}):
                self._files.forget(directory)

    def keep_only(self, names: Collection[str]) -> None:
        """Removes the files of all other versions, unless the processes are not together."""
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
                self._collect(local.params())
            case "write":
                self._write(fields["kind"], Path(fields["directory"]))
            case "forget":
                self._files.forget(Path(fields["directory"]))
            case "keep":
                self._files.keep_only(fields["names"])

    @property
    def _files(self) -> PartWriter:
        assert self._parts is not None
        return self._parts

    def _collect(self, params: Any) -> list[dict[str, Any]]:
        return gather_results(self.processes, lambda: self._files.collect(params))

    def _write(self, kind: Kind, directory: Path) -> list[dict[str, Any]]:
        return gather_results(self.processes, functools.partial(self._files.write, kind, directory))


class Save(Act[FollowerState], Checkpointer):
    """The saving of checkpoints. Process 0 uses it as a ``Checkpointer`` to which every process writes its shards."""

    name = "save"

    def __init__(self, processes: Processes, directory: Path, *, keep: int) -> None:
        """Opens ``directory``. All processes do so at the same time."""
        Act.__init__(self, processes)
        Checkpointer.__init__(self, directory, keep=keep)

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Starts saving the newest step, in every process."""
        with self.lead("save", {"step": step, "host": host}), self.processes.timed(SAVE):
            super().save(step, state, host)

    def save_best(self, step: int, accuracy: float, state: Any, host: dict[str, Any]) -> bool:
        """Saves the best step so far, in every process; returns whether it did."""
        with self.lead("save_best", {"step": step, "accuracy": accuracy, "host": host}):
            return super().save_best(step, accuracy, state, host)

    def close(self) -> None:
        """Waits for the files to be complete, unless the processes are not together."""
        if self.processes.are_together:
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


# ---- the sequences of a step as arrays ---------------------------------------------------------------------------

_VECTORS = ("prompt", "response", "rollout_logprobs", "staleness")


def sequence_arrays(sequences: Sequence[TrainSequence]) -> dict[str, np.ndarray]:
    """Returns the sequences of a step as arrays by name, with every bit kept."""
    arrays: dict[str, np.ndarray] = {
        "advantage": np.asarray([sequence.advantage for sequence in sequences], np.float64),
        "in_loss": np.asarray([sequence.in_loss for sequence in sequences], np.bool_),
    }
    for name in _VECTORS:
        arrays |= ragged(name, [getattr(sequence, name) for sequence in sequences])
    if sequences and sequences[0].routes is not None:
        arrays |= ragged("routes", [s.routes for s in sequences if s.routes is not None])
    return arrays


def sequences_of(arrays: Mapping[str, np.ndarray]) -> list[TrainSequence]:
    """Returns the sequences that ``sequence_arrays`` packed."""
    prompts, responses, logprobs, staleness = (vectors_of(name, arrays) for name in _VECTORS)
    advantages, in_loss = arrays["advantage"].tolist(), arrays["in_loss"].tolist()
    sequences = list(map(TrainSequence, prompts, responses, logprobs, advantages, in_loss, staleness))
    if "routes" not in arrays:
        return sequences
    routes = vectors_of("routes", arrays)
    return [sequence._replace(routes=each) for sequence, each in zip(sequences, routes, strict=True)]
