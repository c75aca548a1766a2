"""Checkpoints of a run: asynchronous, atomic, restored onto any mesh (orbax)."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rljax.checks import check_at_least

BEST = "best"  # folder of the run directory
ACCURACY = "best_accuracy"  # in the host state of what is there


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved."""

    every: int = 20
    """Steps between checkpoints. 0: save only the last step, and the step at which the run is stopped."""
    keep: int = 2
    """Number of newest checkpoints to keep."""
    keep_best: bool = False
    """Also keep the step with the best mean accuracy over the evaluation datasets (``eval``), in ``best/`` of the run
    directory."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "every")
        check_at_least(self, 1, "keep")


class Checkpointer:
    """Saves and restores the device state and a small JSON of host state; a checkpoint has both."""

    def __init__(self, directory: str | Path, *, keep: int = 2, read_only: bool = False):
        """Opens ``directory``. Unless ``read_only``, makes it if missing and deletes incomplete checkpoints in it.

        With ``read_only`` nothing in it changes, and ``save`` must not be called.
        """
        import orbax.checkpoint as ocp  # a third of a second, which the start of a command does not wait for

        self._ocp, self._directory = ocp, Path(directory).absolute()
        self._best: Checkpointer | None = None
        if not read_only and jax.process_index() == 0:
            # Orbax would do so in a thread that its close() does not wait for, and that fails when the process ends.
            for cut_short in ocp.utils.tmp_checkpoints(self._directory):
                shutil.rmtree(cut_short.get())
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=None if read_only else keep,
                enable_async_checkpointing=not read_only,
                create=not read_only,
            ),
        )

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def all_steps(self) -> list[int]:
        """Steps of all complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Starts saving and returns; the run goes on, and may donate ``state``, while files are written.

        Args:
          step: last step done.
          state: pytree of arrays on the devices.
          host: JSON-serialisable.
        """
        # A copy, because the next step gets the originals donated while orbax may still read the buffers.
        frozen = jax.tree.map(jnp.copy, state)
        args = self._ocp.args
        self._manager.save(step, args=args.Composite(state=args.StandardSave(frozen), host=args.JsonSave(host)))

    def save_best(self, step: int, accuracy: float, state: Any, host: dict[str, Any]) -> bool:
        """Saves into ``best/`` beside this directory if no accuracy there is as high; returns whether it did.

        A run that continues from an earlier step than that of the best checkpoint keeps it until a better one is found.

        Args:
          step, state, host: as for ``save``.
          accuracy: larger is better.
        """
        if self._best is None:
            self._best = Checkpointer(self._directory.with_name(BEST), keep=1)
        best = self._best
        best.wait()
        kept = best.all_steps()
        if kept and best.restore_host(kept[-1])[ACCURACY] >= accuracy:
            return False
        for later in [taken for taken in kept if taken >= step]:
            best._manager.delete(later)
        best.save(step, state, host | {ACCURACY: accuracy})
        return True

    def restore_host(self, step: int) -> dict[str, Any]:
        """The host state alone."""
        wanted = self._ocp.args.Composite(host=self._ocp.args.JsonRestore())
        return dict(self._manager.restore(step, args=wanted)["host"])

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint onto the shardings of ``abstract_state``.

        Raises:
          RuntimeError: it cannot be read as a state of this form; the message says which step.
        """
        args = self._ocp.args
        wanted = args.Composite(state=args.StandardRestore(abstract_state), host=args.JsonRestore())
        try:
            restored = self._manager.restore(step, args=wanted)
        except (ValueError, KeyError, FileNotFoundError) as error:
            place = f"checkpoint {step} in {self._manager.directory}"
            raise RuntimeError(f"{place} does not fit this run: {error}") from error
        return restored["state"], restored["host"]

    def wait(self) -> None:
        """Returns when the files of what is being saved are complete."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the files to be complete and releases the directory."""
        if self._best is not None:
            self._best.close()
        self.wait()
        self._manager.close()
