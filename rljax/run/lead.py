"""What process 0 of several does together with the others: each part announces a call before it makes it.

The parts have the interfaces of those that they stand before, so that the loop knows nothing of processes.
``run/follow.py`` does what is announced here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from rljax.distributed.processes import UPDATE, Processes
from rljax.rollout.build import PolicyFunctions
from rljax.rollout.engine import RolloutEngine, Samples
from rljax.rollout.servers.parts import PartFiles
from rljax.rollout.types import Response, SamplingParams
from rljax.run.checkpoint import Checkpointer
from rljax.trainer.packing import PackedBatch, TrainSequence
from rljax.trainer.state import TrainState
from rljax.trainer.update import Update, Updated, UpdateOptions
from rljax.weights.checksum import Checksum
from rljax.weights.writer import Pieces, Taken, all_taken, joined

Found = TypeVar("Found")


class LedEngine:
    """RolloutEngine whose devices are those of all processes."""

    def __init__(self, engine: RolloutEngine, processes: Processes):
        """``engine`` samples on the mesh of all processes."""
        self._engine, self._processes = engine, processes

    def prepare(self, params: Any, policy_version: int) -> None:
        """See RolloutEngine: nothing."""

    def publish(self, params: Any, policy_version: int) -> dict[str, float]:
        """See RolloutEngine."""
        with self._processes.together("publish", {"version": policy_version}):
            return self._engine.publish(params, policy_version)

    def generate(self, prompts: Sequence[np.ndarray], n: int, sampling: SamplingParams, *, seed: int) -> Samples:
        """See RolloutEngine. Who does not want the rest waits for it all the same: the others sample it, too."""
        metrics: dict[str, float] = {}

        def responses() -> Iterator[Response]:
            fields = {"n": n, "sampling": vars(sampling), "seed": seed}
            with self._processes.together("generate", fields, ragged("prompts", prompts)):
                samples = self._engine.generate(prompts, n, sampling, seed=seed)
                yield from to_the_end(samples.responses)
                metrics.update(samples.metrics)

        return Samples(responses(), metrics)

    def close(self) -> None:
        """See RolloutEngine."""
        self._engine.close()


def led_functions(functions: PolicyFunctions, processes: Processes) -> PolicyFunctions:
    """What an HTTP engine of process 0 computes from a policy whose shards all processes hold."""

    def tensors(params: Any) -> Iterator[tuple[str, np.ndarray]]:
        with processes.together("tensors"):
            yield from to_the_end(iter(functions.tensors(params)))

    def checksums(params: Any) -> Mapping[str, Checksum]:
        with processes.together("checksums"):
            return functions.checksums(params)

    def score(params: Any, sequences: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        with processes.together("score", {}, ragged("sequences", sequences)):
            return functions.score(params, sequences)

    return PolicyFunctions(tensors, checksums, score, functions.parts)


def led_parts(functions: PolicyFunctions, parts: PartFiles, processes: Processes) -> PolicyFunctions:
    """``led_functions`` where each process writes the parts that it holds; ``parts`` are those of this one."""
    led = led_functions(functions, processes)
    return dataclasses.replace(led, tensors=lambda params: params, writer=LedWriter(parts, processes))


class LedWriter:
    """Writer of what all processes hold; its ``take`` is given the parameters."""

    def __init__(self, parts: PartFiles, processes: Processes):
        """``parts`` are those of this process."""
        self._parts, self._processes = parts, processes

    def take(self, tensors: Any) -> Taken:
        """See PartWriter."""
        with self._processes.together("take_parts"):
            found = gathered(self._processes, lambda: self._parts.take(tensors))
        return all_taken(values(found, Taken))

    def write_dense(self, directory: Path) -> Pieces:
        """See PartWriter."""
        return self._write("dense", directory)

    def write_delta(self, directory: Path) -> Pieces:
        """See PartWriter."""
        return self._write("delta", directory)

    def forget(self, directory: Path) -> None:
        """See Writer. Where the processes are not together any more, nothing more is written."""
        if self._processes.are_together:
            with self._processes.together("forget_parts", {"directory": str(directory)}):
                self._parts.forget(directory)

    def keep_only(self, names: Collection[str]) -> None:
        """See Writer; where the processes are not together any more, what is old goes with the run."""
        if self._processes.are_together:
            with self._processes.together("keep_parts", {"names": sorted(names)}):
                self._parts.keep_only(names)

    def _write(self, kind: str, directory: Path) -> Pieces:
        with self._processes.together("write_parts", {"kind": kind, "directory": str(directory)}):
            found = gathered(self._processes, functools.partial(self._parts.write, kind, directory))
        written = joined(values(found, Pieces))
        self._parts.wait(directory, written)
        return written


def gathered(processes: Processes, act: Callable[[], Any]) -> list[dict[str, Any]]:
    """What ``act`` gave each process, or its OSError, for ``values``; all of them call it, and all stay together."""
    try:
        mine: Any = {"value": msgspec.to_builtins(act())}
    except OSError as error:
        mine = {"error": f"process {processes.index}: {error}"}
    return processes.gather(mine)


def values(found: Sequence[Mapping[str, Any]], kind: type[Found]) -> list[Found]:
    """What ``act`` gave each process, of the ``kind``. Raises OSError with those of all processes that had one."""
    errors = [each["error"] for each in found if "error" in each]
    if errors:
        raise OSError("; ".join(errors))
    return [msgspec.convert(each["value"], kind) for each in found]


class LedUpdate:
    """Update of a state whose shards all processes hold; each of them packs the batch."""

    def __init__(self, update: Update, processes: Processes):
        """``update`` works on the mesh of all processes."""
        self._update, self._processes = update, processes

    def pack(self, sequences: Sequence[TrainSequence]) -> PackedBatch:
        """See ``Update``; the same sequences go to the next call."""
        with self._processes.together("pack", {}, sequence_arrays(sequences)):
            return self._update.pack(sequences)

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """See ``Update``."""
        with self._processes.together(UPDATE, options._asdict()):
            updated = self._update(state, batch, sequences, options)
        with self._processes.together("compare"):
            slowest = self._processes.compare()

        def trainer_logprobs() -> list[np.ndarray]:
            with self._processes.together("trainer_logprobs"):
                return updated.trainer_logprobs()

        return updated._replace(trainer_logprobs=trainer_logprobs, row=updated.row | slowest)


class LedCheckpointer(Checkpointer):
    """Checkpointer to which every process writes its shards."""

    def __init__(self, *args: Any, processes: Processes, **options: Any):
        """As ``Checkpointer``; all processes make one at the same time."""
        super().__init__(*args, **options)
        self._processes = processes

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """See ``Checkpointer``."""
        with self._processes.together("save", {"step": step, "host": host}):
            super().save(step, state, host)

    def save_best(self, step: int, accuracy: float, state: Any, host: dict[str, Any]) -> bool:
        """See ``Checkpointer``."""
        with self._processes.together("save_best", {"step": step, "accuracy": accuracy, "host": host}):
            return super().save_best(step, accuracy, state, host)

    def close(self) -> None:
        """See ``Checkpointer``. After something that was done together failed, files are left as they are."""
        if self._processes.are_together:
            with self._processes.together("close"):
                super().close()


def to_the_end(items: Iterator[Any]) -> Iterator[Any]:
    """The items; the rest of them is taken, too, when nobody wants it any more."""
    try:
        for item in items:  # noqa: UP028 ("yield from" would close them with this generator)
            yield item
    finally:
        for _ in items:
            pass


# ---- arrays of several lengths -----------------------------------------------------------------------------------


def ragged(name: str, vectors: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """Vectors one after another under ``name``, and their lengths under ``name/lengths``."""
    all_of_them = [np.asarray(vector) for vector in vectors]
    lengths = np.asarray([len(vector) for vector in all_of_them], np.int64)
    return {name: np.concatenate(all_of_them), f"{name}/lengths": lengths}


def vectors_of(name: str, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The inverse of ``ragged``."""
    return np.split(arrays[name], np.cumsum(arrays[f"{name}/lengths"])[:-1])


_VECTORS = ("prompt", "response", "rollout_logprobs", "staleness")


def sequence_arrays(sequences: Sequence[TrainSequence]) -> dict[str, np.ndarray]:
    """The sequences of a step as arrays, every bit kept."""
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
    """The inverse of ``sequence_arrays``."""
    prompts, responses, logprobs, staleness = (vectors_of(name, arrays) for name in _VECTORS)
    advantages, in_loss = arrays["advantage"].tolist(), arrays["in_loss"].tolist()
    known = list(map(TrainSequence, prompts, responses, logprobs, advantages, in_loss, staleness))
    if "routes" not in arrays:
        return known
    return [s._replace(routes=routes) for s, routes in zip(known, vectors_of("routes", arrays), strict=True)]
