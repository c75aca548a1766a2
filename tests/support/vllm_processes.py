"""The processes of a real vLLM server, found by their group or port, or started by launch/vllm_server.sh."""

import contextlib
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
from toy_runs import ROOT
from waiting import until

from rljax.rollout.servers.process import ServerProcess

# This program starts its words as a process. It lives until it is killed or the tests end.
CALLER = "import subprocess, sys; subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL); sys.stdin.read()"
# Settings of a vLLM server on a CPU. Threads bound to cores would wait for the tests beside them, and spin meanwhile.
# Two workers with bound threads would each need a NUMA node.
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
# These settings make the start three times as cheap. Threads of the caller would not survive in the forked processes.
FORKED = {**ONE_THREAD, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "forked_vllm"), str(ROOT)])}
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def kill_server(server: ServerProcess) -> None:
    """Ends every process of a server at once, as a crash would."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(server.pid, signal.SIGTERM)
    server.stop()


def kill_worker(group: int) -> None:
    """Ends the worker of the server in process group ``group`` with SIGILL, as AMX without permission does."""
    (worker,) = (pid for pid, line in members(group).items() if line.startswith("VLLM::Worker"))
    os.kill(worker, signal.SIGILL)


def members(group: int) -> dict[int, str]:
    """Returns the id and the command line of each process of a group (vLLM overwrites its workers' environment)."""
    found = {}
    for one in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(one.pid) == group:
                found[one.pid] = " ".join(one.info["cmdline"] or ())
    return found


def serving(port: str) -> list[int]:
    roots = [one for one in psutil.process_iter(["cmdline"]) if {"--port", port} <= {*(one.info["cmdline"] or ())}]
    return sorted({each.pid for one in roots for each in (one, *one.children(recursive=True))})


class LaunchedServer:
    """A server from ``launch/vllm_server.sh --follow-parent``; when its caller dies, everything must end.

    ``processes`` has the ids of the serving processes when the server became healthy.
    """

    def __init__(self, interpreter: str, directory: Path, model: Path, *options: str):
        """Returns when the script has written the URL of the healthy server."""
        url_file, self.log_path = directory / "url", directory / "server.log"
        words = ["bash", str(ROOT / "launch/vllm_server.sh"), str(model), *options, "--follow-parent"]
        words += ["--url-file", str(url_file), "--log", str(self.log_path)]
        environment = {**os.environ, **ONE_THREAD, "RLJAX_VLLM_VENV": str(Path(interpreter).parents[1])}
        caller = [sys.executable, "-c", CALLER, *words]
        self._caller = subprocess.Popen(caller, stdin=subprocess.PIPE, env=environment)
        try:
            until(url_file.exists, 480, said=self.log_tail, every_s=0.25)
            self.url = url_file.read_text().strip()
            self.processes = serving(self.url.rpartition(":")[2])
        except BaseException:
            self.kill_caller()
            raise

    def alive(self):
        try:
            with DIRECT.open(f"{self.url}/health", timeout=2):
                return True
        except urllib.error.HTTPError as error:
            return error.code != 503
        except OSError:
            return bool(self.running())

    def running(self):
        return [*filter(psutil.pid_exists, self.processes)]

    def log_tail(self, lines=40):
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def kill_caller(self) -> None:
        """Kills the caller, which cannot tell the processes that it started."""
        self._caller.kill()
        self._caller.wait()

    def wait_gone(self) -> list[int]:
        """Waits until the processes are gone; returns those that still exist after 40 seconds."""
        with contextlib.suppress(AssertionError):
            until(lambda: not self.running(), 40, every_s=0.25)
        return self.running()
