"""The processes of a real vLLM server, found by their group: vLLM overwrites what its workers show as environment."""

import os
import signal
from pathlib import Path


def kill_worker(group: int) -> int:
    """Ends the worker of the server in process group ``group`` as AMX without permission does. Returns its id."""
    (worker,) = (pid for pid, line in members(group).items() if line.startswith("VLLM::Worker"))
    os.kill(worker, signal.SIGILL)
    return worker


def members(group: int) -> dict[int, str]:
    """Id and command line of each process of a group."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rpartition(") ")[2].split()[2]) == group:
                found[int(path.name)] = (path / "cmdline").read_text()
        except OSError:
            continue
    return found
