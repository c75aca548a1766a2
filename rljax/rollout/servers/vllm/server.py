"""The command line and environment of a vLLM server, and its start from Python (``rljax serve vllm``).

It needs the standard library alone, so that it runs under the trainer's interpreter and under vLLM's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rljax.rollout.servers import process
from rljax.rollout.servers.process import environment_python, refused_args, start_server
from rljax.weights.access import KEY_FILE

BACKEND = "rljax_file"
WORKER_EXTENSION = "rljax.rollout.servers.vllm.plugin.WorkerExtension"
MIDDLEWARE = "rljax.weights.access.RequireKey"
_CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "TORCH_COMPILE_DISABLE": "1",  # else the first request spends 11-18 s compiling
}


@dataclass(frozen=True)
class ServerConfig(process.ServerConfig):
    """The configuration of a vLLM server."""

    kind: ClassVar[str] = "vLLM"
    died_status: ClassVar[int | None] = 503
    refused_args: ClassVar[Mapping[str, str]] = refused_args("rljax serve vllm")


def vllm_python(venv: str | os.PathLike[str] | None = None) -> Path:
    """Returns the interpreter of vLLM's environment: ``venv``, ``$RLJAX_VLLM_VENV`` or ``.venv-vllm``.

    Raises:
      RuntimeError: There is no interpreter in the environment.
    """
    return environment_python("vLLM", "RLJAX_VLLM_VENV", venv)


def command(config: process.ServerConfig, port: int, *, gpu: bool) -> list[str]:
    """Returns the vLLM command line for ``config`` on ``port``. ``gpu``: Whether the machine has a GPU."""
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


def environment(config: process.ServerConfig, *, gpu: bool) -> dict[str, str]:
    """Returns the server's environment. Variables that the caller has set win over the defaults for a CPU."""
    env = {**({} if gpu else _CPU_ENV), "VLLM_NO_USAGE_STATS": "1", **os.environ}
    env["VLLM_SERVER_DEV_MODE"] = "1"  # opens the pause and weight-update endpoints
    env["PYTHONUNBUFFERED"] = "1"
    if Path(config.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if config.api_key_file is not None:
        env[KEY_FILE] = str(config.api_key_file)
    return {**env, **config.extra_env}


class VllmServer(process.ServerProcess):
    """One running vLLM server, which :func:`start` makes."""

    def _command(self, gpu: bool) -> list[str]:
        return command(self.config, self.port, gpu=gpu)

    def _environment(self, gpu: bool) -> dict[str, str]:
        return environment(self.config, gpu=gpu)


def start(config: ServerConfig, timeout_s: float = 600.0) -> VllmServer:
    """Starts a server and returns it healthy. Raises as ``start_server``."""
    return start_server(VllmServer, config, timeout_s)
