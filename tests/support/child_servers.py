"""The child processes that serve weights, found by the socket at which they listen."""

import os
import signal
from pathlib import Path


def server_at(url):
    """Returns the id of the process that serves the weights at a URL on this machine, besides those that started it."""
    port = int(url.rpartition(":")[2])
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (inode,) = (words[9] for words in lines if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port)
    holders = {pid for pid in _pids() if _holds(pid, f"socket:[{inode}]")}
    (server,) = holders - {_parent(pid) for pid in holders}
    return server


def kill_server(url):
    """Kills the process that serves the weights at a URL, and returns its id."""
    server = server_at(url)
    os.kill(server, signal.SIGKILL)
    return server


def _pids():
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _holds(pid, name):
    try:
        return any(os.readlink(link) == name for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def _parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
