"""A few bytes of memory that a host process and its parent share: the running trajectory, and a count of progress."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile

_FORM = struct.Struct("<qq")


class ProgressBoard:
    """The shared memory with two numbers. The host process writes them; the parent can read them after a crash."""

    def __init__(self, descriptor: int | None = None):
        """Opens the memory of an inherited ``descriptor``, or makes a new one."""
        if descriptor is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the board
            self._file.truncate(mmap.PAGESIZE)
            descriptor = self._file.fileno()
        os.set_inheritable(descriptor, False)
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._moves = 0

    def write(self, running: int) -> None:
        """Records which trajectory runs from now on; 0 means none."""
        self._moves += 1
        _FORM.pack_into(self._memory, 0, running, self._moves)

    def read(self) -> tuple[int, int]:
        """Returns the trajectory that runs now (0: none), and the number of writes, which grows with all progress."""
        running, moves = _FORM.unpack_from(self._memory)
        return running, moves
