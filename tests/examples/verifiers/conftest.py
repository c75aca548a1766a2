"""Fixtures for environments of verifiers: the package's Python, and two servers of the toy base."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from generate_server import GenerateServer
from vllm_processes import FORKED

from rljax.rollout.build import load_jax_engine
from rljax.rollout.servers.vllm.server import VllmConfig, start

HERE = Path(__file__).parent
TOY = HERE.parents[2] / "rljax/configs/toy-base"
PYTHON = "RLJAX_VERIFIERS_PYTHON"


@pytest.fixture(scope="session")
def verifiers_python():
    """Returns a Python with the package, or skips the tests."""
    python = os.environ.get(PYTHON) or sys.executable
    if subprocess.run([python, "-c", "import verifiers.v1"], capture_output=True).returncode:
        pytest.skip(f"{python} has no verifiers: run tools/test_verifiers.sh")
    return python


@pytest.fixture(scope="session")
def toy_server():
    """Yields a server that samples with the embedded engine and the toy base in float32, and keeps its answers."""
    server = GenerateServer(load_jax_engine(TOY, "float32", 64))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def vllm_server(vllm_interpreter, tmp_path_factory):
    """Yields a real vLLM server that serves the toy base in float32."""
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    settings = {"max_model_len": 512, "max_num_seqs": 16, "max_logprobs": 16, "log_path": log, "extra_env": FORKED}
    server = start(VllmConfig(str(TOY), vllm_interpreter, dtype="float32", **settings), timeout_s=540)
    yield server
    server.stop()


@pytest.fixture
def forgetful_model(tmp_path):
    """Returns the toy base with a template that shows only the last message, so no turn extends the one before."""
    shutil.copytree(TOY, tmp_path / "forgetful")
    (tmp_path / "forgetful/chat_template.jinja").write_text("{{ messages[-1].content }}")
    return tmp_path / "forgetful"
