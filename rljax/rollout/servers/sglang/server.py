"""Starts an SGLang server: its command line and environment. What any kind of server needs is in ``served.process``.

Standard library only. To serve in the foreground there is ``launch/sglang_server.sh MODEL``, which runs
``rljax serve sglang``.
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

_CPU_ENV = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
_CPU_ARGS = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
# The cache is _CPU_TOKENS large, whatever this share allows. Where others take more than that share of the machine's
# memory while it loads, SGLang ends.
_CPU_ARGS += ["--disable-overlap-schedule", "--mem-fraction-static", "0.5"]
_CPU_TOKENS = 32_768
_ROOM = 8  # tokens of the context that SGLang keeps back from prompt and response


@dataclass(frozen=True)
class ServerConfig(process.ServerConfig):
    """See served.process.ServerConfig."""

    kind: ClassVar[str] = "SGLang"
    refused_args: ClassVar[Mapping[str, str]] = refused_args("sglang_server.sh")


def sglang_python(venv: str | os.PathLike[str] | None = None) -> Path:
    """Interpreter of SGLang's environment: ``venv``, else ``$RLJAX_SGLANG_VENV``, else the checkout's ``.venv-sglang``.

    Raises:
      RuntimeError: there is no interpreter at that place.
    """
    return environment_python("SGLang", "RLJAX_SGLANG_VENV", venv)


def command(config: process.ServerConfig, port: int, *, gpu: bool) -> list[str]:
    """The SGLang command line for ``config`` on ``port``."""
    program = "sglang.launch_server" if gpu else "rljax.rollout.servers.sglang.launch_on_cpu"
    args = [config.python, "-m", program, "--model-path", config.model, "--served-model-name", "policy"]
    # Without --dtype the key-value cache of a float32 checkpoint would be float16.
    args += ["--port", str(port), "--dtype", config.dtype, "--random-seed", "0"]
    args += ["--max-running-requests", str(config.max_num_seqs), "--skip-tokenizer-init", "--skip-server-warmup"]
    args += ["--sampling-defaults", "openai", "--log-level-http", "warning"]
    if config.max_model_len is not None:
        args += ["--context-length", str(config.max_model_len + _ROOM)]
    if config.head_dtype == "float32":
        args.append("--enable-fp32-lm-head")
    if not gpu:
        args += [*_CPU_ARGS, "--max-total-tokens", str(_CPU_TOKENS)]
    return [*args, *config.extra_args, "--host", config.host]


def environment(config: process.ServerConfig, *, gpu: bool) -> dict[str, str]:
    """The server's environment; what the caller has set already wins over the defaults for a CPU."""
    env = {**({} if gpu else _CPU_ENV), **os.environ}
    env["PYTHONUNBUFFERED"] = "1"
    env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"  # else /health samples a token, and waits while it is paused
    env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # for the tokens that are kept back
    if Path(config.model).is_dir():
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if config.api_key_file is not None:
        env[KEY_FILE] = str(config.api_key_file)
    return {**env, **config.extra_env}


class SglangServer(process.ServerProcess):
    """One running SGLang server. Made by :func:`start`."""

    def _command(self, gpu: bool) -> list[str]:
        return command(self.config, self.port, gpu=gpu)

    def _environment(self, gpu: bool) -> dict[str, str]:
        return environment(self.config, gpu=gpu)


def start(config: ServerConfig, timeout_s: float = 600.0) -> SglangServer:
    """Starts a server and returns it healthy. Raises as ``served.process.start_server``."""
    return start_server(SglangServer, config, timeout_s)
