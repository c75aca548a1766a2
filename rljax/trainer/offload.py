"""Keeps the trainer's state in the host's memory between two updates, so that the devices have room to sample."""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax

from rljax.sharding import on_devices, on_host
from rljax.trainer.packing import PackedBatch, TrainSequence
from rljax.trainer.state import TrainState
from rljax.trainer.update import Update, Updated, UpdateOptions


class OffloadedUpdate:
    """An ``Update`` whose state lies in the host's memory (``sharding.on_host``) before and after it.

    Frozen weights, such as the base of adapters or a reference policy, may lie there too. Their readers copy them. If
    an update fails, the state before it is whole, because the devices only had a copy.
    """

    def __init__(self, update: Update) -> None:
        """Wraps an update that works on the devices."""
        self._update = update

    def pack(self, sequences: Sequence[TrainSequence]) -> PackedBatch:
        """Packs the sequences as the wrapped update does."""
        return self._update.pack(sequences)

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """Copies the state to the devices, makes the updates, and copies the new state back; the row has both times."""
        began = time.perf_counter()
        here = jax.block_until_ready(on_devices(state))
        reloaded = time.perf_counter()
        updated = self._update(here, batch, sequences, options)
        done = time.perf_counter()
        state = on_host(updated.state)
        took = {"time/reload_s": reloaded - began, "time/offload_s": time.perf_counter() - done}
        return updated._replace(state=state, row=updated.row | took)
