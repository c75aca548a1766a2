"""Checkpoints of a run: asynchronous, atomic, restored onto any mesh (orbax)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved.

    Attributes:
      every: steps between checkpoints; 0: only the last step and where the run is stopped.
      keep: newest checkpoints kept.
    """

    every: int = 20
    keep: int = 2

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"every must not be negative, got {self.every}")
        if self.keep < 1:
            raise ValueError(f"keep must be at least 1, got {self.keep}")


class Checkpointer:
    """Saves and restores the device state and a small JSON of host state, both or neither."""

    def __init__(self, directory: str | Path, *, keep: int = 2, read_only: bool = False):
        """Opens ``directory``; unless ``read_only`` it is made when missing and rid of saves that were cut short.

        With ``read_only`` nothing in it is changed; ``save`` must not be called.
        """
        self._manager = ocp.CheckpointManager(
            Path(directory).absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=None if read_only else keep,
                enable_async_checkpointing=not read_only,
                cleanup_tmp_directories=not read_only,
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
        # The copy outlives the donation of the originals to the next step; orbax may read the buffers in place.
        frozen = jax.tree.map(jnp.copy, state)
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.StandardSave(frozen), host=ocp.args.JsonSave(host))
        )

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint onto the shardings of ``abstract_state``.

        Raises:
          RuntimeError: it cannot be read as a state of this form; the message says which step.
        """
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state), host=ocp.args.JsonRestore())
        try:
            restored = self._manager.restore(step, args=wanted)
        except (ValueError, KeyError, FileNotFoundError) as error:
            place = f"checkpoint {step} in {self._manager.directory}"
            raise RuntimeError(f"{place} does not fit this run: {error}") from error
        return restored["state"], restored["host"]

    def close(self) -> None:
        """Waits for the files to be complete and releases the directory."""
        self._manager.wait_until_finished()
        self._manager.close()
