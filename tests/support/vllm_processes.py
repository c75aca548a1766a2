"""The processes of a real vLLM server: found by their group or port, or started by launch/vllm_server.sh."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from toy_runs import ROOT

# Starts its words as a process, and lives until it is killed or the tests end.
CALLER = "import subprocess, sys; subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL); sys.stdin.read()"
# For a vLLM server on a CPU: threads that are bound to cores wait for the tests beside them, and spin meanwhile. Bound,
# two workers would want a NUMA node each.
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def kill_worker(group: int) -> int:
    """Ends the worker of the server in process group ``group`` as AMX without permission does. Returns its id."""
    (worker,) = (pid for pid, line in members(group).items() if line.startswith("VLLM::Worker"))
    os.kill(worker, signal.SIGILL)
    return worker


def members(group: int) -> dict[int, str]:
    """Id and command line of each process of a group: vLLM overwrites what its workers show as environment."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rpartition(") ")[2].split()[2]) == group:
                found[int(path.name)] = (path / "cmdline").read_text()
        except OSError:
            continue
    return found


def serving(port: str) -> list[int]:
    """Ids of the processes that serve on ``port`` and of their children."""
    found, parents = set(), {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().split(b"\0")
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(") ")[2].split()[1])
        except OSError:
            continue
        if b"--port" in command and port.encode() in command:
            found.add(int(path.name))
    for _ in range(6):
        found |= {pid for pid, parent in parents.items() if parent in found}
    return sorted(found)


class LaunchedServer:
    """``launch/vllm_server.sh --follow-parent``, started by a process whose death is to end all that it started.

    Attributes:
      url: as the script gave it.
      log_path: of the server's output.
      processes: ids of those that serve, as they were when it became healthy.
    """

    def __init__(self, interpreter: str, directory: Path, model: Path, *options: str, timeout_s: float = 480):
        """Returns when the script has written the URL of the healthy server."""
        url_file, self.log_path = directory / "url", directory / "server.log"
        words = ["bash", str(ROOT / "launch/vllm_server.sh"), str(model), *options, "--follow-parent"]
        words += ["--url-file", str(url_file), "--log", str(self.log_path)]
        environment = {**os.environ, **ONE_THREAD, "RLJAX_VLLM_VENV": str(Path(interpreter).parents[1])}
        caller = [sys.executable, "-c", CALLER, *words]
        self._caller = subprocess.Popen(caller, stdin=subprocess.PIPE, env=environment)
        try:
            deadline = time.monotonic() + timeout_s
            while not url_file.exists():
                assert time.monotonic() < deadline, self.log_tail()
                time.sleep(0.25)
            self.url = url_file.read_text().strip()
            self.processes = serving(self.url.rpartition(":")[2])
        except BaseException:
            self.kill_caller()
            raise

    def alive(self) -> bool:
        """Whether the server can answer, now or later."""
        try:
            with DIRECT.open(f"{self.url}/health", timeout=2):
                return True
        except urllib.error.HTTPError as error:
            return error.code != 503
        except OSError:
            return bool(self.running())

    def running(self) -> list[int]:
        """Those of ``processes`` that are there."""
        return [pid for pid in self.processes if Path(f"/proc/{pid}").exists()]

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the server's output."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def kill_caller(self) -> None:
        """The caller dies without a word to what it started."""
        self._caller.kill()
        self._caller.wait()

    def wait_gone(self, timeout_s: float = 40) -> list[int]:
        """The processes that are still there after so many seconds."""
        deadline = time.monotonic() + timeout_s
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.25)
        return self.running()
