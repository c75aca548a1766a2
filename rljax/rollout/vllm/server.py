"""Starts a vLLM server as a process group, waits for its health, and stops it without leaving anything behind.

Standard library only, so that it runs under the trainer's interpreter and under vLLM's alike. Between the caller and
vLLM stands a *guard*: a small process that leads the group and holds a pipe from the caller. When the pipe closes,
whether by :meth:`VllmServer.stop` or because the caller died in any way, the guard ends the whole group.

``python -m rljax.rollout.vllm.server COMMAND...`` is the guard. To serve in the foreground there is
``launch/vllm_server.sh MODEL``, which runs ``tools/serve_vllm.py``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rljax.checks import check_choices
from rljax.errors import ServerFailedError
from rljax.rollout.addresses import private_address
from rljax.rollout.api_key import KEY_FILE, find_key_file, read_api_key

log = logging.getLogger(__name__)

Dtype = Literal["bfloat16", "float16", "float32"]
BACKEND = "rljax_file"
WORKER_EXTENSION = "rljax.rollout.vllm.plugin.WorkerExtension"
MIDDLEWARE = "rljax.rollout.middleware.RequireKey"
_REFUSED_ARGS = {  # arguments of vLLM that would undo what is checked here
    "--host": "give the address as host (vllm_server.sh --host), where it is checked",
    "--api-key": "ps shows it, and some routes stay open; give api_key_file (vllm_server.sh --api-key-file)",
    "--trust-remote-code": "it runs whatever code the model's directory holds",
}
_HEALTH_S = 2.0  # seconds that /health has to answer
_ENGINE_DIED = 503  # /health of a server whose engine or worker ended while its API process goes on
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever http_proxy says
_GRACE_S = 15.0  # seconds between asking vLLM to end and going on without its answer
_CLEANUP_S = 5.0  # seconds its helper processes then have
_CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "TORCH_COMPILE_DISABLE": "1",  # else the first request spends 11-18 s compiling
}


@dataclass(frozen=True)
class ServerConfig:
    """What to serve and where.

    Attributes:
      model: directory with ``config.json`` and safetensors, or a hub name.
      python: interpreter of the environment that holds vLLM and rljax's plugin.
      dtype: "bfloat16", "float16" or "float32"; must equal the dtype the trainer publishes.
      head_dtype: "float32" computes the LM head in float32, as ``precision.lm_head_dtype: float32`` wants; "model": in
        ``dtype``.
      host: address to bind: of loopback, or a private one with a key; whoever reaches it may replace the weights.
      port: 0 takes a free one.
      max_model_len: prompt plus response (tokens); None takes the model's own.
      max_num_seqs: most sequences decoded at once.
      api_key_file: file with the key that every route but /health then asks for; None takes ``$RLJAX_API_KEY_FILE``,
        and where that is not set either there is no key.
      log_path: where the server's output goes; None takes a temporary file.
      extra_args: further vLLM arguments; they win over all but the address.
      extra_env: further environment variables.
    """

    model: str
    python: str = sys.executable
    dtype: Dtype = "bfloat16"
    head_dtype: Literal["model", "float32"] = "model"
    host: str = "127.0.0.1"
    port: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 256
    api_key_file: Path | None = None
    log_path: Path | None = None
    extra_args: tuple[str, ...] = ()
    extra_env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choices(self)
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be in 0..65535, got {self.port}")
        object.__setattr__(self, "api_key_file", find_key_file(self.api_key_file))
        address = private_address(self.host)
        if self.api_key_file is not None:
            read_api_key(self.api_key_file)
        elif not address.is_loopback:
            raise ValueError(f"host {self.host} is not loopback: others reach it, so it needs an api_key_file")
        for argument in self.extra_args:
            name = argument.partition("=")[0].replace("_", "-")
            if name in _REFUSED_ARGS:
                raise ValueError(f"{name} is not passed to vLLM: {_REFUSED_ARGS[name]}")


def vllm_python(venv: str | os.PathLike[str] | None = None) -> Path:
    """Interpreter of vLLM's environment: ``venv``, else ``$RLJAX_VLLM_VENV``, else ``.venv-vllm`` beside the package.

    Raises:
      RuntimeError: there is no interpreter at that place.
    """
    checkout = Path(__file__).resolve().parents[3]
    root = Path(venv or os.environ.get("RLJAX_VLLM_VENV") or checkout / ".venv-vllm")
    python = root / "bin" / "python"
    if not python.exists():
        raise RuntimeError(f"no vLLM environment at {root}: run launch/install_vllm.sh or set RLJAX_VLLM_VENV")
    return python


def has_gpu() -> bool:
    """Whether an NVIDIA GPU answers on this machine."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free on ``host`` now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def command(config: ServerConfig, port: int, *, gpu: bool) -> list[str]:
    """The vLLM command line for ``config`` on ``port``."""
    args = [config.python, "-m", "vllm.entrypoints.openai.api_server"]
    args += ["--model", config.model, "--served-model-name", "policy"]
    args += ["--port", str(port), "--dtype", config.dtype]
    args += ["--max-num-seqs", str(config.max_num_seqs), "--max-logprobs", "20", "--seed", "0"]
    args += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    args += ["--enable-scale-out", "--skip-tokenizer-init", "--enable-prefix-caching"]
    args.append("--disable-uvicorn-access-log")
    args += ["--worker-extension-cls", WORKER_EXTENSION, "--weight-transfer-config", f'{{"backend": "{BACKEND}"}}']
    if config.max_model_len is not None:
        args += ["--max-model-len", str(config.max_model_len)]
    if config.head_dtype != "model":
        args += ["--hf-overrides", f'{{"head_dtype": "{config.head_dtype}"}}']
    if not gpu:
        args.append("--enforce-eager")
    if config.api_key_file is not None:
        args += ["--middleware", MIDDLEWARE]
    return [*args, *config.extra_args, "--host", config.host]


def environment(config: ServerConfig, *, gpu: bool) -> dict[str, str]:
    """The server's environment; what the caller has set already wins over the defaults for a CPU."""
    env = {**({} if gpu else _CPU_ENV), "VLLM_NO_USAGE_STATS": "1", **os.environ}
    env["VLLM_SERVER_DEV_MODE"] = "1"  # opens the pause and weight-update endpoints
    env["PYTHONUNBUFFERED"] = "1"
    if Path(config.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if config.api_key_file is not None:
        env[KEY_FILE] = str(config.api_key_file)
    return {**env, **config.extra_env}


class VllmServer:
    """One running server. Made by :func:`start`; ``stop`` may be called twice."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.port = config.port or free_port(config.host)
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"http://{host}:{self.port}"
        self.log_path = config.log_path or Path(tempfile.mkdtemp(prefix="rljax-vllm-"), "server.log")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        gpu = has_gpu()
        with self.log_path.open("wb") as sink:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "rljax.rollout.vllm.server", *command(config, self.port, gpu=gpu)],
                env=environment(config, gpu=gpu),
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the guard, which is also the id of the process group."""
        return self._guard.pid

    def alive(self) -> bool:
        """Whether the server can answer, now or later: its processes run, and its engine has not died."""
        return self._guard.poll() is None and self._health() != _ENGINE_DIED

    def healthy(self) -> bool:
        """Whether ``/health`` answers 200."""
        return self._health() == 200

    def _health(self) -> int | None:
        """Status of ``/health``; None when nothing answers."""
        try:
            with _DIRECT.open(f"{self.url}/health", timeout=_HEALTH_S) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the server's output."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def wait_healthy(self, timeout_s: float = 600.0) -> None:
        """Waits for health, saying every 15 seconds that it does.

        Raises:
          ServerFailedError: it ended, or was not healthy within ``timeout_s`` seconds; it is stopped then.
        """
        began = said = time.monotonic()
        while not self.healthy():
            now = time.monotonic()
            alive = self.alive()
            if not alive or now - began > timeout_s:
                why = "did not become healthy within" if alive else "ended after"
                self.stop()
                raise ServerFailedError(
                    f"the vLLM server {why} {now - began:.0f} s; the end of {self.log_path}:\n{self.log_tail()}"
                )
            if now - said >= 15.0:
                log.info("waiting for vLLM on %s: %.0f s (ready in 20-60 s on a CPU)", self.url, now - began)
                said = now
            time.sleep(0.25)

    def stop(self) -> None:
        """Ends every process of the group and waits until they are gone."""
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            self._guard.stdin.close()
        try:
            self._guard.wait(_GRACE_S + 2 * _CLEANUP_S + 5.0)
        except subprocess.TimeoutExpired:
            log.warning("vLLM's guard %d did not end by itself", self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._guard.wait()

    def kill(self) -> None:
        """Ends every process of the group at once, as a crash would, without asking vLLM."""
        self._guard.terminate()
        self.stop()

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def start(config: ServerConfig, timeout_s: float = 600.0) -> VllmServer:
    """Starts a server and returns it healthy.

    A free port that someone else took in the meantime is replaced, at most twice.

    Raises:
      ServerFailedError: it did not become healthy; nothing of it is left running.
    """
    for attempts_left in (2, 1, 0):
        server = VllmServer(config)
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
    """Runs ``argv`` until it ends or standard input closes, then ends its own process group; at once on SIGTERM."""
    at_once = threading.Event()
    # Handlers that do nothing: unlike ignored signals they are not inherited by the child.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    signal.signal(signal.SIGTERM, lambda number, frame: at_once.set())
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    while child.poll() is None and not at_once.is_set() and not select.select([0], [], [], 0.2)[0]:
        pass
    if child.poll() is not None:
        print(f"vLLM ended by itself with status {child.returncode}", flush=True)
    elif not at_once.is_set():
        child.terminate()
        _until(lambda: child.poll() is not None or at_once.is_set(), _GRACE_S)
        _until(lambda: not _others_in_group() or at_once.is_set(), _CLEANUP_S)
    # Resource trackers outlive the rest for a moment, to remove its shared memory.
    for pid, name in _others_in_group().items():
        if "resource_tracker" not in name:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    _until(lambda: child.poll() is not None and not _others_in_group(), _CLEANUP_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _until(done: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)


def _others_in_group() -> dict[int, str]:
    """Id and command line of each live process besides this one in its group (none where there is no /proc)."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        pid = int(directory.name)
        with contextlib.suppress(OSError):
            # A process that has ended and was not waited for yet has no command line.
            if pid != os.getpid() and os.getpgid(pid) == os.getpgrp() and (name := (directory / "cmdline").read_text()):
                found[pid] = name
    return found


if __name__ == "__main__":
    _guard(sys.argv[1:])
