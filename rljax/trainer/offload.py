"""The trainer's state in the host's memory between two updates: the devices have room for who samples there."""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax

from rljax.sharding import on_devices, on_host
from rljax.trainer.packing import PackedBatch, TrainSequence
from rljax.trainer.state import TrainState
from rljax.trainer.update import Update, Updated, UpdateOptions


class OffloadedUpdate:
    """Update of a state that lies in the host's memory (``sharding.on_host``) before it and after it.

    Frozen weights that lie there, too (those under adapters, a reference policy), are copied by who reads them.

    What an update that fails was given is whole: the devices had a copy of it.
    """

    def __init__(self, update: Update) -> None:
        """``update`` works on the devices."""
        self._update = update

    def pack(self, sequences: Sequence[TrainSequence]) -> PackedBatch:
        """See ``Update``."""
        return self._update.pack(sequences)

    def __call__(
        self, state: TrainState, batch: PackedBatch, sequences: Sequence[TrainSequence], options: UpdateOptions
    ) -> Updated:
        """See ``Update``; the row has ``time/reload_s`` and ``time/offload_s``, too."""
        began = time.perf_counter()
        here = jax.block_until_ready(on_devices(state))
        reloaded = time.perf_counter()
        updated = self._update(here, batch, sequences, options)
        done = time.perf_counter()
        state = on_host(updated.state)
        took = {"time/reload_s": reloaded - began, "time/offload_s": time.perf_counter() - done}
        return updated._replace(state=state, row=updated.row | took)
