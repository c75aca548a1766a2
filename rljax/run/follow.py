"""What a process other than 0 does: it waits for announcements of process 0 and makes the same calls (run/lead.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rljax.distributed.processes import UPDATE, Act, Processes
from rljax.policy.model import Params
from rljax.rollout.build import PolicyFunctions
from rljax.rollout.engine import RolloutEngine
from rljax.rollout.servers.parts import PartFiles
from rljax.rollout.types import SamplingParams
from rljax.run.checkpoint import Checkpointer
from rljax.run.lead import gathered, sequences_of, vectors_of
from rljax.trainer.packing import PackedBatch, TrainSequence
from rljax.trainer.state import TrainState
from rljax.trainer.update import Update, Updated, UpdateOptions

# What is done with the newest parameters.
OfParams = Callable[[Act, Any], object]


def engine_acts(engine: RolloutEngine) -> dict[str, OfParams]:
    """The acts of ``LedEngine``."""

    def generate(act: Act, params: Any) -> None:
        del params
        sampling = act.fields["sampling"] | {"stop_token_ids": tuple(act.fields["sampling"]["stop_token_ids"])}
        prompts = vectors_of("prompts", act.arrays)
        for _ in engine.generate(prompts, act.fields["n"], SamplingParams(**sampling), seed=act.fields["seed"]):
            pass

    return {"publish": lambda act, params: engine.publish(params, act.fields["version"]), "generate": generate}


def function_acts(functions: PolicyFunctions, processes: Processes) -> dict[str, OfParams]:
    """The acts of ``led_functions``."""

    def tensors(act: Act, params: Any) -> None:
        del act
        for _ in functions.tensors(params):
            pass

    return {
        "tensors": tensors,
        "checksums": lambda act, params: functions.checksums(params),
        "score": lambda act, params: functions.score(params, vectors_of("sequences", act.arrays)),
    }


def part_acts(parts: PartFiles, processes: Processes) -> dict[str, OfParams]:
    """The acts of ``led_parts``."""

    def take(act: Act, params: Any) -> None:
        del act
        gathered(processes, lambda: parts.take(params))

    def write(act: Act, params: Any) -> None:
        del params
        gathered(processes, lambda: parts.write(act.fields["kind"], Path(act.fields["directory"])))

    return {
        "take_parts": take,
        "write_parts": write,
        "forget_parts": lambda act, params: parts.forget(Path(act.fields["directory"])),
        "keep_parts": lambda act, params: parts.keep_only(act.fields["names"]),
    }


class Follower:
    """Holds this process's shards of the state, and does what is announced."""

    def __init__(
        self,
        processes: Processes,
        state: TrainState,
        update: Update,
        checkpointer: Checkpointer,
        acts: dict[str, OfParams],
        weights: Callable[[Params], Params] = lambda params: params,
    ):
        """Takes its parts.

        Args:
          processes: of the run.
          state: at the step where the run starts; taken over.
          update: that of ``LedUpdate``.
          checkpointer: that of ``LedCheckpointer``.
          acts: those of the engine.
          weights: that of ``Components``.
        """
        self._state, self._update, self._checkpointer, self._of_params = state, update, checkpointer, acts
        self._processes, self._weights = processes, weights
        self._sequences: list[TrainSequence] = []
        self._batch: PackedBatch | None = None
        self._updated: Updated | None = None
        self._acts: dict[str, Callable[[Act], object]] = {
            "pack": self._pack,
            UPDATE: self._make_update,
            "compare": lambda act: processes.compare(),
            "trainer_logprobs": self._trainer_logprobs,
            "save": lambda act: checkpointer.save(act.fields["step"], self._state, act.fields["host"]),
            "save_best": lambda act: checkpointer.save_best(state=self._state, **act.fields),
            "close": lambda act: checkpointer.close(),
        }

    def run(self) -> int:
        """Follows to the end of the run; returns its exit status."""
        while (act := self._processes.listen()).name != "end":
            with self._processes.doing(act.name):
                self._do(act)
        return int(act.fields["status"])

    def _do(self, act: Act) -> None:
        if act.name in self._of_params:
            self._of_params[act.name](act, self._weights(self._state.params))
        else:
            self._acts[act.name](act)

    def _pack(self, act: Act) -> None:
        self._sequences = sequences_of(act.arrays)
        self._batch = self._update.pack(self._sequences)

    def _make_update(self, act: Act) -> None:
        assert self._batch is not None
        options = UpdateOptions(**act.fields)
        self._updated = self._update(self._state, self._batch, self._sequences, options)
        self._state = self._updated.state

    def _trainer_logprobs(self, act: Act) -> None:
        assert self._updated is not None
        self._updated.trainer_logprobs()
