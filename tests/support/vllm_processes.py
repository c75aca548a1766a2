"""The processes of a real vLLM server, found by their group or port, or started by launch/vllm_server.sh."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from toy_runs import ROOT

# This program starts its words as a process. It lives until it is killed or the tests end.
CALLER = "import subprocess, sys; subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL); sys.stdin.read()"
# Settings of a vLLM server on a CPU. Threads bound to cores would wait for the tests beside them, and spin meanwhile.
# Two workers with bound threads would each need a NUMA node.
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
# These settings make the start three times as cheap. Threads of the caller would not survive in the forked processes.
FORKED = {**ONE_THREAD, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "forked_vllm"), str(ROOT)])}
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def kill_worker(group: int) -> int:
    """Ends the worker of the server in process group ``group`` with SIGILL, and returns its id.

    AMX without permission ends a worker with this signal.
    """
    (worker,) = (pid for pid, line in members(group).items() if line.startswith("VLLM::Worker"))
    os.kill(worker, signal.SIGILL)
    return worker


def members(group: int) -> dict[int, str]:
    """Returns the id and the command line of each process of a group.

    The environment does not identify them, because vLLM overwrites the one that its workers show.
    """
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rpartition(") ")[2].split()[2]) == group:
                found[int(path.name)] = (path / "cmdline").read_text()
        except OSError:
            continue
    return found


def serving(port: str) -> list[int]:
    """Returns the ids of the processes that serve on ``port`` and of their descendants."""
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
    """A server from ``launch/vllm_server.sh --follow-parent``; when its caller dies, everything must end.

    Attributes:
      url: The URL that the script wrote.
      log_path: The path of the server's output.
      processes: The ids of the serving processes when the server became healthy.
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
        """Returns the ids in ``processes`` that still exist."""
        return [pid for pid in self.processes if Path(f"/proc/{pid}").exists()]

    def log_tail(self, lines: int = 40) -> str:
        """Returns the last lines of the server's output."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def kill_caller(self) -> None:
        """Kills the caller, which cannot tell the processes that it started."""
        self._caller.kill()
        self._caller.wait()

    def wait_gone(self, timeout_s: float = 40) -> list[int]:
        """Waits until the processes are gone; returns those that still exist after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.25)
        return self.running()
