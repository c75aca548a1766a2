"""The command line and environment of an SGLang server, and its start from Python (``rljax serve sglang``).

It needs the standard library alone, so that it runs under the trainer's interpreter and under SGLang's.
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
# The cache is _CPU_TOKENS large, whatever this share allows. SGLang ends where other programs take more than that share
# of the machine's memory while it loads.
_CPU_ARGS += ["--disable-overlap-schedule", "--mem-fraction-static", "0.5"]
_CPU_TOKENS = 32_768
_ROOM = 8  # The tokens of the context that SGLang keeps back from prompt and response.


@dataclass(frozen=True)
class ServerConfig(process.ServerConfig):
    """The configuration of an SGLang server."""

    kind: ClassVar[str] = "SGLang"
    refused_args: ClassVar[Mapping[str, str]] = refused_args("rljax serve sglang")


def sglang_python(venv: str | os.PathLike[str] | None = None) -> Path:
    """Returns the interpreter of SGLang's environment: ``venv``, ``$RLJAX_SGLANG_VENV`` or ``.venv-sglang``.

    Raises:
      RuntimeError: There is no interpreter in the environment.
    """
    return environment_python("SGLang", "RLJAX_SGLANG_VENV", venv)


def command(config: process.ServerConfig, port: int, *, gpu: bool) -> list[str]:
    """Returns the SGLang command line for ``config`` on ``port``. ``gpu``: Whether the machine has a GPU."""
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
    """Returns the server's environment. Variables that the caller has set win over the defaults for a CPU."""
    env = {**({} if gpu else _CPU_ENV), **os.environ}
    env["PYTHONUNBUFFERED"] = "1"
    env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"  # else /health samples a token, and waits while it is paused
    env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # makes room for the tokens that are kept back
    if Path(config.model).is_dir():
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if config.api_key_file is not None:
        env[KEY_FILE] = str(config.api_key_file)
    return {**env, **config.extra_env}


class SglangServer(process.ServerProcess):
    """One running SGLang server, which :func:`start` makes."""

    def _command(self, gpu: bool) -> list[str]:
        return command(self.config, self.port, gpu=gpu)

    def _environment(self, gpu: bool) -> dict[str, str]:
        return environment(self.config, gpu=gpu)


def start(config: ServerConfig, timeout_s: float = 600.0) -> SglangServer:
    """Starts a server and returns it healthy. Raises as ``start_server``."""
    return start_server(SglangServer, config, timeout_s)
